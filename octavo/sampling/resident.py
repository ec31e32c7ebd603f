"""Sampling of rows whose parameters and tokens live on the device: nothing waits, nothing is sorted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.device.transfer import Download, upload
from octavo.sampling.resident_bans import forbid
from octavo.sampling.resident_logprobs import Columns, columns_of, entries_of
from octavo.sampling.state import PreparedParams
from octavo.sampling.triton_draw import choose_kernel, count_kernel, draw_kernel, filter_kernel, penalty_kernel

NUM_PARAMS = 16
_DRAW_BLOCK = 4096
_FILTER_BLOCK = 4096
_COUNT_BLOCK = 1024

Logprobs = list[tuple[list[int], Columns]]
"""Groups of rows that ask for equally many alternatives, and theirs."""


@dataclass(frozen=True, slots=True)
class ParamTable:
    """What the kernels read of each slot.

    Attributes:
        params: [slots, NUM_PARAMS] int32, the floats among them by their bits; see `packed_params`.
        tokens: [slots, max_model_len] int32.
        length: [slots] int32, known tokens.
    """

    params: Tensor
    tokens: Tensor
    length: Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """One row to sample, as far as the host must know it. `num_tokens` counts the sequence's tokens so far."""

    slot: int
    params: PreparedParams
    num_prompt: int
    num_tokens: int

    @property
    def banned(self) -> Tensor | None:
        """Tokens that may not be sampled yet."""
        params = self.params
        early = params.min_tokens > self.num_tokens - self.num_prompt
        return params.banned_ids if early and len(params.banned_ids) else None


@dataclass(slots=True)
class Sampled:
    """Tokens on their way to the host: [S] int32, -1 for a row that can't be sampled; and log-probabilities."""

    tokens: Download
    logprobs: Logprobs

    def token_list(self) -> list[int]:
        return self.tokens.wait().tolist()

    def logprobs_of(self) -> dict[int, TokenLogprobs]:
        """Index of the row -> its log-probabilities, for the rows that asked."""
        found: dict[int, TokenLogprobs] = {}
        for rows, columns in self.logprobs:
            found.update(zip(rows, entries_of(columns), strict=True))
        return found


def packed_params(params: PreparedParams, num_prompt: int) -> np.ndarray:
    """[NUM_PARAMS] int32, in the order that `triton_draw` names."""
    temperature, top_k, top_p, min_p = params.filters.tolist()
    packed = np.zeros(NUM_PARAMS, dtype=np.int32)
    reals = [0.0 if params.greedy else temperature, top_p, min_p, params.repetition, params.frequency, params.presence]
    packed[: len(reals)] = np.asarray(reals, dtype=np.float32).view(np.int32)
    packed[6] = int(top_k)
    packed[7:9] = params.seed.numpy().view(np.int32)
    packed[9] = num_prompt
    return packed


def is_plain(params: PreparedParams) -> bool:
    """Whether the draw alone decides: nothing changes the logits, cuts them off or reports on them."""
    changes = len(params.bias_ids) or params.min_tokens or _penalised(params)
    changes = changes or params.allowed_ids is not None or params.bad_words
    return not changes and params.logprobs is None and (params.greedy or not params.filtered)


