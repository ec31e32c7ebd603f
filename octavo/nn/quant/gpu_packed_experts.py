"""Quantized experts on a GPU, stacked and kept packed; kernels widen them in registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.ops import expert_tiles, packed_expert_rows, packed_expert_tiles
from octavo.nn.ops.expert_products import linear
from octavo.nn.ops.expert_weights import Matrices, PackedMatrices, StackedWeights
from octavo.nn.ops.floats import Floats
from octavo.nn.quant.blocks import dequantized
from octavo.nn.quant.gpu_experts import DeviceExperts
from octavo.nn.quant.pack_experts import PackedMatrix, fitted, from_floats, pack_expert, put, refined, stacked
from octavo.nn.weights import QuantizedBlocks, Stored, plain, tensor_bytes

if TYPE_CHECKING:
    from octavo.nn.quant.online import Online

_FOUR_BITS = {"integers": "integers", "e2m1": "floats", "table": "codes"}
"""Kind of numbers of 4 bits -> form, for messages."""


class ExpertMatrices:
    """The matrices of one product of all experts of a layer, packed if those of all have one form, else plain.

    Attributes:
        codes, scales, minima, book: of packed matrices; see `PackedMatrices`.
        weight: [E, N, K], of plain ones.
        bias: [E, N], if there are biases.
    """

    def __init__(
        self, count: int, dtype: torch.dtype, device: torch.device, online: Online | None, *, rounds: bool
    ) -> None:
        self.count, self.dtype, self.device = count, dtype, device
        self._online, self._rounds = online, rounds
        self._form: PackedMatrices | None = None
        self.codes: Tensor | None = None
        self.scales: Tensor | None = None
        self.minima: Tensor | None = None
        self.book: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def take(self, expert: int, parts: Sequence[Mapping[str, Stored]]) -> None:
        """Store an expert's fused parts."""
        weights = [part["weight"] for part in parts]
        made = self._packed(weights) if self.weight is None else None
        if made is not None:
            self._hold(stacked(made, self.count, self.dtype) if self._form is None else refined(self._matrices, made))
            made = fitted(made, self._matrices)
        if made is not None:
            put(self._matrices, expert, made)
        else:
            values = torch.cat([self._plain(weight) for weight in weights])
            if self.weight is None:
                self._expand(values.shape)
            assert self.weight is not None
            self.weight[expert] = values
        if "bias" in parts[0]:
            biases = [plain(part["bias"]) for part in parts]
            if self.bias is None:
                outputs = sum(len(bias) for bias in biases)
                self.bias = torch.empty(self.count, outputs, dtype=self.dtype, device=self.device)
            torch.cat(biases, out=self.bias[expert])

    @property
    def matrices(self) -> Matrices:
        """The matrices, for products; an empty tensor before any is stored."""
        if self.codes is not None:
            return self._matrices
        return torch.empty(0) if self.weight is None else self.weight

    @property
    def packed_as(self) -> str | None:
        """The form, for messages; None if the matrices are plain."""
        if self.codes is None:
            return None
        minima = "" if self.minima is None else " with minima"
        if self.codes.dtype == torch.int16:
            return f"4-bit {_FOUR_BITS[self._matrices.kind]}{minima}"
        return f"8-bit {'floats' if self.codes.is_floating_point() else 'integers'}{minima}"

    @property
    def layout(self) -> object:
        """See `ExpertsProduct`."""
        form, tensors = self._form, (self.codes, self.scales, self.minima)
        dtypes = tuple(None if one is None else one.dtype for one in tensors)
        if form is None:
            return None
        return form.inputs, form.group, form.words, form.kind, form.rounds, form.tiled, dtypes

    def value(self, expert: int) -> Tensor:
        """Return an expert's matrix [N, K] in the activations' dtype."""
        if self.weight is not None:
            return self.weight[expert]
        return self._matrices.values(expert).to(self.dtype)

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        """Return the product of x [T, K] with an expert's packed matrix, plus its bias: [T, N]."""
        return linear(x.to(self.device, self.dtype), self._matrices, self.bias, expert)

    @property
    def is_rounded(self) -> bool:
        """Whether the checkpoint's weights were rounded when they were packed."""
        return self.codes is not None and self._online is not None

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.codes, self.scales, self.minima, self.book, self.weight, self.bias)

    @property
    def _matrices(self) -> PackedMatrices:
        assert self._form is not None, "the matrices are plain"
        assert self.codes is not None
        assert self.scales is not None
        return replace(self._form, codes=self.codes, scales=self.scales, minima=self.minima, book=self.book)

    def _hold(self, matrices: PackedMatrices) -> None:
        self.codes, self.scales, self.minima, self.book = (
            matrices.codes,
            matrices.scales,
            matrices.minima,
            matrices.book,
        )
        nothing = torch.empty(0, dtype=self.codes.dtype)
        self._form = replace(
            matrices, codes=nothing, scales=nothing, minima=None, book=None
        )  # what may be replaced is above

    def _packed(self, weights: Sequence[Stored]) -> PackedMatrix | None:
        blocks = [weight for weight in weights if isinstance(weight, QuantizedBlocks)]
        if len(blocks) == len(weights):
            return pack_expert(blocks, self.device, rounds=self._rounds)
        if blocks or self._online is None or not self._online.fits(plain(weights[0])):
            return None
        made = self._online.round([plain(weight) for weight in weights])
        if isinstance(made, Floats):
            return from_floats(made)
        group = self._online.group_of(made[0].values.shape[1])
        return pack_expert(made, self.device, rounds=False, group=group)

    def _plain(self, weight: Stored) -> Tensor:
        return weight if isinstance(weight, Tensor) else dequantized(weight, self.dtype).to(self.device)

    def _expand(self, shape: Sequence[int]) -> None:
        """Have room for plain matrices [N, K], and move there what is packed."""
        expert_tiles.usable(self.device, self.dtype)  # tried now rather than in a step
        self.weight = torch.empty(self.count, *shape, dtype=self.dtype, device=self.device)
        if self.codes is not None:
            matrices = self._matrices
            for expert in range(self.count):
                self.weight[expert] = matrices.values(expert)
        self.codes = self.scales = self.minima = self.book = self._form = None


