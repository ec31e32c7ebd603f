"""Do drawn tokens follow their probabilities? Pearson's test, as its conditions ask for it."""

from __future__ import annotations

from collections.abc import Sequence

LEAST = 5.0  # Cochran (1954): below this expected count the statistic no longer follows its distribution


def chi_square(observed: Sequence[int], expected: Sequence[float]) -> float:
    """Pearson's statistic over the classes, rare ones taken together until they are expected 5 times.

    One draw of a class that was expected 0.01 times would alone add 98, though it happens once in a hundred tests.
    Infinite where something was drawn that cannot be.
    """
    pairs = sorted(zip(expected, observed, strict=True))
    if any(count for mean, count in pairs if mean == 0):
        return float("inf")
    classes: list[tuple[float, int]] = []
    mean, count = 0.0, 0
    for mean_of_one, count_of_one in pairs:
        mean, count = mean + mean_of_one, count + count_of_one
        if mean >= LEAST:
            classes.append((mean, count))
            mean, count = 0.0, 0
    if not classes:
        raise ValueError(f"too few draws: even all classes together are expected only {mean:g} times")
    if mean:
        last_mean, last_count = classes.pop()
        classes.append((last_mean + mean, last_count + count))
    return float(sum((count - mean) ** 2 / mean for mean, count in classes))
