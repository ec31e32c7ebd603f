"""The worker half of pooling, on states that are given to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.device.cpu import CpuDevice
from octavo.features.pooling.params import Pooled, PoolingSpec
from octavo.features.pooling.payload import PromptSpan, PromptSpans
from octavo.features.pooling.worker import PoolingWorker, SegmentedPoolingWorker


class Doubling:
    """A model whose final norm doubles, and whose head gives a vector's sum and its negative."""

    def final(self, hidden: Tensor) -> Tensor:
        return 2 * hidden

    def classify(self, pooled: Tensor) -> Tensor:
        return torch.stack([pooled.sum(-1), -pooled.sum(-1)], dim=-1)


MODEL = Doubling()
SITE = SimpleNamespace(device=CpuDevice())
HIDDEN = torch.arange(36, dtype=torch.float32).view(9, 4)


def worker(*asked: PoolingSpec, kind: type[PoolingWorker] = PoolingWorker) -> PoolingWorker:
    """One that has a request in each slot from 0 on."""
    made = kind("pooling")
    made.attach(MODEL, SITE)  # type: ignore[arg-type]
    for slot, params in enumerate(asked):
        made.add(slot, msgspec.Raw(msgspec.msgpack.encode(params)))
    return made


def found(made: PoolingWorker, hidden: Tensor, *spans: PromptSpan) -> dict[int, Tensor]:
    findings = made.after_forward(hidden, PromptSpans(list(spans)))
    if findings is None:
        return {}
    vectors, errors = findings()
    assert not errors
    results = {}
    for row, data in vectors.items():
        pooled = msgspec.msgpack.decode(data, type=Pooled)
        results[row] = torch.tensor(pooled.values()).view(pooled.shape)
    return results


def params(**changes: Any) -> PoolingSpec:
    return PoolingSpec(**{"activation": "none", **changes})


def plan(*counts: int) -> StepPlan:
    rows = len(counts)
    return StepPlan(0, [], list(range(rows)), list(counts), [0] * rows, [False] * rows, [], [])


def test_rows_of_all_kinds_in_one_step() -> None:
    """Beside rows that generate, which nobody asked about."""
    made = worker(
        params(),
        params(pooling="last"),
        params(pooling="cls", activation="normalize"),
        params(dimensions=2),
        params(task="classify", pooling="cls", activation="softmax"),
    )
    spans = [PromptSpan(0, 0, 1, 2, 0, True), PromptSpan(2, 1, 4, 1, 7, True), PromptSpan(3, 2, 5, 2, 0, True)]
    spans += [PromptSpan(5, 3, 7, 1, 0, True), PromptSpan(6, 4, 8, 1, 0, True)]
    vectors = found(made, HIDDEN, *spans)
    assert set(vectors) == {0, 2, 3, 5, 6}
    torch.testing.assert_close(vectors[0], 2 * HIDDEN[1:3].mean(0))
    torch.testing.assert_close(vectors[2], 2 * HIDDEN[4])
    torch.testing.assert_close(vectors[3], HIDDEN[5] / HIDDEN[5].norm())
    torch.testing.assert_close(vectors[5], 2 * HIDDEN[7, :2])
    torch.testing.assert_close(vectors[6], torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_chunks_add_up(pooling: Any) -> None:
    """Two prompts whose chunks share steps, of which one ends earlier."""
    made = worker(params(pooling=pooling), params(pooling=pooling))
    assert not found(made, HIDDEN[:5], PromptSpan(0, 0, 0, 3, 0, False), PromptSpan(1, 1, 3, 2, 0, False))
    first = found(made, HIDDEN[5:8], PromptSpan(0, 1, 0, 1, 2, True), PromptSpan(1, 0, 1, 2, 3, False))
    second = found(made, HIDDEN[8:], PromptSpan(0, 0, 0, 1, 5, True))
    a, b = 2 * HIDDEN[[0, 1, 2, 6, 7, 8]], 2 * HIDDEN[[3, 4, 5]]
    for vectors, states in ((second, a), (first, b)):
        expected = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]
        torch.testing.assert_close(vectors[0], expected)


def test_chunks_of_token_vectors_are_joined() -> None:
    made = worker(params(task="token_embed"))
    assert not found(made, HIDDEN[:4], PromptSpan(0, 0, 1, 3, 0, False))
    vectors = found(made, HIDDEN[4:6], PromptSpan(0, 0, 0, 2, 3, True))
    torch.testing.assert_close(vectors[0], 2 * HIDDEN[1:6])


def test_a_slot_that_is_filled_anew_forgets() -> None:
    """As after a preemption, or when another request takes it."""
    made = worker(params())
    found(made, HIDDEN[:3], PromptSpan(0, 0, 0, 3, 0, False))
    made.add(0, msgspec.Raw(msgspec.msgpack.encode(params())))
    torch.testing.assert_close(found(made, HIDDEN[:2], PromptSpan(0, 0, 0, 2, 0, True))[0], 2 * HIDDEN[:2].mean(0))


def test_states_that_are_no_numbers_fail_their_own_request() -> None:
    made = worker(params(), params())
    hidden = HIDDEN.clone()
    hidden[1, 2] = float("nan")
    findings = made.after_forward(
        hidden, PromptSpans([PromptSpan(0, 0, 0, 2, 0, True), PromptSpan(1, 1, 2, 2, 0, True)])
    )
    assert findings is not None
    vectors, errors = findings()
    assert set(vectors) == {1}
    assert "no usable vector" in errors[0]


def test_the_second_text_has_another_type() -> None:
    made = worker(params(), params(segment=2), kind=SegmentedPoolingWorker)
    types = made.buffers(2, 8)["token_types"]
    made.lay_out(plan(2, 4), PromptSpans([PromptSpan(0, 0, 0, 2, 0, True), PromptSpan(1, 1, 2, 4, 0, True)]))
    assert types.tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    made.lay_out(plan(2, 4), PromptSpans([PromptSpan(0, 0, 0, 2, 0, True)]))
    assert types.tolist() == [0] * 8