class PackedStack(DeviceExperts):
    """Like `StackedExperts`, of matrices that may be packed.

    Attributes:
        gate_up, down: the products before and after the gate.
    """

    takes_blocks = takes_codes = True

    def __init__(
        self,
        form: ExpertsForm,
        dtype: torch.dtype,
        device: torch.device,
        *,
        online: Online | None = None,
        rounds: bool = False,
    ) -> None:
        """See `PackedOnGpu`."""
        super().__init__(form, dtype, device)
        self._online = online
        self.gate_up, self.down = (
            ExpertMatrices(len(form.owned), dtype, device, online, rounds=rounds) for _ in range(2)
        )
        self._began = False

    def prepare(
        self, expert: int, gate_up: Sequence[Mapping[str, Stored]], down: Sequence[Mapping[str, Stored]]
    ) -> None:
        self.gate_up.take(expert, gate_up)
        self.down.take(expert, down)
        if not self._began:
            self._began = True
            self._compile_ahead()

    def _compile_ahead(self) -> None:
        packed_expert_rows.usable(self.device)  # tried now rather than in a step
        x = torch.empty(1, 1, dtype=self.dtype, device=self.device)
        for product in self.both:
            if isinstance(product.matrices, PackedMatrices):
                first = product is self.gate_up
                packed_expert_tiles.compile_ahead(x, product.matrices, product.bias, self.form, first=first)
                expert_tiles.serves_rounded(x, product.matrices, self.form, first=first)  # likewise

    def gate_up_of(self, expert: int, x: Tensor) -> Tensor:
        bias = self.gate_up.bias
        return F.linear(x, self.gate_up.value(expert), None if bias is None else bias[expert])

    def down_of(self, expert: int, x: Tensor) -> Tensor:
        bias = self.down.bias
        return F.linear(x, self.down.value(expert), None if bias is None else bias[expert])

    @property
    def stacked(self) -> StackedWeights:
        first, second = self.gate_up, self.down
        return StackedWeights(first.matrices, second.matrices, first.bias, second.bias, self.form.owned.start)

    def kept_bytes(self, shape: Sequence[int]) -> int | None:
        return None if self._online is None else self._online.kept_bytes(shape)

    @property
    def both(self) -> tuple[ExpertMatrices, ExpertMatrices]:
        return self.gate_up, self.down

    @property
    def holders(self) -> tuple[object, ...]:
        return self.gate_up, self.down

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes
