"""A lower bound on the time for some requests, from the machine's peak bandwidth and arithmetic rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from octavo.core.info import ModelInfo


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Peak rates of the machine, measured by `device/ceilings.py`.

    Attributes:
        bytes_per_s: bytes read and written per second by a large copy.
        operations_per_s: of a large matrix product in the model's dtype; a multiply-add counts as two.
    """

    bytes_per_s: float
    operations_per_s: float

    def text(self) -> str:
        return f"{self.bytes_per_s / 1e9:,.0f} GB/s of memory, {self.operations_per_s / 1e12:,.2f} TFLOP/s"

    def figures(self) -> dict[str, float]:
        return asdict(self)


def floor_seconds(lengths: Sequence[tuple[int, int]], info: ModelInfo, ceilings: Ceilings) -> float:
    """Return the least seconds for requests that all arrive at once and share no prefix.

    Prompts cost arithmetic. A decoding step costs reading all weights or, with many rows, arithmetic, plus reading each
    row's keys and values. Attention's arithmetic is left out, which keeps this a lower bound.

    Args:
        lengths: (prompt, output) tokens of each request.
    """
    operations = 2 * info.step_parameters
    prompts = sum(given for given, _ in lengths) * operations / ceilings.operations_per_s
    decoding = 0.0
    read = info.step_weight_bytes / ceilings.bytes_per_s
    for step in range(1, max((wanted for _, wanted in lengths), default=0)):
        alive = [given + step for given, wanted in lengths if wanted > step]
        # The engine runs at most max_num_seqs rows at once; more rows take more steps.
        rounds = -(-len(alive) // info.max_num_seqs)
        decoding += max(rounds * read, len(alive) * operations / ceilings.operations_per_s)
        for window, size in info.kv_reads or [(0, info.kv_bytes_per_token)]:
            read_of_rows = sum(min(length, window) for length in alive) if window else sum(alive)
            decoding += read_of_rows * size / ceilings.bytes_per_s
    return prompts + decoding


def share_text(share: float) -> str:
    """Return a sentence that compares a run with its floor.

    Above 1 the ceilings were too low for this model: they are of products in its dtype, but quantized weights multiply
    as integers, which is faster. Or other programs ran while the ceilings were measured.
    """
    if share <= 1:
        return f"so {share:.0%} of what is possible"
    return f"which this run beats ({share:.0%}): integer weights multiply faster than that, or the machine was not idle"