class ResidentSampler:
    """Keeps nothing between calls but its table: a row's token depends on its logits, parameters, seed and tokens."""

    def __init__(self, table: ParamTable) -> None:
        self._table = table

    def draw(self, logits: Tensor, slots: Tensor, floors: Tensor | None = None, ties: Tensor | None = None) -> Tensor:
        """The tokens of plain rows, or of processed and filtered ones: [S] int32, -1 where no token is possible.

        Args:
            logits: [S, V], any floating dtype, contiguous.
            slots: [S] int32.
            floors, ties: [S] float32 and int32; logits under a row's floor are out, those equal to it up to an id in.
        """
        rows, vocab = logits.shape
        parts = triton.cdiv(vocab, _DRAW_BLOCK)
        values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
        tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
        sampled = torch.empty(rows, dtype=torch.int32, device=logits.device)
        draw_kernel[(rows, parts)](
            slots,
            self._table.params,
            self._table.length,
            logits,
            values if floors is None else floors,
            tokens if ties is None else ties,
            values,
            tokens,
            vocab,
            parts,
            FILTERED=floors is not None,
            BLOCK=_DRAW_BLOCK,
        )
        choose_kernel[(rows,)](values, tokens, sampled, parts, BLOCK=triton.next_power_of_2(parts))
        return sampled

    def sample(self, logits: Tensor, slots: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Logprobs]:
        """Any rows: the processors in the order of `processors.py`, then the filters, then the draw.

        Returns:
            tokens [S] int32, -1 where no token is possible; and what `Sampled.logprobs` holds.
        """
        if all(is_plain(row.params) for row in rows):
            return self.draw(logits, slots), []
        work = logits.to(torch.float32, copy=True)
        forbid(work, self._table.tokens, rows)
        self._bias_and_ban(work, rows)
        self._penalise(work, slots, rows)
        if any(row.params.filtered and not row.params.greedy for row in rows):
            floors, ties = self.thresholds(work, slots)
            tokens = self.draw(work, slots, floors, ties)
        else:
            tokens = self.draw(work, slots)
        return tokens, _logprobs(logits, tokens, rows)

    def thresholds(self, logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What min_p, top_k and top_p leave of each row of float32 logits, as `draw` takes it."""
        rows, vocab = logits.shape
        floors = torch.empty(rows, dtype=torch.float32, device=logits.device)
        ties = torch.empty(rows, dtype=torch.int32, device=logits.device)
        scratch = torch.empty(rows, _FILTER_BLOCK, dtype=torch.float32, device=logits.device)
        filter_kernel[(rows,)](
            slots, self._table.params, logits, scratch, floors, ties, vocab, BLOCK=_FILTER_BLOCK, num_warps=16
        )
        return floors, ties

    def _bias_and_ban(self, work: Tensor, rows: Sequence[Row]) -> None:
        flat, vocab = work.view(-1), work.shape[1]
        biased = [(i, row.params) for i, row in enumerate(rows) if len(row.params.bias_ids)]
        if biased:
            index = np.concatenate([params.bias_ids.numpy() + i * vocab for i, params in biased])
            values = np.concatenate([params.bias_values.numpy() for _, params in biased])
            flat.index_add_(0, upload(index, work.device), upload(values, work.device))
        banned = [row.banned.numpy() + i * vocab for i, row in enumerate(rows) if row.banned is not None]
        if banned:
            flat.index_fill_(0, upload(np.concatenate(banned), work.device), float("-inf"))

    def _penalise(self, work: Tensor, slots: Tensor, rows: Sequence[Row]) -> None:
        lengths = [row.num_tokens for row in rows if _penalised(row.params)]
        if not lengths:
            return
        count, vocab = work.shape
        table = self._table
        counts = torch.zeros(count, vocab, dtype=torch.int32, device=work.device)
        pieces = triton.cdiv(max(lengths), _COUNT_BLOCK)
        count_kernel[(count, pieces)](
            slots, table.params, table.tokens, table.length, counts, vocab, table.tokens.stride(0), BLOCK=_COUNT_BLOCK
        )
        penalty_kernel[(count, triton.cdiv(vocab, _DRAW_BLOCK))](
            slots, table.params, work, counts, vocab, BLOCK=_DRAW_BLOCK
        )


def _penalised(params: PreparedParams) -> bool:
    return params.repetition != 1 or params.frequency != 0 or params.presence != 0


def _logprobs(logits: Tensor, tokens: Tensor, rows: Sequence[Row]) -> Logprobs:
    """Under the raw logits, for the rows that ask."""
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if row.params.logprobs is not None:
            groups.setdefault(row.params.logprobs, []).append(i)
    made = []
    for count, chosen in groups.items():
        index = upload(np.asarray(chosen), logits.device)
        picked = tokens.index_select(0, index).clamp(min=0)
        made.append((chosen, columns_of(logits.index_select(0, index), picked, count)))
    return made
