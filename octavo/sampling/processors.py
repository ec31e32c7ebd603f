"""Change logits before the draw: forbidden tokens, bias, ban of stop tokens, repetition, frequency and presence.

Stateless: each step counts penalties from the row's tokens, at a cost linear in the row's length and not in the
vocabulary, so that preemption, resumption and a change of slot need no bookkeeping.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.sampling.bans import forbid
from octavo.sampling.state import SampleRow


def process(logits: Tensor, rows: list[SampleRow]) -> None:
    """Apply every row's processors in place.

    Args:
        logits: [S, V] float32, contiguous.
        rows: S of them.
    """
    flat, vocab = logits.view(-1), logits.shape[1]
    forbid(logits, rows)
    _bias(flat, vocab, rows)
    _ban(flat, vocab, rows)
    _repetition(flat, vocab, rows)
    _frequency_presence(flat, vocab, rows)


def _bias(flat: Tensor, vocab: int, rows: list[SampleRow]) -> None:
    chosen = [(i, row.slot_params) for i, row in enumerate(rows) if len(row.slot_params.bias_ids)]
    if chosen:
        index = torch.cat([params.bias_ids + i * vocab for i, params in chosen]).to(flat.device)
        flat[index] += torch.cat([params.bias_values for _, params in chosen]).to(flat.device)


def _ban(flat: Tensor, vocab: int, rows: list[SampleRow]) -> None:
    banned = [
        row.slot_params.banned_ids + i * vocab
        for i, row in enumerate(rows)
        if row.slot_params.min_tokens > row.num_output and len(row.slot_params.banned_ids)
    ]
    if banned:
        flat[torch.cat(banned).to(flat.device)] = float("-inf")


def _repetition(flat: Tensor, vocab: int, rows: list[SampleRow]) -> None:
    """Keskar et al. 2019, "CTRL", section 4.1 (https://arxiv.org/abs/1909.05858), by the logit's sign."""
    chosen = [(i, row) for i, row in enumerate(rows) if row.slot_params.repetition != 1]
    if not chosen:
        return
    known = [ids[ids >= 0] for ids in (row.ids for _, row in chosen)]  # without placeholders
    index = torch.cat([ids + i * vocab for (i, _), ids in zip(chosen, known, strict=True)])
    penalty = _spread([row.slot_params.repetition for _, row in chosen], [len(ids) for ids in known], flat)
    seen = flat[index]
    # All are read first, so that a token that occurs twice is written twice with the same value.
    flat[index] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _frequency_presence(flat: Tensor, vocab: int, rows: list[SampleRow]) -> None:
    for kind, (frequency, presence) in _groups(rows).items():
        output = [rows[i].ids[rows[i].num_prompt :] + i * vocab for i in kind]
        index, counts = torch.cat(output).unique(return_counts=True)
        flat[index] -= counts * frequency + presence


def _groups(rows: list[SampleRow]) -> dict[tuple[int, ...], tuple[float, float]]:
    """Group the rows with output by their pair of penalties."""
    members: dict[tuple[float, float], list[int]] = {}
    for i, row in enumerate(rows):
        pair = (row.slot_params.frequency, row.slot_params.presence)
        if pair != (0, 0) and row.num_output > 0:
            members.setdefault(pair, []).append(i)
    return {tuple(indices): pair for pair, indices in members.items()}


def _spread(values: list[float], counts: list[int], like: Tensor) -> Tensor:
    """Repeat each value by its count."""
    spread = torch.tensor(values, dtype=like.dtype).repeat_interleave(torch.tensor(counts))
    return spread.to(like.device)
