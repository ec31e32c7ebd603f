"""Sample rows whose parameters and tokens are on the device, without synchronization or sorting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.device.launch_sizes import cdiv, next_power_of_2
from octavo.device.transfer import Download, Event, upload
from octavo.nn.divided import DividedLogits
from octavo.sampling.allowed import Allowed
from octavo.sampling.logprobs import together
from octavo.sampling.resident_allowed import ResidentAllowed
from octavo.sampling.resident_bans import forbid
from octavo.sampling.resident_logprobs import Columns, columns_of, entries_of
from octavo.sampling.state import PreparedParams
from octavo.sampling.triton_draw import choose_kernel, count_kernel, draw_kernel, penalty_kernel
from octavo.sampling.triton_filter import few_kernel, filter_kernel, peaks_kernel

_DRAW_BLOCK = 4096
_FILTER_BLOCK = 4096
_COUNT_BLOCK = 1024

_FEW = 2048

Logprobs = list[tuple[list[int], Columns]]
"""Groups of rows with equal numbers of alternatives, and their log-probabilities."""


@dataclass(frozen=True, slots=True)
class ParamTable:
    """The kernels' per-slot inputs.

    Attributes:
        params: [slots, NUM_PARAMS] int32, as `parameters.packed_words`.
        tokens: [slots, max_model_len] int32.
        length: [slots] int32, known tokens.
    """

    params: Tensor
    tokens: Tensor
    length: Tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """The result of filtering some rows.

    Attributes:
        floors: [S] float32; logits below a row's floor are removed.
        ties: [S] int32; logits equal to the floor are kept up to this id.
        drawn: [S] int32: the token if the filter kernel also drew it; -1 if none is possible; else -2.
    """

    floors: Tensor
    ties: Tensor
    drawn: Tensor


@dataclass(slots=True)
class ResidentRow:
    """The host's view of one row to sample. `num_tokens` counts the sequence's tokens so far.

    Treated as immutable; not frozen, which would triple the cost of construction, and each step constructs many.
    """

    slot: int
    params: PreparedParams
    num_prompt: int
    num_tokens: int

    @property
    def plain(self) -> bool:
        """Whether only the draw is needed now: no processor, filter or report."""
        return self.params.drawn and (not self.params.min_tokens or self.banned is None)

    @property
    def most_tokens(self) -> int:
        """Upper bound on the sequence's tokens."""
        return self.num_tokens

    @property
    def banned(self) -> Tensor | None:
        """Tokens that may not be sampled yet."""
        params = self.params
        early = params.min_tokens > self.num_tokens - self.num_prompt
        return params.banned_ids if early and len(params.banned_ids) else None


@dataclass(slots=True)
class PendingTokens:
    """Tokens being transferred to the host: [S] int32, -1 for a row that can't be sampled; and log-probabilities."""

    tokens: Download
    logprobs: Logprobs
    order: Tensor | None = field(default=None, kw_only=True)

    @property
    def arrived(self) -> Event | None:
        return self.tokens.arrived

    def token_list(self) -> list[int]:
        found: list[int] = self.tokens.wait().tolist()
        return found

    def logprobs_of(self) -> dict[int, TokenLogprobs]:
        """Return row index -> log-probabilities, for the rows that request them."""
        found: dict[int, TokenLogprobs] = {}
        for rows, columns in self.logprobs:
            found.update(zip(rows, entries_of(columns), strict=True))
        return found

    def kept(self) -> list[int] | None:
        return None


@dataclass(slots=True)
class Verified(PendingTokens):
    """Sampled tokens of rows, some with drafts, and the number of tokens that each row of the plan keeps.

    Attributes:
        counts: [R] integers.
        settle: called with the counts once they have arrived on the host.
    """

    counts: Download
    settle: Callable[[list[int]], None]

    def kept(self) -> list[int]:
        found: list[int] = self.counts.wait().tolist()
        self.settle(found)
        return found


