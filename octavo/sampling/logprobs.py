"""Log-probabilities, or logits, of tokens, for the rows that request them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.core.params import LogprobsMode
from octavo.sampling.draw import ranked

_SPARE = 40

WantedLogprobs = int | tuple[int, ...]
"""Tokens to report in addition to the chosen one: a number of most likely ones, or these ids."""


class LogprobsReport(NamedTuple):
    """A request's options of log-probabilities: the tokens and the kind of numbers."""

    wanted: WantedLogprobs
    mode: LogprobsMode

    @property
    def processed(self) -> bool:
        return self.mode.startswith("processed")

    @property
    def as_logits(self) -> bool:
        return self.mode.endswith("logits")


class LogprobsGroup(NamedTuple):
    """Rows whose reports are computed together: of a count of tokens, or of ids [rows, k]."""

    rows: list[int]
    wanted: int | NDArray[np.int64]
    report: LogprobsReport


def together(asking: Mapping[int, LogprobsReport | None]) -> list[LogprobsGroup]:
    """Group the rows that request log-probabilities."""
    groups: dict[tuple[LogprobsMode, bool, int], list[tuple[int, LogprobsReport]]] = {}
    for row, report in asking.items():
        if report is not None:
            wanted = report.wanted
            size = (True, len(wanted)) if isinstance(wanted, tuple) else (False, wanted)
            groups.setdefault((report.mode, *size), []).append((row, report))
    return [
        LogprobsGroup(
            [row for row, _ in found], np.array([one.wanted for _, one in found]) if named else count, found[0][1]
        )
        for (_, named, count), found in groups.items()
    ]


def token_logprobs(
    logits: Tensor, tokens: Tensor, wanted: int | Tensor, *, as_logits: bool = False
) -> list[TokenLogprobs]:
    """Return each row's log-probability and rank of the chosen token, and those of the wanted tokens.

    A rank is 1 + the number of tokens that are strictly more likely.

    Args:
        logits: [n, V].
        tokens: [n] int64, the chosen ones.
        wanted: a number of most likely tokens, or ids [n, k] int64.
        as_logits: report logits instead of log-probabilities.
    """
    logits = logits.float()
    logprobs = logits if as_logits else logits.log_softmax(-1)
    chosen = logits.gather(-1, tokens[:, None])
    ranks = (logits > chosen).sum(-1) + 1
    ids = _most_likely(logits, wanted) if isinstance(wanted, int) else wanted
    return [
        TokenLogprobs(*row)
        for row in zip(
            logprobs.gather(-1, tokens[:, None]).squeeze(-1).tolist(),
            ranks.tolist(),
            ids.tolist(),
            logprobs.gather(-1, ids).tolist(),
            strict=True,
        )
    ]


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """Return [n, count] ids, best first. More candidates than needed are taken, since a tie at the end needs a sort."""
    _, ids, sure = ranked(logits, count + _SPARE)
    ids = ids[:, :count].contiguous()
    unsure = torch.nonzero(sure < min(count, logits.shape[-1])).squeeze(-1)
    if len(unsure):
        ids[unsure] = ranked(logits[unsure], logits.shape[-1])[1][:, :count]
    return ids
