"""`HostDrafter` and `DeviceDrafter`: prompt lookup, for tokens in host memory and on a device."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from octavo.core.output import StepOutput
from octavo.core.plan import StepPlan
from octavo.features.speculation import device, lookup
from octavo.features.speculation.config import DraftConfig
from octavo.features.speculation.history import History
from octavo.features.speculation.lookup import NOTHING, Tokens
from octavo.features.speculation.payload import NAME, SpeculationOption, option_of
from octavo.worker.drafts import Drafting, Drafts
from octavo.worker.hooks import WorkerHook

_PREDICTED = 32
"""Most tokens that are compared to find the place in a prediction. One suffices to begin: it is expected there."""
_LEAST_OUTPUT = 4
"""Shortest output that is worth to be searched later."""


class HostDrafter(WorkerHook):
    """Searches with numpy, one row after another."""

    name = NAME

    def __init__(self, config: DraftConfig) -> None:
        self._config = config
        self._votes = config.method != "ngram"
        self._options: dict[int, SpeculationOption] = {}
        self._predictions: dict[int, Tokens] = {}
        kept = config.suffix_decoding_max_cached_requests
        self._history = History(kept) if kept else None
        self._outputs: dict[int, list[int]] = {}

    def add(self, slot: int, options: msgspec.Raw | None) -> None:
        option = option_of(options)
        self._predictions.pop(slot, None)
        if option.prediction:
            self._predictions[slot] = np.array(option.prediction, dtype=np.int32)
        self._options[slot] = option
        if self._history is not None:
            output = self._outputs.pop(slot, [])
            if len(output) >= _LEAST_OUTPUT:
                self._history.add(output)

    def after_sample(self, plan: StepPlan, output: StepOutput) -> None:
        if self._history is not None:
            for slot, tokens in zip(plan.slots, output.tokens, strict=True):
                if tokens:
                    self._outputs.setdefault(slot, []).extend(tokens)

    def propose(self, drafting: Drafting, payload: Any) -> Drafts | None:
        plan, tokens, length = drafting.plan, drafting.tokens.numpy(), drafting.length.numpy()
        rows = ((plan.slots[row], limit) for row, limit in plan.proposals.items())
        found = [self._draft(slot, tokens[slot, : length[slot]], limit) for slot, limit in rows]
        counts = [len(one) for one in found]
        if not any(counts):
            return None
        drafts = np.zeros((len(found), max(counts)), dtype=np.int64)
        for row, one in enumerate(found):
            drafts[row, : len(one)] = one
        return Drafts(torch.from_numpy(drafts), torch.from_numpy(np.array(counts)))

    def _draft(self, slot: int, known: Tokens, limit: int) -> Tokens:
        config = self._config
        predicted = self._predictions.get(slot)
        if predicted is not None:
            place = len(known) - self._options[slot].num_prompt - 1
            found = lookup.longest(predicted, known, _PREDICTED)
            drafts = lookup.nearest(found, place, min(limit, 2 * found.size))
            if len(drafts):
                return drafts
        if not config.looks_up:
            return NOTHING
        matches = lookup.longest(known, known, config.prompt_lookup_max)
        if self._history is not None and matches.size < config.prompt_lookup_max:
            earlier = lookup.longest(self._history.text, known, config.prompt_lookup_max)
            matches = earlier if earlier.size > matches.size else matches
        if matches.size < config.least_match:
            return NOTHING
        if not self._votes:
            return lookup.last(matches, limit)
        limit = min(limit, max(1, int(matches.size * config.suffix_decoding_max_spec_factor)))
        drafts = lookup.voted(matches, limit, config.suffix_decoding_min_token_prob)
        return _before_separator(drafts)


class DeviceDrafter(WorkerHook):
    """Searches with torch, all rows at once; nothing is read back."""

    name = NAME

    def __init__(self, config: DraftConfig, device: str) -> None:
        self._config = config
        self._device = device
        self._predictions: dict[int, SpeculationOption] = {}
        self._table: tuple[list[int], Tensor, Tensor, Tensor] | None = None
        """Slots, their predictions [n, P], sizes [n] and prompt lengths [n], as of the last step with predictions."""

    def add(self, slot: int, options: msgspec.Raw | None) -> None:
        option = option_of(options)
        if self._predictions.pop(slot, None) is not None or option.prediction:
            self._table = None
        if option.prediction:
            self._predictions[slot] = option

    def propose(self, drafting: Drafting, payload: Any) -> Drafts | None:
        config, slots = self._config, drafting.slots
        count = max(drafting.plan.proposals.values())
        length = drafting.length[slots].long()
        known = drafting.tokens[slots]
        numbers = [drafting.plan.slots[row] for row in drafting.rows]
        predicted = any(slot in self._predictions for slot in numbers)
        if not predicted and not config.looks_up:
            return None
        end, size = device.matched(known, length, known, length, length, config.prompt_lookup_max)
        tokens, counts = device.following(known, length, end, count, repeat=True)
        counts = torch.where(size >= config.least_match, counts, 0) if config.looks_up else torch.zeros_like(counts)
        if predicted:
            expected, expected_size, prompt = self._expected(numbers)
            end, size = device.matched(expected, expected_size, known, length, length - prompt - 1, _PREDICTED)
            others, valid = device.following(expected, expected_size, end, count, repeat=False)
            chosen = (size > 0) & (valid > 0)
            tokens, counts = torch.where(chosen[:, None], others, tokens), torch.where(chosen, valid, counts)
        return Drafts(tokens, counts)

    def _expected(self, numbers: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the predictions of these slots [D, P] int32, their sizes [D] and the lengths of the prompts [D]."""
        if self._table is None or self._table[0] != numbers:
            options = [self._predictions.get(slot, SpeculationOption()) for slot in numbers]
            width = max(len(one.prediction) for one in options)
            table = np.full((len(options), width), -2, dtype=np.int32)
            for row, one in enumerate(options):
                table[row, : len(one.prediction)] = one.prediction
            sizes, prompts = [len(one.prediction) for one in options], [one.num_prompt for one in options]
            parts = (torch.from_numpy(table), torch.tensor(sizes), torch.tensor(prompts))
            sent = [part.to(self._device, non_blocking=True) for part in parts]
            self._table = (numbers, sent[0], sent[1], sent[2])
        return self._table[1:]


def _before_separator(drafts: Tokens) -> Tokens:
    """Cut drafts before the end of an earlier output, or an embedding in place of a token."""
    odd = np.flatnonzero(drafts < 0)
    return drafts[: odd[0]] if len(odd) else drafts


def lookup_drafter(config: DraftConfig, device: str) -> HostDrafter | DeviceDrafter:
    return HostDrafter(config) if device == "cpu" else DeviceDrafter(config, device)
