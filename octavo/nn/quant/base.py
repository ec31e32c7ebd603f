"""The interface of quantization schemes: storage of a linear layer's weights. There is one object per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, Protocol, runtime_checkable

import torch
from torch import Tensor

from octavo.nn.delta import Addition, Delta
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.quant.experts import ExpertsScheme
from octavo.nn.rounded import Rounded
from octavo.nn.stream import StreamNorm
from octavo.nn.weights import Stored, TensorSpec

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Part:
    """One projection of a (possibly fused) linear layer, as checkpoints name it."""

    name: str
    in_features: int
    out_features: int
    bias: bool = False

    def plain_specs(self, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Return the checkpoint's tensors if its weights are not quantized."""
        specs = {"weight": TensorSpec((self.out_features, self.in_features), dtype, out_dim=0, in_dim=1)}
        if self.bias:
            specs["bias"] = TensorSpec((self.out_features,), dtype, out_dim=0)
        return specs


class Scheme(Protocol):
    """Weights of one linear layer: the checkpoint's tensors, and multiplication with them."""

    takes_blocks: bool
    """Whether quantized weights may be delivered as `QuantizedBlocks`."""
    takes_codes: bool
    """Whether these may have a codebook."""

    def stored(self, part: Part) -> dict[str, TensorSpec]:
        """Return checkpoint suffix -> tensor, such as {"weight": ..., "bias": ...}."""
        ...

    def prepare(self, parts: Sequence[Mapping[str, Stored]]) -> None:
        """Fuse and repack, once after loading. `parts` follow `stored`; they may be views into a mapped file."""
        ...

    def apply(self, x: Tensor) -> Tensor:
        """Return x @ W^T + b: [..., in] to [..., sum of the parts' outputs], as a new contiguous tensor."""
        ...

    def wide(self, x: Tensor) -> Tensor:
        """Like `apply`, unrounded (float32) if that costs little."""
        ...

    def experts(self, form: ExpertsForm) -> ExpertsScheme:
        """Return storage of this kind for a layer's experts; `self` stays empty and is not used."""
        ...

    @property
    def nbytes(self) -> int: ...


class Schemes(Protocol):
    """Chooses a scheme for each linear layer, by the checkpoint's configuration."""

    def at(self, path: str, parts: Sequence[Part]) -> Scheme:
        """Return a new scheme for the layer at `path`, in the checkpoint's names."""
        ...


@dataclass(frozen=True, slots=True)
class Everywhere:
    """`Schemes` of one kind for all layers."""

    make: Callable[[], Scheme]

    def at(self, path: str, parts: Sequence[Part]) -> Scheme:
        return self.make()


@dataclass(frozen=True, slots=True)
class Apart:
    """`Schemes` of one kind for the projection of this full name, and others for all other layers."""

    name: str
    make: Callable[[], Scheme]
    others: Schemes

    def at(self, path: str, parts: Sequence[Part]) -> Scheme:
        names = [f"{path}.{part.name}".strip(".") for part in parts]
        return self.make() if names == [self.name] else self.others.at(path, parts)


def everywhere(make: Callable[P, Scheme], *args: P.args, **kwargs: P.kwargs) -> Everywhere:
    """Return `Schemes` that make every layer's scheme with these arguments."""
    return Everywhere(partial(make, *args, **kwargs))


@runtime_checkable
class Packing(Scheme, Protocol):
    """A scheme that may keep weights in a form of its own, whose products are checked at the start."""

    dtype: torch.dtype
    """Of activations."""

    @property
    def packed_as(self) -> str | None:
        """The form, for messages; None if the weights are a plain matrix."""
        ...

    @property
    def is_rounded(self) -> bool:
        """Whether the checkpoint's weights were rounded when they were packed."""
        ...


@runtime_checkable
class QuantizingAtLoad(Protocol):
    """A scheme, of a layer or of experts, that may quantize plain matrices when they are loaded."""

    def kept_bytes(self, shape: Sequence[int]) -> int | None:
        """Return at most how many bytes a plain matrix [N, K] takes; None if it is not quantized."""
        ...


@runtime_checkable
class RoundingScheme(Protocol):
    """A scheme that can multiply activations in 8 bits, rounded by the operation before it.

    Attributes:
        inverse: [1] float32: rows are multiplied by it and rounded to E4M3; None if each row has a scale of its own.
    """

    inverse: Tensor | None

    def takes_rounded(self, rows: int) -> bool:
        """Return whether it multiplies this number of rows so; the methods below need it."""
        ...

    def round_norm(self, weight: Tensor, eps: float) -> StreamNorm[Rounded]:
        """Return a root-mean-square norm that rounds its results."""
        ...

    def round_gated(self, gate_up: Tensor) -> Rounded:
        """Return silu(first half) * second half of gate_up [T, 2 * in], rounded."""
        ...

    def multiply_rounded(self, x: Rounded, dtype: torch.dtype | None = None) -> Tensor:
        """Return the product of rounded x [T, in], [T, out] of this dtype; None for the scheme's."""
        ...


@runtime_checkable
class Fusing(Protocol):
    """A scheme that can fuse norm, gate or residual add into the product's launch, depending on the number of rows."""

    dtype: torch.dtype
    fused_rows: int
    """Most rows supported by `fused`."""

    def fused(
        self,
        x: Tensor,
        *,
        norm: tuple[Tensor, float] | None = None,
        gated: bool = False,
        add_to: Tensor | None = None,
        dtype: torch.dtype | None = None,
        delta: Delta | None = None,
    ) -> Tensor:
        """See `fused_product` in `nn/ops/few_rows.py`; with a delta that supports these rows, plus its addition."""
        ...

    def gated(self, x: Tensor, addition: Addition | None = None) -> Tensor:
        """Return silu(first half) * second half of the outputs, not rounded in between if that is faster.

        Args:
            addition: to the outputs, before the gate.
        """
        ...

    def leave(self, stream: Tensor, x: Tensor) -> Tensor | None:
        """Add x [T, in] @ W^T to stream [T, out], in place, in the product's own launch and rounded once.

        If that is faster, leave the stream unchanged and return the product in parts [P, T, out], for the next norm to
        add. For layers without a bias, and a stream of their dtype.
        """
        ...
