"""`Sampler`: logits in, tokens out, each row by its own parameters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.sampling.draw import draw, draw_filtered
from octavo.sampling.logprobs import Wanted, together, token_logprobs
from octavo.sampling.processors import process
from octavo.sampling.rng import uniform
from octavo.sampling.state import SampleResult, SampleRow


def largest(values: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The index [S] of each row's largest value, the lowest of equals, and the value [S], NaN if the row has one.

    Of [S, V]. By numpy: torch's own is several times slower on a CPU.
    """
    indices = values.argmax(-1)
    return indices, values[np.arange(len(values)), indices]


class Sampler:
    """Keeps nothing between calls: a row's token depends on its logits, parameters, seed and tokens alone."""

    def greedy(self, logits: Tensor) -> SampleResult:
        """The most likely token of each row of logits [S, V], of any floating dtype."""
        indices, peaks = largest(logits.float().numpy())
        return SampleResult(torch.from_numpy(indices), bad_rows=_blank_bad(indices, peaks))

    def sample(self, logits: Tensor, rows: list[SampleRow]) -> SampleResult:
        """
        Args:
            logits: [S, V], any floating dtype; left as they are.
            rows: S of them.
        """
        work = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        process(work, rows)
        indices, values = largest(work.numpy())
        bad = _blank_bad(indices, values)
        tokens, peaks = torch.from_numpy(indices), torch.from_numpy(values)
        self._draw(work, peaks, rows, set(bad), tokens)
        asking = {i: row.slot_params.logprobs for i, row in enumerate(rows)}
        return SampleResult(tokens, logprobs_of(logits, asking, set(bad), tokens), bad)

    def _draw(self, logits: Tensor, peaks: Tensor, rows: list[SampleRow], bad: set[int], tokens: Tensor) -> None:
        """Replaces the most likely token by a drawn one, in the rows that want it."""
        for filtered in (False, True):
            chosen = [
                i
                for i, row in enumerate(rows)
                if not row.slot_params.greedy and row.slot_params.filtered == filtered and i not in bad
            ]
            if not chosen:
                continue
            params = [rows[i].slot_params for i in chosen]
            filters = torch.stack([p.filters for p in params]).to(logits.device)
            outputs = torch.tensor([rows[i].num_output for i in chosen])
            uniforms = uniform(torch.cat([p.seed for p in params]), outputs).to(logits.device)
            index = torch.tensor(chosen, device=logits.device)
            part, tops = (logits, peaks) if len(chosen) == len(rows) else (logits[index], peaks[index])
            if filtered:
                tokens[index] = draw_filtered(part, tops[:, None], filters, uniforms)
            else:
                tokens[index] = draw(part, tops[:, None], filters[:, :1], uniforms)


def bad_rows(peaks: NDArray[np.float32]) -> list[int]:
    """Rows without a finite maximum: NaN and +inf rise to the top, and -inf there means that no token is possible."""
    finite = np.isfinite(peaks)
    if finite.all():
        return []
    bad: list[int] = np.flatnonzero(~finite).tolist()
    return bad


def _blank_bad(indices: NDArray[np.int64], peaks: NDArray[np.float32]) -> list[int]:
    bad = bad_rows(peaks)
    indices[bad] = 0
    return bad


def logprobs_of(
    logits: Tensor, asking: Mapping[int, Wanted | None], bad: set[int], tokens: Tensor
) -> dict[int, TokenLogprobs]:
    """The log-probabilities of the rows that ask for them.

    Args:
        logits: [S, V], raw.
        asking: row -> what it asks for, None for no report.
        bad: rows that have no token.
        tokens: [S] int64, the chosen ones.
    """
    found: dict[int, TokenLogprobs] = {}
    for rows, wanted in together({i: one for i, one in asking.items() if i not in bad}):
        index = torch.tensor(rows, device=logits.device)
        told = wanted if isinstance(wanted, int) else torch.from_numpy(wanted).to(logits.device)
        found.update(zip(rows, token_logprobs(logits[index], tokens[index], told), strict=True))
    return found
