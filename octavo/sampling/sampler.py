"""`Sampler`: logits in, tokens out, each row by its own parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.sampling.draw import draw, draw_filtered
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.processors import process
from octavo.sampling.rng import uniform
from octavo.sampling.state import SampleResult, SampleRow

_CHUNK = 64


class Sampler:
    """Keeps nothing between calls: a row's token depends on its logits, parameters, seed and tokens alone."""

    def sample(self, logits: Tensor, rows: list[SampleRow]) -> SampleResult:
        """
        Args:
            logits: [S, V], any floating dtype; left as they are.
            rows: S of them.
        """
        if all(row.slot_params.plain for row in rows):
            tokens, peaks = argmax(logits)
            return SampleResult(tokens, bad_rows=_blank_bad(tokens, peaks))
        work = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        process(work, rows)
        tokens, peaks = argmax(work)
        bad = _blank_bad(tokens, peaks)
        self._draw(work, peaks, rows, set(bad), tokens)
        return SampleResult(tokens, _logprobs(logits, rows, set(bad), tokens), bad)

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


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The index [S] int64 of each row's largest value, the lowest of equals, and the value [S].

    On a CPU by numpy, or else in two rounds: torch's own argmax is several times slower there than either.
    """
    if logits.dtype == torch.float32 and logits.device.type == "cpu":
        tokens = torch.from_numpy(logits.numpy().argmax(-1))
        return tokens, logits.gather(-1, tokens[:, None]).squeeze(-1)
    size = logits.shape[-1]
    if size % _CHUNK or not logits.is_contiguous():
        tokens = logits.argmax(-1)
        return tokens, logits.gather(-1, tokens[:, None]).squeeze(-1)
    chunks = logits.unflatten(-1, (-1, _CHUNK))
    peaks = chunks.amax(-1)
    chunk = peaks.argmax(-1, keepdim=True)
    inside = chunks.take_along_dim(chunk[..., None], 1).squeeze(1).argmax(-1)
    return chunk.squeeze(-1) * _CHUNK + inside, peaks.gather(-1, chunk).squeeze(-1)


def _blank_bad(tokens: Tensor, peaks: Tensor) -> list[int]:
    """Rows without a finite maximum: NaN and +inf rise to the top, and -inf there means that no token is possible."""
    finite = torch.isfinite(peaks)
    if bool(finite.all()):
        return []
    tokens.masked_fill_(~finite, 0)
    return torch.nonzero(~finite).squeeze(-1).tolist()


def _logprobs(logits: Tensor, rows: list[SampleRow], bad: set[int], tokens: Tensor) -> dict[int, TokenLogprobs]:
    asking = {i: row.slot_params.logprobs for i, row in enumerate(rows)}
    wanted = {i: count for i, count in asking.items() if count is not None and i not in bad}
    found: dict[int, TokenLogprobs] = {}
    for count in set(wanted.values()):
        group = [i for i in wanted if wanted[i] == count]
        index = torch.tensor(group, device=logits.device)
        found.update(zip(group, token_logprobs(logits[index], tokens[index], count), strict=True))
    return found
