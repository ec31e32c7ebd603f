"""`HeadDrafter`: the worker half if a head drafts from the target's hidden states.

The head computes each token beside the target's state at the position before it (see `model.py`), into memory of its
own for the same KV blocks. From the last of them it draws, then goes on with its own outputs in place of the target's
states. On a GPU it computes a step's tokens after each step, and the last one again to draw from it. Nothing waits for
the device: where the host knows only bounds of a slot's length, the steps read the true one there. On a CPU, tokens
that were decoded wait until something is drafted (`waiting.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.draft_tree import DraftTree
from octavo.core.errors import ConfigError
from octavo.core.plan import NewRow, StepPlan
from octavo.core.worker_info import MOST_DRAFTED
from octavo.features import FeatureContext
from octavo.features.speculation.companion_drafter import CompanionDrafter, first_part, without_reports
from octavo.features.speculation.config import DraftConfig
from octavo.features.speculation.draft_files import check_layers, draft_files
from octavo.features.speculation.heads.layers import HeadLayers
from octavo.features.speculation.heads.lookup_first import either, part_of, spread
from octavo.features.speculation.heads.model import HeadModel
from octavo.features.speculation.heads.pairs import LastPairs
from octavo.features.speculation.heads.spec import HeadSpec, Kind
from octavo.features.speculation.heads.tree import TreeDrafter
from octavo.features.speculation.heads.waiting import MOST_WAITING, Waiting
from octavo.features.speculation.lookup_drafters import lookup_drafter
from octavo.hub.files import ModelFiles
from octavo.models.decoder import CausalLM
from octavo.models.load import open_checkpoint
from octavo.models.model import EncoderModel, Model
from octavo.models.native import NativeDecoder
from octavo.models.spec import DecoderSpec
from octavo.native.build import load_separate
from octavo.nn.taps import Taps
from octavo.worker.branches import check_branches, widen
from octavo.worker.companion import Companion
from octavo.worker.drafts import Drafting, Drafts, Following, Ints
from octavo.worker.hooks import Capacity, Reserved, Site
from octavo.worker.native_replay import NativeReplay
from octavo.worker.slots import HostSlots
from octavo.worker.step import Step
from octavo.worker.worker import Worker

_MOST_BEHIND = 16
"""Most tokens of a step, besides one of each row, up to which the head's logits of all of them cost little."""


def head_files(config: DraftConfig, context: FeatureContext, dtype: torch.dtype) -> ModelFiles:
    """Return the files of a head, with the target's dtype: whatever its own, it reads the target's states and
    tables."""
    files = draft_files(config, context)
    return replace(files, config={**files.config, "dtype": str(dtype).removeprefix("torch.")})


def states_bytes(
    head: HeadSpec, limits: tuple[int, int], dtype: torch.dtype, tree: DraftTree | None, *, waits: bool
) -> int:
    """Return the memory of the states that a head reads and makes, and of the logits of a tree.

    Args:
        limits: sequences at once, and tokens of a step, at most.
        waits: states wait until something is drafted.
    """
    read = len(head.places) * head.target_size
    states = (max(limits) + 2) * (read + 2 * head.hidden_size) * dtype.itemsize
    if waits:
        states += limits[0] * MOST_WAITING * read * dtype.itemsize
    if tree is not None:
        widest = int(np.bincount(tree.depths).max())
        states += 2 * min(limits[0], MOST_DRAFTED) * widest * head.vocab_size * 4
    return states


@dataclass(frozen=True, slots=True)
class _Rows:
    """D rows that get drafts.

    Attributes:
        rows, slots: their indices in the plan, and their slots.
        limits: the most drafts of each.
        index: [D] int64, the slots.
        known: [D] int64, known tokens of the target.
        given: [D, hidden_size], the states beside the last known tokens; None if they wait.
    """

    drafting: Drafting
    rows: list[int]
    slots: list[int]
    limits: list[int]
    index: Tensor
    known: Tensor
    given: Tensor | None


