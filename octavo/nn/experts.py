"""`ExpertLayer`: the feed-forwards of a layer's experts; each token uses a few of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.nn.delta import ExpertsDelta
from octavo.nn.experts_spec import ExpertsForm, RoutingSpec
from octavo.nn.ops.experts import mix
from octavo.nn.ops.routing import Routing
from octavo.nn.quant.base import Part
from octavo.nn.quant.experts import (
    AddingExperts,
    ExpertsProduct,
    ExpertsScheme,
    FusingExperts,
    PackingExperts,
    SeparateExperts,
    SingleExperts,
)
from octavo.nn.quant.packed import Matrix
from octavo.nn.quant.packed_experts import PackedExperts
from octavo.nn.row_exchange import Route, RowExchange
from octavo.nn.shard import COL, ROW, Cut, cut
from octavo.nn.weights import Stored, Wanted, WeightLayer
from octavo.parallel.mesh import ALONE, Mesh
from octavo.parallel.rows import sum_rows


def experts_of_rank(num_experts: int, rank: int, ranks: int) -> range:
    """Return the experts that a rank has, if each has some: about an equal number for each."""
    return range(rank * num_experts // ranks, (rank + 1) * num_experts // ranks)


def rows_of_ranks(experts: Tensor, num_experts: int, ranks: int) -> Tensor:
    """Return for each rank whether a token chose one of its experts, [ranks, T] bool, from experts [T, top_k]."""
    own = [experts_of_rank(num_experts, rank, ranks) for rank in range(ranks)]
    return torch.stack([((experts >= one.start) & (experts < one.stop)).any(1) for one in own])


GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"


class ExpertLayer(WeightLayer):
    """down(act(gate(x)) * up(x)), or down(act(up(x))), of each token's experts, weighted and summed.

    A checkpoint stores each product as `path.expert.name.suffix`. Over several ranks every expert is divided, as a
    dense feed-forward is, so that all ranks have equal work however tokens choose; or each rank has some of the experts
    (`ExpertsForm.own`), with larger matrices. Either way the ranks' outputs are summed.

    Attributes:
        scheme: stores the weights and multiplies with them.
        delta: additions to the experts' products, such as those of low-rank adapters; None for none. The scheme must be
            `AddingExperts` if it sorts; otherwise `SingleExperts`, and steps are not recorded with it.
    """

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, routing: Routing, added: Tensor | None = None, /) -> Tensor: ...

    def __init__(
        self,
        path: str,
        device: torch.device,
        form: ExpertsForm,
        size: int,
        scheme: ExpertsScheme,
        mesh: Mesh = ALONE,
        *,
        exchanges_rows: bool = False,
        exchange: RowExchange | None = None,
    ) -> None:
        """
        Args:
            form: the products of this rank.
            size: outputs of `gate` and `up` over all ranks.
            exchanges_rows: with whole experts, ranks send only the rows of tokens that chose theirs.
            exchange: brings the tokens of all ranks to their experts, if each rank has tokens of its own; None if all
                ranks have the same tokens.
        """
        super().__init__(path, device)
        self.form, self.scheme, self.mesh = form, scheme, mesh
        self.delta: ExpertsDelta | None = None
        self.exchange = exchange
        self.exchanges_rows = exchanges_rows and mesh.size > 1 and form.own is not None
        hidden = form.hidden_size
        self._cuts = ALONE if form.own else mesh
        # If ranks divide an expert, only rank 0 has the bias of its output.
        biased = form.bias and self._cuts.rank == 0
        self._gate_up = [Part(name, hidden, size, form.bias) for name in ((GATE, UP) if form.gated else (UP,))]
        self._down = [Part(DOWN, size, hidden, biased)]
        self.superseded = tuple(self._elsewhere())
        self._packed: PackedExperts | None = None
        self._fusing = scheme if mesh.size == 1 and isinstance(scheme, FusingExperts) else None

    def route(self, logits: Tensor, spec: RoutingSpec, correction: Tensor | None = None) -> Routing:
        """Choose the experts of tokens with these logits [T, num_experts]; see `route` in `nn/ops/routing.py`."""
        return self.scheme.route(logits, spec, correction)

    def forward(self, x: Tensor, routing: Routing, added: Tensor | None = None) -> Tensor:
        """Return the sum of the experts' outputs and of `added`: [T, hidden_size] for x and `added` [T, hidden_size],
        as a new tensor.

        Args:
            added: the same on all ranks that have the same tokens.
        """
        if self.delta is not None:
            y = self._summed(self._mix_adding(x, routing, self.delta), routing)
            return y if added is None else y.add_(added)
        if self.mesh.size == 1:
            return self.scheme.mix(x, routing, added)
        y = self._summed(self.scheme.mix(x, routing), routing)
        return y if added is None else y.add_(added)

    def _mix_adding(self, x: Tensor, routing: Routing, delta: ExpertsDelta) -> Tensor:
        scheme = self.scheme
        if delta.sorts:
            assert isinstance(scheme, AddingExperts), "the scheme does not sort choices"
            return scheme.mix_adding(x, routing, delta)
        assert isinstance(scheme, SingleExperts), "deltas need the products of single experts"
        return mix(x, routing, scheme.gate_up_of, scheme.down_of, self.form, delta)

    def _summed(self, y: Tensor, routing: Routing) -> Tensor:
        """Return the sum over ranks of y [T, hidden_size], which may be overwritten."""
        if not self.exchanges_rows:
            return self.mesh.all_reduce(y)
        return sum_rows(y, self._holders(routing.experts), self.mesh)

    def _holders(self, experts: Tensor) -> Tensor:
        return rows_of_ranks(experts, self.form.num_experts, self.mesh.size)

    def exchanged(self, x: Tensor, route: Route, added: Tensor | None = None) -> Tensor:
        """Return what `forward` does where each rank has tokens of its own (`exchange`). All ranks must call it.

        Args:
            x: this rank's tokens [T, hidden_size]; T may be 0.
        """
        assert self.exchange is not None, "all ranks have the same tokens"
        y = self.exchange.mix(x, route, self.scheme.mix, self._holders)
        return y if added is None else y.add_(added)

    @property
    def fusing(self) -> FusingExperts | None:
        """The scheme, if it can fuse operations around its products and nothing comes in between."""
        return self._fusing if self.delta is None else None

    @property
    def products(self) -> tuple[list[tuple[Part, Cut]], list[tuple[Part, Cut]]]:
        """The projections of an expert's two products, before and after the gate, and their features on this rank."""
        first, second = (
            [(part, cut(shard, 0, part.out_features, part.in_features, self._cuts)) for part in parts]
            for parts, shard in ((self._gate_up, COL), (self._down, ROW))
        )
        return first, second

    def wanted(self) -> list[Wanted]:
        return [want for expert in self.form.owned for want in self._wanted(expert)]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        given = iter(tensors)
        self.fill(lambda _: next(given))

    def fill(self, fetch: Callable[[Wanted], Stored | None]) -> None:
        """Fetch and take one expert after another, so that one expert's tensors are in memory twice, not all."""
        for own, expert in enumerate(self.form.owned):
            tensors = {want.name: fetch(want) for want in self._wanted(expert)}
            self.scheme.prepare(
                own,
                [self._tensors(expert, part, tensors) for part in self._gate_up],
                [self._tensors(expert, part, tensors) for part in self._down],
            )

    def _wanted(self, expert: int) -> list[Wanted]:
        return [want for product in self.products for want in self._wanted_by(expert, product)]

    def _wanted_by(self, expert: int, product: Sequence[tuple[Part, Cut]]) -> list[Wanted]:
        return [
            Wanted(
                f"{self.path}.{expert}.{part.name}.{suffix}",
                spec,
                blocks=self.scheme.takes_blocks,
                codes=self.scheme.takes_codes,
                index=own.index(spec, part.out_features, part.in_features),
            )
            for part, own in product
            for suffix, spec in self.scheme.stored(part).items()
        ]

    def _elsewhere(self) -> Iterator[str]:
        """Yield the names of this layer's tensors that only other ranks have."""
        for expert in range(self.form.num_experts):
            if expert not in self.form.owned:
                for part in (*self._gate_up, *self._down):
                    yield from (f"{self.path}.{expert}.{part.name}.{suffix}" for suffix in self.scheme.stored(part))
            elif self.form.bias and not self._down[0].bias:
                yield f"{self.path}.{expert}.down_proj.bias"

    def _tensors(self, expert: int, part: Part, tensors: Mapping[str, Stored | None]) -> dict[str, Stored]:
        found = {}
        for suffix in self.scheme.stored(part):
            tensor = tensors[f"{self.path}.{expert}.{part.name}.{suffix}"]
            assert tensor is not None, "experts' tensors are not optional"
            found[suffix] = tensor
        return found

    def pack(self) -> None:
        """Convert the weights to the CPU kernels' format, expert by expert, for `emit`; the other methods can't be used
        afterwards."""
        assert isinstance(self.scheme, SeparateExperts)
        self._packed = PackedExperts(self.form, self.scheme.gate_ups, self.scheme.downs)

    def take_packed(self, other: WeightLayer) -> None:
        """Take over the packed weights of another layer of this kind, which must not be used any more."""
        assert isinstance(other, ExpertLayer)
        self._packed = other._packed

    @property
    def packed(self) -> PackedExperts:
        """The weights for a native program."""
        assert self._packed is not None, "the layer is not packed"
        return self._packed

    @property
    def packed_products(self) -> Iterator[tuple[Matrix, bool, list[Wanted]]]:
        """The packed matrices of this rank's experts, whether each is paired, and its tensors; none if the layer is not
        packed."""
        if self._packed is None:
            return
        first, second = self.products
        for product, matrices in ((first, self._packed.expand), (second, self._packed.reduce)):
            for expert, matrix in zip(self.form.owned, matrices, strict=True):
                yield matrix, product is first and self.form.gated, self._wanted_by(expert, product)

    @property
    def packed_on_gpu(self) -> Iterator[tuple[ExpertsProduct, list[Wanted]]]:
        """The matrices of both products that are packed on a GPU, and the tensors of this rank's first expert."""
        if isinstance(self.scheme, PackingExperts):
            for product, matrices in zip(self.products, self.scheme.both, strict=True):
                if matrices.packed_as is not None:
                    yield matrices, self._wanted_by(self.form.owned.start, product)

    @property
    def recordable(self) -> bool:
        """Whether steps can be recorded in graphs, since no data passes between host and device."""
        exchange = self.exchange
        return self.scheme.recordable and not self.exchanges_rows and (exchange is None or exchange.recordable)

    @property
    def holders(self) -> tuple[object, ...]:
        return (self, *self.scheme.holders)

    @property
    def nbytes(self) -> int:
        return self.scheme.nbytes if self._packed is None else self._packed.nbytes

    def extra_repr(self) -> str:
        form = self.form
        return f"{len(form.owned)} experts: {form.hidden_size} -> {form.size} -> {form.hidden_size}"
