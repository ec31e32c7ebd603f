"""`StepModel`: the seconds of a step by its shape, fitted to measured steps.

It is a sum of a few terms that can be read and checked: a curve through measured sizes, which has the flat part
(reading the weights) and the sloping part (arithmetic) of a roofline (Williams et al. 2009), and costs of each cached
position read, each pair of attention, and each sampled token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import msgspec

from octavo.simulate.shape import StepShape


class Curve(msgspec.Struct, frozen=True):
    """A line through points; it never falls. Beyond the last point it goes on like the last piece.

    Attributes:
        sizes: ascending, at least one.
        seconds: one for each size.
    """

    sizes: list[int]
    seconds: list[float]

    def at(self, size: float) -> float:
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        right = min(bisect_right(sizes, size), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        return seconds[right - 1] + (seconds[right] - seconds[right - 1]) * (size - low) / (high - low)


class StepModel(msgspec.Struct, frozen=True):
    """
    Attributes:
        decode: seconds of a step in which each row has one token, by the number of rows.
        mixed: seconds of other steps, by their tokens.
        key_s: of each position read by a row of one token.
        pair_s: of each pair of a token and a position, in rows of more tokens.
        sample_s: of each sampled token of a step of the second kind; in the first kind, the curve has it.
    """

    decode: Curve
    mixed: Curve
    key_s: float
    pair_s: float
    sample_s: float

    def seconds(self, shape: StepShape) -> float:
        if shape.decodes:
            return self.decode.at(shape.tokens) + self.key_s * shape.keys
        besides = self.key_s * shape.keys + self.pair_s * shape.pairs + self.sample_s * shape.sampled
        return self.mixed.at(shape.tokens) + besides


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    shape: StepShape
    seconds: float


class FitErrors(msgspec.Struct, frozen=True):
    """How far the model is from measured steps that it was not fitted to.

    Attributes:
        steps: how many there are.
        median, p90: of the relative errors of single steps, without their signs.
        total: relative error of the sum of all of them, with its sign.
    """

    steps: int
    median: float
    p90: float
    total: float


def errors_of(model: StepModel, steps: Sequence[MeasuredStep]) -> FitErrors:
    relative = sorted(abs(model.seconds(one.shape) / one.seconds - 1) for one in steps)
    total = sum(model.seconds(one.shape) for one in steps) / sum(one.seconds for one in steps) - 1
    p90 = relative[min(len(relative) - 1, int(0.9 * len(relative)))]
    return FitErrors(len(relative), median(relative), p90, total)


def fit(steps: Iterable[MeasuredStep]) -> StepModel:
    """Return the model with the least squares of relative errors whose terms are not negative.

    Steps of about the same shape count as one, with their median time.

    Raises:
        ValueError: there are too few steps of either kind.
    """
    merged = _merged(steps)
    decoding = [one for one in merged if one.shape.decodes]
    others = [one for one in merged if not one.shape.decodes]
    if len(decoding) < 2 or len(others) < 2:
        raise ValueError("steps of both kinds are needed: of rows of one token, and of prompts")
    decode, (key_s,) = _fit_curve(decoding, [lambda shape: shape.keys])
    rest = [MeasuredStep(one.shape, max(one.seconds - key_s * one.shape.keys, one.seconds / 10)) for one in others]
    mixed, (pair_s, sample_s) = _fit_curve(rest, [lambda shape: shape.pairs, lambda shape: float(shape.sampled)])
    return StepModel(decode, mixed, key_s, pair_s, sample_s)


def _merged(steps: Iterable[MeasuredStep]) -> list[MeasuredStep]:
    alike: dict[tuple[object, ...], list[MeasuredStep]] = defaultdict(list)
    for one in steps:
        shape = one.shape
        tokens = shape.tokens if shape.decodes else _class(shape.tokens)
        key = (shape.decodes, tokens, _class(shape.sampled), _class(shape.keys), _class(shape.pairs))
        alike[key].append(one)
    return [_middle(group) for group in alike.values()]


def _class(value: float) -> int:
    """Return the same number for values within some 10 % of each other."""
    return int(value).bit_length() * 8 + (int(value) * 8 >> max(int(value).bit_length() - 1, 0)) % 8


def _middle(group: Sequence[MeasuredStep]) -> MeasuredStep:
    ordered = sorted(group, key=lambda one: one.seconds)
    return ordered[(len(ordered) - 1) // 2]


def _fit_curve(
    steps: Sequence[MeasuredStep], costs: Sequence[Callable[[StepShape], float]]
) -> tuple[Curve, list[float]]:
    """Return a curve over the steps' tokens and the price of each cost, none negative."""
    knots = _knots(one.shape.tokens for one in steps)
    rows = []
    for one in steps:
        row = [1.0, *(_risen(one.shape.tokens, low, high) for low, high in pairwise(knots))]
        rows.append([value / one.seconds for value in (*row, *(cost(one.shape) for cost in costs))])
    found = _nonnegative(rows)
    rises = found[: len(knots)]
    return Curve(knots, [sum(rises[: end + 1]) for end in range(len(knots))]), found[len(knots) :]


def _knots(sizes: Iterable[int]) -> list[int]:
    """Return the largest measured size of each power of two: of those over the one below it."""
    return sorted({(size - 1).bit_length(): size for size in sorted(set(sizes))}.values())


def _risen(size: int, low: int, high: int) -> float:
    """Return how much of the curve's rise between two knots a size has; more than all beyond the last knot."""
    return max(0.0, min(1.0, (size - low) / (high - low)))


def _nonnegative(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return x >= 0 that minimizes |rows x - 1|^2 (Lawson and Hanson 1974, "Solving Least Squares Problems")."""
    import numpy

    full = numpy.asarray(rows, dtype=numpy.float64)
    scale = numpy.linalg.norm(full, axis=0)
    scale[scale == 0] = 1.0
    matrix, target = full / scale, numpy.ones(len(full))
    active = numpy.zeros(matrix.shape[1], dtype=bool)
    best = numpy.zeros(matrix.shape[1])
    for _ in range(3 * matrix.shape[1]):
        gradient = matrix.T @ (target - matrix @ best)
        gradient[active] = -numpy.inf
        if gradient.max() <= 1e-10:
            break
        active[int(gradient.argmax())] = True
        while True:
            trial = numpy.zeros_like(best)
            trial[active] = numpy.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
            below = active & (trial <= 0)
            if not below.any():
                break
            step = (best[below] / (best[below] - trial[below])).min()
            best = best + step * (trial - best)
            active &= best > 1e-14
            best[~active] = 0.0
        best = trial
    return [float(value) for value in best / scale]
