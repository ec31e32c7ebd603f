"""`RowSampler`: logits in, tokens out, each row by its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.sampling.draw import draw, draw_filtered, kept
from octavo.sampling.logprobs import LogprobsReport, together, token_logprobs
from octavo.sampling.processors import process
from octavo.sampling.rng import uniform
from octavo.sampling.state import SampleResult, SampleRow


def largest(values: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the index [S] of each row's largest value, the lowest of ties, and the value [S], NaN if the row has one.

    `values` is [S, V]. By numpy: torch's argmax is several times slower on a CPU.
    """
    indices = values.argmax(-1)
    return indices, values[np.arange(len(values)), indices]


class RowSampler:
    """Stateless: a row's token depends only on its logits, parameters, seed and tokens."""

    def greedy(self, logits: Tensor) -> SampleResult:
        """Return the most likely token of each row of logits [S, V], of any floating dtype."""
        indices, peaks = largest(logits.float().numpy())
        return SampleResult(torch.from_numpy(indices), bad_rows=_blank_bad(indices, peaks))

    def sample(self, logits: Tensor, rows: list[SampleRow]) -> SampleResult:
        """
        Args:
            logits: [S, V], any floating dtype; not modified.
            rows: S of them.
        """
        work = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        process(work, rows)
        indices, values = largest(work.numpy())
        bad = _blank_bad(indices, values)
        tokens, peaks = torch.from_numpy(indices), torch.from_numpy(values)
        self._draw(work, peaks, rows, set(bad), tokens)
        asking = {i: row.slot_params.logprobs for i, row in enumerate(rows) if i not in bad}
        return SampleResult(tokens, logprobs_of(logits, asking, tokens, lambda some: [rows[i] for i in some]), bad)

    def _draw(self, logits: Tensor, peaks: Tensor, rows: list[SampleRow], bad: set[int], tokens: Tensor) -> None:
        """Replace the most likely token by a drawn one, in the rows that sample."""
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
    """Return the rows without a finite maximum: NaN and +inf are maxima, and -inf means that no token is possible."""
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
    logits: Tensor,
    asking: Mapping[int, LogprobsReport | None],
    tokens: Tensor,
    rows_of: Callable[[list[int]], list[SampleRow]],
) -> dict[int, TokenLogprobs]:
    """Return the log-probabilities of the rows that request them.

    Args:
        logits: [S, V], raw.
        asking: row that has a token -> its report options, None for no report.
        tokens: [S] int64, the chosen ones.
        rows_of: function that returns the `SampleRow`s of some of the S rows.
    """
    found: dict[int, TokenLogprobs] = {}
    for rows, wanted, report in together(asking):
        index = torch.tensor(rows, device=logits.device)
        told = wanted if isinstance(wanted, int) else torch.from_numpy(wanted).to(logits.device)
        part, chosen = logits[index], tokens[index]
        if report.processed:
            part = _drawn_from(part, chosen, rows_of(rows))
        found.update(zip(rows, token_logprobs(part, chosen, told, as_logits=report.as_logits), strict=True))
    return found


def _drawn_from(logits: Tensor, tokens: Tensor, rows: list[SampleRow]) -> Tensor:
    """Return raw logits [n, V] as the draw uses them: processed, scaled by temperature and filtered."""
    work = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    process(work, rows)
    params = [row.slot_params for row in rows]
    filtered = torch.tensor([i for i, p in enumerate(params) if p.filtered and not p.greedy], dtype=torch.long)
    if len(filtered):
        part = work[filtered]
        among = kept(part, torch.stack([params[i].filters for i in filtered.tolist()]))
        # The drawn token itself: another sampler's arithmetic may round differently at a filter's edge.
        among.scatter_(-1, tokens[filtered, None], True)
        work[filtered] = part.masked_fill(~among, float("-inf"))
    return work.div_(torch.tensor([[1.0 if p.greedy else float(p.filters[0])] for p in params]))
