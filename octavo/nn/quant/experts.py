"""Weights of a layer's experts: the interface of their storage, and experts with a scheme each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from octavo.nn.delta import ExpertsDelta
from octavo.nn.experts_spec import ExpertsForm, RoutingSpec
from octavo.nn.ops.experts import mix
from octavo.nn.ops.routing import Routing, route
from octavo.nn.weights import Stored, TensorSpec

if TYPE_CHECKING:
    from octavo.nn.quant.base import Part, Scheme
    from octavo.nn.stream import Summands


class ExpertsScheme(Protocol):
    """Weights of a layer's experts: the checkpoint's tensors of each, and multiplication with those that were chosen.

    Checkpoints that store the tensors of all experts in one are read as if each had its own
    (`models/load/arranged.py`), so that no more than one expert's tensors are in memory twice.
    """

    @property
    def takes_blocks(self) -> bool:
        """Whether quantized weights may be delivered as `QuantizedBlocks`."""
        ...

    @property
    def takes_codes(self) -> bool:
        """Whether these may have a codebook."""
        ...

    @property
    def recordable(self) -> bool:
        """Whether `route` and `mix` can be recorded in graphs, since no data passes between host and device."""
        ...

    def stored(self, part: Part) -> dict[str, TensorSpec]:
        """Return checkpoint suffix -> tensor, of one expert's gate, up or down projection."""
        ...

    def prepare(
        self, expert: int, gate_up: Sequence[Mapping[str, Stored]], down: Sequence[Mapping[str, Stored]]
    ) -> None:
        """Take the tensors of one of this rank's experts, once after loading. They may be views into a mapped file."""
        ...

    def route(self, logits: Tensor, spec: RoutingSpec, correction: Tensor | None = None) -> Routing:
        """Choose the experts of tokens with these logits [T, num_experts]; see `route` in `nn/ops/routing.py`."""
        ...

    def mix(self, x: Tensor, routing: Routing, added: Tensor | None = None) -> Tensor:
        """Return each token's sum of its experts' outputs, plus `added`: [T, hidden_size] for x and `added`
        [T, hidden_size], as a new tensor. Experts of other ranks add nothing."""
        ...

    @property
    def holders(self) -> tuple[object, ...]:
        """The objects among whose attributes are the weights."""
        ...

    @property
    def nbytes(self) -> int: ...


@runtime_checkable
class FusingExperts(Protocol):
    """An `ExpertsScheme` that can leave sums to the next norm.

    Of one token, it can fuse the norm into its first product, and the residual sum into its second.
    """

    def summands(self, x: Tensor, routing: Routing, added: Tensor | None = None) -> Tensor | Summands:
        """Return the sum of `mix`, or what remains to be summed, if that is faster."""
        ...

    def gate_rows(self, x: Tensor, norm: tuple[Tensor, float], routing: Routing) -> Tensor:
        """Return the gated products [top_k, size] of the RMS norm of x [1, hidden_size] with its experts.

        Args:
            norm: its weight and epsilon.
        """
        ...

    def add_rows(self, inner: Tensor, routing: Routing, stream: Tensor) -> None:
        """Add what follows the gated products `inner` to stream [1, hidden_size], in place and rounded once."""
        ...


@runtime_checkable
class SingleExperts(Protocol):
    """An `ExpertsScheme` that can multiply with the matrices of one expert, of those of this rank."""

    def gate_up_of(self, expert: int, x: Tensor) -> Tensor:
        """Return the product before the gate: [N, hidden_size] to [N, 2 * size], as a new tensor."""
        ...

    def down_of(self, expert: int, x: Tensor) -> Tensor:
        """Return the product after the gate: [N, size] to [N, hidden_size], as a new tensor."""
        ...


@runtime_checkable
class AddingExperts(Protocol):
    """An `ExpertsScheme` that can add to its products of sorted choices."""

    def mix_adding(self, x: Tensor, routing: Routing, delta: ExpertsDelta) -> Tensor:
        """Return the sum of `mix` with the additions of a delta that sorts."""
        ...


class ExpertsProduct(Protocol):
    """The matrices of one product of all experts of a layer, which may be packed."""

    @property
    def packed_as(self) -> str | None:
        """The form, for messages; None if the matrices are plain."""
        ...

    @property
    def layout(self) -> object:
        """What kernels know of the matrices but their tensors: it must not change while steps are recorded."""
        ...

    @property
    def is_rounded(self) -> bool:
        """Whether the checkpoint's weights were rounded when they were packed."""
        ...

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        """Return the product of x [T, K] with one expert's packed matrix, plus its bias: [T, N]."""
        ...


@runtime_checkable
class PackingExperts(Protocol):
    """An `ExpertsScheme` that may keep weights in a form of its own, whose products are checked at the start."""

    @property
    def both(self) -> tuple[ExpertsProduct, ExpertsProduct]:
        """The products before and after the gate."""
        ...


class SeparateExperts:
    """An `ExpertsScheme` of ordinary schemes, two for each expert, so any form of storage will do.

    Attributes:
        gate_ups, downs: the scheme of the products before and after the gate, of each expert of this rank.
    """

    recordable = False

    def __init__(self, form: ExpertsForm, make: Callable[[], Scheme]) -> None:
        self.form = form
        self.gate_ups: list[Scheme] = [make() for _ in form.owned]
        self.downs: list[Scheme] = [make() for _ in form.owned]

    def stored(self, part: Part) -> dict[str, TensorSpec]:
        return self.gate_ups[0].stored(part)

    @property
    def takes_blocks(self) -> bool:
        return self.gate_ups[0].takes_blocks

    @property
    def takes_codes(self) -> bool:
        return self.gate_ups[0].takes_codes

    def prepare(
        self, expert: int, gate_up: Sequence[Mapping[str, Stored]], down: Sequence[Mapping[str, Stored]]
    ) -> None:
        self.gate_ups[expert].prepare(gate_up)
        self.downs[expert].prepare(down)

    def route(self, logits: Tensor, spec: RoutingSpec, correction: Tensor | None = None) -> Routing:
        return route(logits, spec, correction)

    def mix(self, x: Tensor, routing: Routing, added: Tensor | None = None) -> Tensor:
        y = mix(x, routing, self.gate_up_of, self.down_of, self.form)
        return y if added is None else y.add_(added)

    def gate_up_of(self, expert: int, x: Tensor) -> Tensor:
        return self.gate_ups[expert].apply(x)

    def down_of(self, expert: int, x: Tensor) -> Tensor:
        return self.downs[expert].apply(x)

    @property
    def holders(self) -> tuple[object, ...]:
        return (*self.gate_ups, *self.downs)

    @property
    def nbytes(self) -> int:
        return sum(scheme.nbytes for scheme in (*self.gate_ups, *self.downs))
