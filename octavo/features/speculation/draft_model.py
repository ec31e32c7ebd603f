"""`ModelDrafter`: the worker half if another, smaller model drafts.

The model (`Companion`) computes each prompt beside the target, chunk by chunk, into memory of its own for the same KV
blocks. After a step it first computes the tokens that the step added, then draws one draft after another with the
request's own parameters and random numbers, so that its draws tend to be those of the target (`sampling/verify.py`).
All of that is launched without waiting for the device: where the host knows only bounds of a slot's length, the steps
read the true one there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.core.plan import NewRow, StepPlan
from octavo.features.speculation.companion_drafter import CompanionDrafter, first_part, without_reports
from octavo.features.speculation.draft_files import check_layers, draft_files
from octavo.models.encoders.registry import is_encoder
from octavo.models.model import EncoderModel, Model
from octavo.worker.companion import Companion
from octavo.worker.drafts import Drafting, Drafts, Following, Ints
from octavo.worker.hooks import Reserved, Site
from octavo.worker.worker import Worker


class ModelDrafter(CompanionDrafter):
    """A drafting model and its slots."""

    def prepare(self, worker: Worker, limits: tuple[int, int]) -> Reserved:
        check_layers(self._config, worker.cache_groups)
        files = draft_files(self._config, self._context)
        if is_encoder(files.config):
            raise ConfigError(
                f"speculative_config: model={files.name!r} makes vectors, not text. Name a model that generates text."
            )
        self._companion = Companion(worker, files)
        self._companion.prepare_kernels()
        self._companion.load()
        return self._companion.reserved_for(limits)

    def attach(self, model: Model | EncoderModel, site: Site) -> None:
        assert site.room is not None
        self._begin(site)
        self._most_tokens = site.room.max_step_tokens
        self._longest = self._companion.spec.max_position
        self._last_token = self._companion.spec.vocab_size - 1
        self._seen = np.zeros(site.room.num_slots, dtype=np.int64)

    def lay_out(self, plan: StepPlan, payload: Any) -> None:
        """Compute the prompts of the plan, whose tokens are known, in the drafting model."""
        rows = [row for row in self._take_over(plan) if self._follows(plan.slots[row])]
        if rows:
            self._compute([plan.slots[row] for row in rows], [plan.num_tokens[row] for row in rows])

    @torch.inference_mode()
    def propose(self, drafting: Drafting, payload: Any) -> Drafts | None:
        plan = drafting.plan
        limits = [plan.proposals[row] for row in drafting.rows]
        chosen = [i for i, row in enumerate(drafting.rows) if self._follows(plan.slots[row], limits[i])]
        if not chosen:
            return None
        slots = [plan.slots[drafting.rows[i]] for i in chosen]
        most = max(limits[i] for i in chosen)
        self._catch_up(drafting, slots, [plan.num_drafts[drafting.rows[i]] for i in chosen])
        for count in range(1, most):
            going = [slot for slot, i in zip(slots, chosen, strict=True) if limits[i] > count]
            self._compute(going, [1] * len(going), samples=True, repeats=count > 1 and len(going) == len(slots))
        self._reach.behind[slots] = 0
        tokens, _ = self._runner.slots.known()
        places = drafting.length[drafting.slots].long()[:, None] + torch.arange(most, device=tokens.device)
        found = tokens[drafting.slots[:, None], places.clamp_(max=tokens.shape[1] - 1)]
        return self._drafts(drafting, chosen, found)

    def _catch_up(self, drafting: Drafting, slots: list[int], drafts: Sequence[int]) -> None:
        """Compute the known tokens that the drafting model lacks, and draw the first draft."""
        index = drafting.slots if len(slots) == len(drafting.rows) else self._device.upload(np.array(slots))
        length = drafting.length[index].long()
        most, least, behind = self._reach.of(slots)
        if self._device.resident:
            behind = np.minimum(np.maximum(behind, 2), least)  # so that most steps have one shape
            counts = self._device.upload(behind)
        else:
            behind = self._exact(slots, length.numpy(), behind, drafts)
            counts = torch.from_numpy(behind)
        width = int(behind.max())
        places = (length[:, None] - width + torch.arange(width, device=length.device)).clamp_(min=0)
        tokens = self._known(drafting.tokens[index[:, None], places])
        self._runner.slots.follow(Following(slots, index, length, tokens, counts, most, least, behind))
        left = behind.tolist()
        while sum(left) > self._most_tokens:
            part = first_part(left, self._most_tokens)
            rows = [row for row, count in enumerate(part) if count]
            self._compute([slots[row] for row in rows], [part[row] for row in rows])
            left = [all_of - done for all_of, done in zip(left, part, strict=True)]
        self._compute(slots, left, samples=True)

    def _exact(self, slots: list[int], length: Ints, behind: Ints, drafts: Sequence[int]) -> Ints:
        """Return how many tokens are behind, where the host can read the slots' lengths: unless all drafts were
        accepted, those that were had been inputs before."""
        rejected = length - self._seen[slots] < 1 + np.asarray(drafts)
        self._seen[slots] = length
        return np.maximum(behind - (rejected & (np.asarray(drafts) > 0)), 1)

    def _follows(self, slot: int, drafts: int = 0) -> bool:
        """Return whether the slot's request has drafts, and all its positions are some of the drafting model's."""
        return slot not in self._off and int(self._reach.length[slot]) + drafts <= self._longest

    def _own_row(self, row: NewRow) -> NewRow:
        """Return the row with tokens that the drafting model has."""
        tokens = np.clip(np.asarray(row.tokens, dtype=np.int64), 0, self._last_token).tolist()
        return msgspec.structs.replace(without_reports(row), tokens=tokens)

    def _known(self, tokens: Tensor) -> Tensor:
        """Return tokens that the drafting model has in place of others, and of embeddings."""
        return tokens.clamp(0, self._last_token)
