"""Shapes of steps against a count of every pair, and the fit against models that are known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.cache_groups import CacheGroup, GroupKind
from octavo.core.params import SamplingParams
from octavo.core.plan import NewRow, StepPlan
from octavo.simulate.model import Curve, MeasuredStep, StepModel, errors_of, fit
from octavo.simulate.shape import ShapeReader, StepShape

MODEL = StepModel(
    decode=Curve([1, 8, 64], [0.010, 0.012, 0.060]),
    mixed=Curve([2, 64, 1024], [0.011, 0.030, 0.400]),
    key_s=2e-6,
    pair_s=3e-8,
    sample_s=1e-3,
)


def plan(number: int, counts: list[int], *, computed: int = 0, new: bool = False) -> StepPlan:
    params = SamplingParams()
    rows = [NewRow(slot, [0] * 500, 500, params, 0, [], computed, [[]]) for slot in range(len(counts))] if new else []
    slots = list(range(len(counts)))
    return StepPlan(number, rows, slots, counts, [0] * len(counts), [count == 1 for count in counts], [], [])


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=2), min_size=1, max_size=5),
    st.integers(0, 12),
    st.integers(1, 20),
)
def test_pairs_are_those_that_rows_attend_to(steps: list[list[int]], computed: int, window: int) -> None:
    groups = [CacheGroup(layers=(0,)), CacheGroup(GroupKind.WINDOW, layers=(1, 2, 3), window=window)]
    groups.append(CacheGroup(GroupKind.STATE, layers=(4,)))
    reader, at = ShapeReader(groups), [computed] * 2
    for number, counts in enumerate(steps):
        shape = reader.read(plan(number, counts, computed=computed, new=not number))
        found = [0.0, 0.0]
        for row, count in enumerate(counts):
            for position in range(at[row], at[row] + count):
                found[count > 1] += 1 / 5 * (position + 1) + 3 / 5 * min(position + 1, window)
            at[row] += count
        assert (shape.keys, shape.pairs) == pytest.approx(tuple(found))
        assert shape == (sum(counts), counts.count(1), shape.keys, shape.pairs, counts == [1, 1])
        assert [reader.ends[0], reader.ends[1]] == at


def measured(model: StepModel, *, noise: float = 0.0, seed: int = 0) -> list[MeasuredStep]:
    rng, found = random.Random(seed), []
    for _ in range(5):
        for rows in (1, 2, 4, 8, 16, 32, 64):
            for context in (16, 1024):
                found.append(StepShape(rows, rows, rows * context, 0, True))
        for tokens in (2, 4, 16, 64, 256, 1024):
            for sampled in (0, 1, 16):
                for start in (0, 2000):
                    pairs = tokens * start + tokens * tokens / 2
                    found.append(StepShape(tokens + sampled, sampled, sampled * 64, pairs, False))
    return [MeasuredStep(shape, model.seconds(shape) * rng.uniform(1 - noise, 1 + noise)) for shape in found]


def test_a_known_model_is_found() -> None:
    found = fit(measured(MODEL))
    others = [
        MeasuredStep(s, MODEL.seconds(s)) for s in (StepShape(24, 24, 9000, 0, True), StepShape(300, 5, 99, 9e5, False))
    ]
    errors = errors_of(found, others)
    assert errors.p90 < 0.02
    assert (found.key_s, found.pair_s, found.sample_s) == pytest.approx((2e-6, 3e-8, 1e-3), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_noise_makes_no_term_negative_and_no_curve_fall(seed: int) -> None:
    found = fit(measured(MODEL, noise=0.5, seed=seed))
    assert min(found.key_s, found.pair_s, found.sample_s) >= 0
    for curve in (found.decode, found.mixed):
        assert curve.seconds == sorted(curve.seconds)
        assert min(curve.seconds) >= 0


def test_a_few_late_steps_do_not_change_the_model() -> None:
    steps = measured(MODEL)
    late = [MeasuredStep(one.shape, one.seconds * 10) for one in steps[::9]]
    assert errors_of(fit(steps + late), steps).p90 < 0.02


def test_one_kind_of_steps_is_not_enough() -> None:
    with pytest.raises(ValueError, match="of rows of one token, and of prompts"):
        fit([one for one in measured(MODEL) if one.shape.decodes])


def test_a_curve_goes_on_beyond_its_ends() -> None:
    curve = Curve([2, 4, 8], [1.0, 2.0, 6.0])
    assert [curve.at(size) for size in (1, 2, 3, 6, 8, 12)] == [1.0, 1.0, 1.5, 4.0, 6.0, 10.0]
    assert Curve([2], [1.0]).at(9) == 1.0


def test_errors_have_the_sign_of_the_sum() -> None:
    steps = [MeasuredStep(StepShape(1, 1, 0, 0, True), 0.02), MeasuredStep(StepShape(1, 1, 0, 0, True), 0.01)]
    errors = errors_of(MODEL, steps)
    assert (errors.steps, errors.p90) == (2, 0.5)
    assert errors.total == pytest.approx(-1 / 3)