class HeadDrafter(CompanionDrafter):
    """A head and its slots, which have the target's tokens but the first."""

    def __init__(self, config: DraftConfig, context: FeatureContext) -> None:
        super().__init__(config, context)
        self.tree = config.tree
        self._lookup = lookup_drafter(config, context.device) if config.reads_predictions else None

    def add(self, slot: int, options: msgspec.Raw | None) -> None:
        super().add(slot, options)
        if self._lookup is not None:
            self._lookup.add(slot, options)

    def prepare(self, worker: Worker, limits: tuple[int, int]) -> Reserved:
        model, spec = worker.model, worker.spec
        if not isinstance(model, CausalLM | NativeDecoder) or not isinstance(spec, DecoderSpec):
            raise ConfigError(
                f"speculative_config: method={self._config.method} reads hidden states, which a model of another "
                "implementation does not keep. Choose another method."
            )
        check_layers(self._config, worker.cache_groups)
        if self.tree is not None:
            check_branches(worker, "speculative_config: speculative_token_tree")
        files = self._files(worker)
        random = worker.load_format == "dummy" and not files.weights
        device = worker.device.torch_device.type
        own = open_checkpoint(files, "dummy" if random else "auto", worker.config.seed, device)
        shared = model if isinstance(model, CausalLM) and (model.is_whole or model.spec.tied) else None
        kind = cast("Kind", self._config.method)
        layers = HeadLayers(kind, spec, shared, own, worker.checkpoint(), self._torch_needed(worker))
        # In float32, weights that are stored in 16 bits stay so: that computes the same from half the bytes.
        narrow = worker.dtype == torch.float32 and not worker.device.resident
        rounded = isinstance(model, NativeDecoder) and model.has_integers
        self._companion = Companion(worker, files, layers, dtype="auto" if narrow else None, rounded=rounded)
        kept = cast("HeadSpec", self._companion.spec)
        self._check_places(kept, (model if isinstance(model, CausalLM) else model.source).layer_range)
        self._companion.prepare_kernels()
        if narrow and isinstance(worker.model, NativeDecoder):
            load_separate("codes", worker.settings.cpu_isa)  # not in the first step, since compiling takes seconds
        self._recorded_queries = widen(self._companion.attention, self.tree)
        self._companion.load()
        if self.tree is not None:
            check_branches(self._companion, "speculative_config: speculative_token_tree")
        self._dtype = worker.dtype
        self._rewinds = not all(group.grows for group in worker.cache_groups)
        states = states_bytes(kept, limits, worker.dtype, self.tree, waits=not worker.device.resident)
        return self._companion.reserved_for(limits) + Reserved(workspace=states)

    def _torch_needed(self, worker: Worker) -> str:
        """Return why the head can't be a native program even where there are kernels for its layers; "" if it can."""
        if self.tree is not None:
            return "drafts in trees"
        if worker.mesh.size > 1:
            return "heads that several ranks divide"
        return "" if isinstance(worker.model, NativeDecoder) else "heads of models that run in torch"

    def _check_places(self, kept: HeadSpec, layers: range) -> None:
        """Raise ConfigError if the head reads states that another stage of a pipeline computes."""
        if kept.places[0] < layers.start:
            raise ConfigError(
                f"speculative_config: method={self._config.method} reads the input of layer {kept.places[0]}, but in a "
                f"pipeline the last stage drafts, which has layers {layers.start} to {layers.stop - 1} here. Choose "
                "method=ngram, draft_model or eagle, or use --tensor-parallel-size instead of --pipeline-parallel-size."
            )

    def _files(self, worker: Worker) -> ModelFiles:
        if self._config.method == "mtp":
            return worker.files
        return head_files(self._config, self._context, worker.dtype)

    @property
    def _head_spec(self) -> HeadSpec:
        return cast("HeadSpec", self._companion.spec)

    @property
    def _head(self) -> HeadModel:
        model = self._companion.model
        return cast("HeadModel", model.source if isinstance(model, NativeDecoder) else model)

    def attach(self, model: Model | EncoderModel, site: Site) -> None:
        assert site.room is not None
        assert isinstance(model, CausalLM | NativeDecoder)
        self._load()
        spec, device = self._head_spec, site.device.torch_device
        tokens = max(site.room.max_step_tokens, site.room.num_slots) + 2
        model.taps = Taps(spec.places, model.spec.num_layers, tokens, spec.target_size, self._dtype, device)
        if isinstance(model, CausalLM):
            self._head.share(model)
        self._head.reserve(tokens, device)
        self._begin(site)
        if isinstance(self._runner.replay, NativeReplay):
            self._runner.replay.most_behind = _MOST_BEHIND
        self._target = model
        self._pairs = LastPairs(site.room.num_slots, site.device)
        self._waiting = None if site.device.resident else Waiting(rewinds=self._rewinds)
        self._most_tokens = site.room.max_step_tokens
        self._trees = None if self.tree is None else self._tree_drafter(self.tree, site.room)

    def _tree_drafter(self, tree: DraftTree, room: Capacity) -> TreeDrafter:
        companion = self._companion
        page, longest = companion.block_size, room.max_model_len
        drafter = TreeDrafter(tree, self._head, companion.attention, page, longest)
        records = self._device.resident and self._head.recordable and not companion.settings.enforce_eager
        records = records and drafter.most_at_once <= self._recorded_queries
        recorder = self._device.recorder() if records else None
        if recorder is not None:
            drafter.record(recorder, self._device, room.num_slots, -(-longest // page))
        return drafter

    def detach(self) -> None:
        if self._running is not None:
            self._target.taps = None
            self._trees = None
        super().detach()

    def drawn(self, plan: StepPlan, tokens: Tensor, length: Tensor, order: Tensor | None) -> None:
        """Compute the plan's tokens in the head, or keep their states."""
        taps = self._target.taps
        assert taps is not None
        states = taps.states[: plan.total_tokens] if order is None else taps.states.index_select(0, order)
        if self._waiting is None:
            self._compute_all(plan, states, tokens, length)
            return
        self._waiting.add(plan, states, length, self._off)
        rows = [row for row, slot in enumerate(plan.slots) if slot not in self._off and row not in plan.proposals]
        self._compute_due(plan, rows, tokens, length)

    def _compute_due(self, plan: StepPlan, rows: Sequence[int], tokens: Tensor, length: Tensor) -> None:
        """On a CPU, compute what waits of rows that the head does not draft for, if it is much, or a prompt, whose
        blocks others may share."""
        assert self._waiting is not None
        due: list[int] = []
        for row in rows:
            waits = self._waiting.count(plan.slots[row])
            if waits >= MOST_WAITING or (waits and plan.num_tokens[row] - plan.num_drafts[row] > 1):
                due.append(plan.slots[row])
        if due:
            self._catch_up(due, tokens.numpy(), length.numpy())

    def _compute_all(self, plan: StepPlan, states: Tensor, tokens: Tensor, length: Tensor) -> None:
        self._head.given[: len(states)].copy_(self._head.states(states, cast("CausalLM", self._target)))
        index = self._device.upload(np.array(plan.slots))
        known = length[index].long()
        width = 1 + max(plan.num_drafts)
        self._follow(plan.slots, index, known, tokens, width, None)
        self._last = self._pairs.of(plan, index, known)
        self._compute(plan.slots, plan.num_tokens)
        sampled = [row for row, samples in enumerate(plan.samples) if samples]
        if len(sampled) < len(plan.slots):
            index = self._device.upload(np.array([plan.slots[row] for row in sampled], dtype=np.int64))
            known = length[index].long()
        if sampled:
            self._follow([plan.slots[row] for row in sampled], index, known, tokens, 1, 0)

    def _catch_up(
        self,
        slots: list[int],
        tokens: NDArray[np.int32],
        length: Ints,
        *,
        samples: bool = False,
        draws: bool = True,
    ) -> Step | None:
        """On a CPU, compute what waits; return the last step, which samples and draws as `_compute` says.

        Args:
            tokens, length: those of the target's slots, as in `Drafting`.
        """
        waiting, own, step = self._waiting, self._runner.slots, None
        assert waiting is not None
        assert isinstance(own, HostSlots)
        for slot in slots:
            done = waiting.done(slot)
            own.resume(slot, done, np.maximum(tokens[slot, done + 1 : length[slot]], 0), done)
        left = [waiting.count(slot) for slot in slots]
        total = sum(left)
        while total:
            whole = total <= self._most_tokens
            part = left if whole else first_part(left, self._most_tokens)
            states = waiting.take(slots, part)
            self._head.given[: len(states)].copy_(self._head.states(states, cast("CausalLM", self._target)))
            total -= len(states)
            if whole:
                return self._compute(slots, part, samples=samples, draws=draws)
            rows = [row for row, count in enumerate(part) if count]
            left = [all_of - done for all_of, done in zip(left, part, strict=True)]
            step = self._compute([slots[row] for row in rows], [part[row] for row in rows])
        return step

    def _propose_on_host(self, drafting: Drafting, chosen: list[int], limits: list[int]) -> Tensor:
        """On a CPU, return chains of drafts for the chosen ones of the drafting rows, [D, K]."""
        slots = [drafting.plan.slots[drafting.rows[i]] for i in chosen]
        length, own = drafting.length.numpy(), self._runner.slots
        assert isinstance(own, HostSlots)
        step = self._catch_up(slots, drafting.tokens.numpy(), length, samples=True)
        assert step is not None, "the step's own tokens wait"
        self._go_on(slots, [limits[i] for i in chosen], step)
        found = np.zeros((len(limits), max(limits)), dtype=np.int64)
        for i, slot in zip(chosen, slots, strict=True):
            known = int(length[slot]) - 1
            drafts = own.tokens[slot, known : known + limits[i]]  # fewer at the end of its row, where none are used
            found[i, : len(drafts)] = drafts
            own.resume(slot, known, drafts[:0], known)
        return torch.from_numpy(found)

    def propose(self, drafting: Drafting, payload: Any) -> Drafts | None:
        found = None if self._lookup is None else self._lookup.propose(drafting, payload)
        if found is None:
            return self._propose(drafting)
        # On a GPU, the host does not know which rows have drafts; ranks must compute the same ones.
        if self._waiting is None or self._companion.mesh.size > 1:
            return either(found, self._propose(drafting))
        return self._completed(found, drafting)

    def _completed(self, found: Drafts, drafting: Drafting) -> Drafts:
        """On a CPU, return drafts of lookup with the head's own for the rows that have none."""
        plan, counts = drafting.plan, found.counts.tolist()
        left = [i for i, count in enumerate(counts) if not count]
        own = self._propose(part_of(drafting, left)) if left else None
        others = [row for row, count in zip(drafting.rows, counts, strict=True) if count]
        rows = [row for row in others if plan.slots[row] not in self._off]
        self._compute_due(plan, rows, drafting.tokens, drafting.length)
        return either(found, None if own is None else spread(own, left, len(counts)))

    def _propose(self, drafting: Drafting) -> Drafts | None:
        """Return the head's own drafts."""
        plan = drafting.plan
        limits = [plan.proposals[row] for row in drafting.rows]
        chosen = [i for i, row in enumerate(drafting.rows) if plan.slots[row] not in self._off]
        if not chosen:
            return None
        if self._waiting is not None and self.tree is None:
            return self._drafts(drafting, chosen, self._propose_on_host(drafting, chosen, limits))
        found = torch.zeros(len(limits), max(limits), dtype=torch.int64, device=drafting.tokens.device)
        # Steps of the head overwrite the states beside the plan's tokens, so those that are needed are copied first.
        given = self._head.given.index_select(0, self._last) if self._waiting is None else None
        trees = [i for i in chosen if self.tree is not None and limits[i] > self.tree.chain]
        chains = [i for i in chosen if i not in trees] if trees else chosen
        for part, draft in ((trees, self._tree), (chains, self._chain)):
            if part:
                self._draft(drafting, part, limits, given, found, draft)
        return self._drafts(drafting, chosen, found)

    def _draft(
        self,
        drafting: Drafting,
        chosen: list[int],
        limits: list[int],
        given: Tensor | None,
        found: Tensor,
        draft: Callable[[_Rows], Tensor],
    ) -> None:
        """Write the drafts of the chosen ones of the drafting rows to `found` [D, K].

        Args:
            given: states beside the last known tokens of all rows of the plan; None if they wait.
        """
        rows, index = [drafting.rows[i] for i in chosen], drafting.slots
        slots = [drafting.plan.slots[row] for row in rows]
        if len(chosen) < len(drafting.rows):
            index = self._device.upload(np.array(slots))
        if given is not None and len(rows) < len(drafting.plan.slots):
            given = given.index_select(0, self._device.upload(np.array(rows)))
        one = _Rows(drafting, rows, slots, [limits[i] for i in chosen], index, drafting.length[index].long(), given)
        drafts = draft(one)
        if index is drafting.slots:
            found[:, : drafts.shape[1]] = drafts
        else:
            found[self._device.upload(np.array(chosen)), : drafts.shape[1]] = drafts
        self._follow(slots, index, one.known, drafting.tokens, 1, 0)

    def _chain(self, rows: _Rows) -> Tensor:
        """Return drafts that the head draws one after the other, [D, K]."""
        step = self._first(rows, draws=True)
        self._go_on(rows.slots, rows.limits, step)
        tokens, _ = self._runner.slots.known()
        places = rows.known[:, None] - 1 + torch.arange(max(rows.limits), device=tokens.device)
        return tokens[rows.index[:, None], places.clamp_(max=tokens.shape[1] - 1)].long()

    def _tree(self, rows: _Rows) -> Tensor:
        """Return the most likely drafts in the shape of the tree, [D, N]."""
        step = self._first(rows, draws=False)
        assert step.hidden is not None
        assert self._trees is not None
        tables = self._runner.slots.tables_of(rows.index)
        return self._trees.draft(step.hidden, tables, rows.known - 1)

    def _first(self, rows: _Rows, *, draws: bool) -> Step:
        """Compute these rows' last known tokens, and draw their first drafts if it `draws`."""
        drafting, slots = rows.drafting, rows.slots
        if self._waiting is not None:
            step = self._catch_up(slots, drafting.tokens.numpy(), drafting.length.numpy(), samples=True, draws=draws)
            assert step is not None, "the step's own tokens wait"
            return step
        assert rows.given is not None
        self._follow(slots, rows.index, rows.known, drafting.tokens, 1, 1)
        self._head.given[: len(slots)].copy_(rows.given)
        return self._compute(slots, [1] * len(slots), samples=True, draws=draws)

    def _go_on(self, slots: list[int], most: list[int], step: Step) -> None:
        """Draw the drafts after the first ones, which this step drew; each slot has its own number."""
        given, replay, going = self._head.given, self._runner.replay, list(range(len(slots)))
        count, longest, again = 1, max(most), False
        while count < longest:
            left = [place for place, i in enumerate(going) if most[i] > count]
            ends = left
            if step.hidden is None:  # a replay leaves the hidden states where it found those of the target
                ends = [sum(step.plan.num_tokens[: place + 1]) - 1 for place in left]
            if step.hidden is not None or ends != list(range(len(left))):
                hidden = given if step.hidden is None else step.hidden
                whole = step.hidden is not None and len(left) == len(going)
                hidden = hidden if whole else hidden.index_select(0, self._device.upload(np.array(ends)))
                given[: len(left)].copy_(hidden[: len(left)])
            repeats, going = again and len(left) == len(going), [going[place] for place in left]
            step = self._compute([slots[i] for i in going], [1] * len(going), samples=True, repeats=repeats)
            count, again = count + 1, True
            more = min(most[i] for i in going) - count
            if more > 0 and step.hidden is None and isinstance(replay, NativeReplay):
                replay.again(more)
                count += more

    def _follow(
        self,
        slots: Sequence[int],
        index: Tensor,
        known: Tensor,
        tokens: Tensor,
        width: int,
        behind: int | None,
    ) -> None:
        """Take over the last `width` tokens of the target's slots; the last `behind` of them are not computed; None
        leaves that as it is."""
        places = (known[:, None] - width + torch.arange(width, device=known.device)).clamp_(min=1)
        last = tokens[index[:, None], places].clamp(min=0)
        most, least, _ = self._reach.of(slots)
        counts = None if behind is None else torch.full_like(known, behind)
        own: tuple[Ints, Ints] = (most - 1, np.maximum(least - 1, 0))
        uncomputed = np.full(len(most), behind or 0)
        self._runner.slots.follow(Following(slots, index, known - 1, last, counts, *own, uncomputed))

    def _own_row(self, row: NewRow) -> NewRow:
        """Return the row without its first token."""
        if self._waiting is not None:
            self._waiting.begin(row.slot, row.num_computed)
        tokens = np.maximum(row.tokens[1:], 0).tolist()
        return msgspec.structs.replace(without_reports(row), tokens=tokens, num_prompt=row.num_prompt - 1)