class ResidentSampler:
    """A row's token depends only on its logits, mask, parameters, seed and tokens, not on other steps.

    A buffer for counts is allocated at the first row that needs it; it is all zero between calls.
    """

    def __init__(self, table: ParamTable, vocab_size: int, max_rows: int | None = None) -> None:
        """
        Args:
            vocab_size: tokens of the widest logits.
            max_rows: rows of logits of a step, by default one for each slot.
        """
        self._table = table
        self._allowed = ResidentAllowed(max_rows or len(table.length), vocab_size, table.length.device)
        self._counts: Tensor | None = None

    def allowing(self, allowed: Allowed | None) -> AbstractContextManager[None]:
        """Context for sampling, or recording it, with these masks; None for no masks."""
        return self._allowed.during(allowed)

    def draw(self, logits: Tensor, slots: Tensor, kept: Kept | None = None) -> Tensor:
        """Return the tokens of plain rows, or of processed and filtered ones: [S] int32, -1 if no token is possible.

        Args:
            logits: [S, V], any floating dtype, contiguous.
            slots: [S] int32.
        """
        rows, parts = logits.shape[0], cdiv(logits.shape[1], _DRAW_BLOCK)
        values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
        tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
        self._draw_parts(logits, 0, slots, kept, values, tokens)
        return self._chosen(values, tokens, kept)

    def draw_divided(self, logits: DividedLogits, slots: Tensor) -> Tensor:
        """`draw` for plain rows whose logits the ranks divide: they exchange the best token of each part."""
        own = logits.own
        found = torch.empty(2, own.shape[0], cdiv(own.shape[1], _DRAW_BLOCK), dtype=torch.int32, device=own.device)
        self._draw_parts(own, logits.first, slots, None, found[0].view(torch.float32), found[1])
        every = logits.mesh.all_gather(found)
        return self._chosen(every[0].view(torch.float32), every[1], None)

    def _draw_parts(
        self, logits: Tensor, first: int, slots: Tensor, kept: Kept | None, values: Tensor, tokens: Tensor
    ) -> None:
        """Find the best token of each part of each row; the logits are those of the tokens from `first` on.

        Args:
            values, tokens: [S, parts], receive its value and the token.
        """
        rows, parts = values.shape
        draw_kernel[(rows, parts)](
            slots,
            self._table.params,
            self._table.length,
            self._allowed.which,
            self._allowed.words,
            logits,
            values if kept is None else kept.floors,
            tokens if kept is None else kept.ties,
            tokens if kept is None else kept.drawn,
            values,
            tokens,
            logits.shape[1],
            first,
            parts,
            self._allowed.words.stride(0),
            FILTERED=kept is not None,
            BLOCK=_DRAW_BLOCK,
        )

    def _chosen(self, values: Tensor, tokens: Tensor, kept: Kept | None) -> Tensor:
        """Return the best token of each row's parts."""
        rows, parts = values.shape
        sampled = torch.empty(rows, dtype=torch.int32, device=values.device)
        drawn = tokens if kept is None else kept.drawn
        choose_kernel[(rows,)](
            values, tokens, drawn, sampled, parts, FILTERED=kept is not None, BLOCK=next_power_of_2(parts)
        )
        return sampled

    def sample(self, logits: Tensor, slots: Tensor, rows: Sequence[ResidentRow]) -> tuple[Tensor, Logprobs]:
        """Sample any rows: processors in the order of `processors.py`, then filters, then the draw.

        Forbidden tokens may be masked in `logits`.

        Returns:
            tokens [S] int32, -1 if no token is possible; and the value of `PendingTokens.logprobs`.
        """
        if all(row.plain for row in rows):
            return self.draw(logits, slots), []
        self._allowed.forbid(logits)
        reported = any(row.params.logprobs is not None for row in rows)
        work = logits.to(torch.float32, copy=reported)
        self._forbid(work, rows)
        self._bias(work, rows)
        self._ban(work, rows)
        self._penalize(work, slots, rows)
        filtered = any(row.params.filtered and not row.params.greedy for row in rows)
        tokens = self.draw(work, slots, self.kept(work, slots) if filtered else None)
        return tokens, self._logprobs(logits, work, tokens, slots, rows)

    def kept(self, logits: Tensor, slots: Tensor, *, few: bool = True) -> Kept:
        """Apply min_p, top_k and top_p to rows of float32 logits; without `few`, by the general kernel for all rows."""
        rows, vocab = logits.shape
        device, params = logits.device, self._table.params
        kept = Kept(
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.full((rows,), -2, dtype=torch.int32, device=device),
        )
        scratch = torch.empty(rows, _FILTER_BLOCK, dtype=torch.float32, device=device)
        if few:
            parts = cdiv(vocab, _FILTER_BLOCK)
            groups = parts * (_FILTER_BLOCK // 128)
            maxima = torch.empty(rows, groups, dtype=torch.float32, device=device)
            sums = torch.empty(rows, parts, 3, dtype=torch.float32, device=device)
            lists = torch.empty(rows, next_power_of_2(groups), dtype=torch.int32, device=device)
            ids = torch.empty(rows, _FEW, dtype=torch.int32, device=device)
            peaks_kernel[(rows, parts)](slots, params, logits, maxima, sums, vocab, BLOCK=_FILTER_BLOCK, num_warps=8)
            few_kernel[(rows,)](
                slots,
                params,
                self._table.length,
                logits,
                maxima,
                sums,
                lists,
                scratch,
                ids,
                kept.floors,
                kept.ties,
                kept.drawn,
                vocab,
                parts,
                groups,
                MOST=256,
                PARTS=next_power_of_2(parts),
                GROUPS=lists.shape[1],
                BLOCK=_FILTER_BLOCK,
                ROOM=_FEW,
                num_warps=8,
            )
        filter_kernel[(rows,)](
            slots, params, logits, scratch, kept.floors, kept.ties, kept.drawn, vocab, BLOCK=_FILTER_BLOCK, num_warps=16
        )
        return kept

    def _logprobs(
        self, logits: Tensor, work: Tensor, tokens: Tensor, slots: Tensor, rows: Sequence[ResidentRow]
    ) -> Logprobs:
        """Return log-probabilities for the rows that request them, from the raw logits or the processed ones in
        `work`."""
        made = []
        for chosen, wanted, report in together({i: row.params.logprobs for i, row in enumerate(rows)}):
            index = upload(np.asarray(chosen), logits.device)
            picked = tokens.index_select(0, index).clamp(min=0)
            told = wanted if isinstance(wanted, int) else upload(wanted, logits.device)
            part = (work if report.processed else logits).index_select(0, index)
            if report.processed:
                part = self._drawn_from(part, slots.index_select(0, index), picked, [rows[i].params for i in chosen])
            made.append((chosen, columns_of(part, picked, told, as_logits=report.as_logits)))
        return made

    def _drawn_from(self, work: Tensor, slots: Tensor, tokens: Tensor, params: Sequence[PreparedParams]) -> Tensor:
        """Divide processed logits [n, V] by temperature and set filtered ones to minus infinity, in place."""
        if any(one.filtered and not one.greedy for one in params):
            kept = self.kept(work, slots, few=False)
            floors, ids = kept.floors[:, None], torch.arange(work.shape[1], device=work.device)
            among = (work > floors) | ((work == floors) & (ids <= kept.ties[:, None]))
            among.scatter_(-1, tokens.long()[:, None], True)  # the drawn token: sums may round differently
            work.masked_fill_(~among, float("-inf"))
        temperatures = np.array([[1.0 if one.greedy else float(one.filters[0])] for one in params], dtype=np.float32)
        return work.div_(upload(temperatures, work.device))

    def _forbid(self, work: Tensor, rows: Sequence[ResidentRow]) -> None:
        forbid(work, self._table.tokens, rows)

    def _bias(self, work: Tensor, rows: Sequence[ResidentRow]) -> None:
        flat, vocab = work.view(-1), work.shape[1]
        biased = [(i, row.params) for i, row in enumerate(rows) if len(row.params.bias_ids)]
        if biased:
            index = np.concatenate([params.bias_ids.numpy() + i * vocab for i, params in biased])
            values = np.concatenate([params.bias_values.numpy() for _, params in biased])
            flat.index_add_(0, upload(index, work.device), upload(values, work.device))

    def _ban(self, work: Tensor, rows: Sequence[ResidentRow]) -> None:
        vocab = work.shape[1]
        banned = [row.banned.numpy() + i * vocab for i, row in enumerate(rows) if row.banned is not None]
        if banned:
            work.view(-1).index_fill_(0, upload(np.concatenate(banned), work.device), float("-inf"))

    def _penalize(self, work: Tensor, slots: Tensor, rows: Sequence[ResidentRow]) -> None:
        lengths = [row.most_tokens for row in rows if _penalized(row.params)]
        if not lengths:
            return
        count, vocab = work.shape
        table = self._table
        if self._counts is None or self._counts.numel() < work.numel():
            self._counts = torch.zeros(work.numel(), dtype=torch.int32, device=work.device)
        grid = (count, cdiv(max(lengths), _COUNT_BLOCK))
        read = (table.tokens, table.length, self._counts)
        stride = table.tokens.stride(0)
        count_kernel[grid](slots, table.params, *read, vocab, stride, BLOCK=_COUNT_BLOCK)
        penalty_kernel[grid](slots, table.params, *read, work, vocab, stride, BLOCK=_COUNT_BLOCK)


def _penalized(params: PreparedParams) -> bool:
    return params.repetition != 1 or params.frequency != 0 or params.presence != 0
