"""Adapters of experts, in torch: additions to the products of the experts that a token chose.

An adapter has matrices for each expert. Files have two forms: a pair for each expert's projection, under its own name;
or, as PEFT makes them for parameters of three dimensions (`target_parameters`), one pair for a projection of all
experts.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

from octavo.features.lora.delta import Weights
from octavo.features.lora.layout import Target
from octavo.features.lora.tables import Batch
from octavo.nn.delta import ExpertsDelta


class TorchExperts(ExpertsDelta):
    """The additions of all adapters to the experts of one layer.

    Args:
        targets: (expert, whether it is the product after the gate) -> index and target.
    """

    def __init__(self, targets: Mapping[tuple[int, bool], tuple[int, Target]], weights: Weights, batch: Batch) -> None:
        self._targets = targets
        self._weights = weights
        self._batch = batch

    def add_to(self, y: Tensor, x: Tensor, expert: int, rows: Tensor, *, down: bool) -> None:
        index, target = self._targets[expert, down]
        assigned, tables = self._batch.of(target), self._weights.tables
        adapters = assigned.adapter.index_select(0, rows)
        for adapter in assigned.groups:
            spans = tables.layouts[adapter].spans
            if not any((index, part) in spans for part in range(len(target.parts))):
                continue
            mine = (adapters == adapter).nonzero()[:, 0]
            given = x.index_select(0, mine).float()
            start = 0
            for part, one in enumerate(target.parts):
                outputs = slice(start, start + one.own_outputs)
                start = outputs.stop
                span = spans.get((index, part))
                if span is None or not len(mine):
                    continue
                a = self._weights.rows(adapter, span.a, span.rank, one.own_inputs)
                b = self._weights.b(adapter, span, one.own_outputs)
                y[:, outputs].index_add_(0, mine, (F.linear(given, a) @ b).to(y.dtype))


def pair_of(a: Tensor, b: Tensor, expert: int, rank: int, *, swapped: bool) -> tuple[Tensor, Tensor]:
    """Return an expert's matrices, A [rank, inputs] and B [outputs, rank], of a pair for all experts.

    PEFT's `ParamWrapper` keeps A as [experts * rank, features] and B as [features, rank * experts], in this order.

    Args:
        swapped: A has the outputs and B the inputs, as PEFT has it where it takes a matrix [outputs, inputs] for its
            transpose.
    """
    first = a.unflatten(0, (-1, rank))[expert]
    second = b.unflatten(1, (rank, -1))[:, :, expert]
    return (second.t(), first.t()) if swapped else (first, second)
