"""The least time that a machine could take for some requests, from what it moves and multiplies at best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from octavo.core.info import ModelInfo


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine does at best; `device/ceilings.py` measures it.

    Attributes:
        bytes_per_s: read and written by a large copy.
        operations_per_s: of a large matrix product in the model's dtype; a multiplication and an addition are two.
    """

    bytes_per_s: float
    operations_per_s: float

    def text(self) -> str:
        return f"{self.bytes_per_s / 1e9:,.0f} GB/s of memory, {self.operations_per_s / 1e12:,.2f} TFLOP/s"

    def figures(self) -> dict[str, float]:
        return asdict(self)


def floor_seconds(lengths: Sequence[tuple[int, int]], info: ModelInfo, ceilings: Ceilings) -> float:
    """The least seconds for requests that all come at once and share nothing.

    Prompts cost operations; a step of decoding costs the reading of all weights or, for many rows, operations, and the
    reading of each row's keys and values. Attention's own operations are left out, so that the floor is one.

    Args:
        lengths: (prompt, output) tokens of each request.
    """
    operations = 2 * info.step_parameters
    prompts = sum(given for given, _ in lengths) * operations / ceilings.operations_per_s
    decoding = 0.0
    read = info.step_weight_bytes / ceilings.bytes_per_s
    for step in range(1, max((wanted for _, wanted in lengths), default=0)):
        alive = [given + step for given, wanted in lengths if wanted > step]
        # No more rows than the engine runs at once: the rest means more steps.
        rounds = -(-len(alive) // info.max_num_seqs)
        decoding += max(rounds * read, len(alive) * operations / ceilings.operations_per_s)
        decoding += sum(alive) * info.kv_bytes_per_token / ceilings.bytes_per_s
    return prompts + decoding
