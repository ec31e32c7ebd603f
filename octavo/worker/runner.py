"""`Runner`: a model behind the `Executor` protocol. It computes plans and makes no decisions.

Features take part through `WorkerHook`. Differences between devices are in `Slots`, `Replay` and `Sampler`; see
`parts.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.core.spans import Spans, Watched
from octavo.device.transfer import Link
from octavo.models.decoder import CausalLM
from octavo.models.model import EncoderModel, Model, watch_model
from octavo.sampling.allowed import Allowed
from octavo.worker.blocks import Blocks
from octavo.worker.compute import compute
from octavo.worker.hooks import ORDINARY, Hooks
from octavo.worker.mover import Mover
from octavo.worker.own_rows import OwnRows
from octavo.worker.parts import Forward, NoReplay, Prepares, Replay, Sampler, Slots
from octavo.worker.relay import NO_RELAY, Relay
from octavo.worker.step import Step


class Runner:
    """Runs steps one after another on one device.

    Attributes:
        slots: the state of running requests.
        hooks: the worker halves of the features.
        replay: computes recorded steps, and counts them.
    """

    def __init__(
        self,
        model: Model | EncoderModel,
        attention: Prepares,
        link: Link,
        blocks: Blocks,
        slots: Slots,
        sampler: Sampler,
        replay: Replay,
        hooks: Hooks,
        relay: Relay = NO_RELAY,
        forward: Forward | None = None,
        own_rows: OwnRows | None = None,
    ) -> None:
        """
        Args:
            hooks: already attached to the model.
            relay: to and from other stages of a pipeline.
            forward: in place of the model's, in steps that are not recorded and of the ordinary variant.
            own_rows: runs the layers on this rank's requests only; None if every rank computes all requests.
        """
        self._model = model
        self._attention = attention
        self._link = link
        self._blocks = blocks
        self.slots = slots
        self._sampler = sampler
        self.hooks = hooks
        self._relay = relay
        self._forward, self._own_rows = forward if own_rows is None else own_rows.forward, own_rows
        self._mover = Mover(blocks, link, hooks.tiers) if hooks.tiers else None
        self._last: Step | None = None
        self.replay = replay

    def forward(self, plan: StepPlan) -> Step:
        hooks = self.hooks
        if self._own_rows is not None:
            plan = self._own_rows.admit(plan)
        if not plan.slots:
            self._move(plan)
            return Step(plan, hooks, mover=self._mover)
        if plan.sampled and not self._relay.last:
            self.slots.learn(plan.sampled)
        self.slots.apply(plan)
        if plan.new:
            hooks.add(plan.new)
        if plan.copies:
            self._blocks.copy(plan.copies)
        self._move(plan)  # after the copies: a block that one of them reads may be free by now, and be loaded into
        hooks.lay_out(plan)
        step = Step(plan, hooks, began=self._link.event(), mover=self._mover)
        variant = hooks.variant(plan.payload)
        hooks.select(variant)
        if self._relay.last:
            step.prompts = self.slots.prompt_rows(plan)
        if self.replay.takes(plan, variant) and not self._takes_hidden(step):
            self._relay.receive(plan.total_tokens)
            self.replay.forward(step, self._known_masks(plan))
            if not self._relay.last:
                assert step.hidden is not None
                self._relay.send(step.hidden.clone())  # the next replay may overwrite it before it is sent
        else:
            self._compute(step, self._forward if variant == ORDINARY else None)
        self._follow(step)
        return step

    def change(self, plan: StepPlan) -> None:
        """Apply a plan's changes of slots and blocks without computing its rows."""
        self.slots.apply(plan)
        if plan.copies:
            self._blocks.copy(plan.copies)

    def run(self, plan: StepPlan) -> Step:
        """Compute a plan for the tokens that it leaves in the slots; its result is not read."""
        step = self.forward(plan)
        self.sample(step, {})
        step.retired = True
        return step

    def _move(self, plan: StepPlan) -> None:
        """Begin the plan's transfers. Those under way go on: what begins now can end while this step is computed."""
        if plan.transfers is not None:
            assert self._mover is not None, "a feature has the engine half of a tier only"
            self._mover.begin(plan.transfers)
        elif self._mover is not None:
            self._mover.advance()

    def _follow(self, step: Step) -> None:
        """Remember the step that was running when this one was launched, to measure the device's idle time."""
        if step.began is not None:
            step.before = self._last if self._last is not None and not self._last.retired else None
            self._last = step

    def _takes_hidden(self, step: Step) -> bool:
        """Return whether the step needs more than a replay supports: all hidden states, given embeddings or, if the
        replay samples, changed logits."""
        payload = step.plan.payload
        hooks = self.hooks
        if step.prompts or not payload:
            return bool(step.prompts)
        changed = self.replay.draws and hooks.change_logits(payload)
        return changed or hooks.read_hidden(payload) or hooks.feed(payload)

    def _known_masks(self, plan: StepPlan) -> Allowed | None:
        if not plan.payload or not self.replay.draws:
            return None
        return self.hooks.allowed(plan.logit_slots, plan.payload)

    @torch.inference_mode()
    def _compute(self, step: Step, forward: Forward | None) -> None:
        """Compute the step without a recording."""
        plan, payload = step.plan, step.plan.payload
        layout = self.slots.lay_out(plan)
        batch = layout.input
        self.hooks.add_inputs(batch, payload)
        for one in (batch, *batch.others):
            one.attn = self._attention.prepare(one, self._blocks.size)
        relay = self._relay
        fewer = len(batch.logit_rows) < batch.num_tokens and relay.last
        if fewer and not step.prompts and not self.hooks.read_hidden(payload):
            batch.hidden_rows = batch.logit_rows
        if payload:
            batch.additions = self.hooks.additions(batch.num_tokens, payload)
        relay.receive(batch.num_tokens)
        hidden = compute(self._model, batch, self.hooks, payload if relay.first else None, forward)
        if not relay.last:
            relay.send(hidden)
            self.slots.advance(plan, layout)
            return
        step.findings = self.hooks.after_forward(hidden, payload)
        self.slots.advance(plan, layout)
        for prompt in step.prompts:
            prompt.hidden = hidden[prompt.start : prompt.start + len(prompt.following)]
        chosen = batch.hidden_rows is not None or len(batch.logit_rows) == batch.num_tokens
        step.hidden = hidden if chosen else hidden.index_select(0, batch.logit_rows)
        step.rows = layout.rows

    def sample(self, step: Step, payload: dict[str, Any]) -> None:
        if not self._relay.last:
            step.passed_on = True
            return
        if step.drawn is None or payload:
            self._sample(step, payload)
        if self.hooks.drawing and step.plan.slots:
            with torch.inference_mode():
                order = None if step.drawn is None else step.drawn.order
                self.hooks.drawn(step.plan, *self.slots.known(), order)
        if step.plan.proposals:
            self._propose(step, payload)

    @torch.inference_mode()
    def _sample(self, step: Step, payload: dict[str, Any]) -> None:
        plan, hooks = step.plan, self.hooks
        order = plan.logit_slots
        if not order and not step.prompts:
            return
        if step.prompts:
            step.prompted = {
                prompt.row: self._sampler.prompt(prompt, partial(self._prompt_logits, prompt.row))
                for prompt in step.prompts
            }
            hooks.only_row(None)
            step.prompts = ()
        if not order:
            return
        payload = plan.payload | payload
        allowed = hooks.allowed(order, payload)
        failed = {} if allowed is None else dict(allowed.errors)
        changed = hooks.change_logits(payload)
        drawn = None if changed else self.replay.sample(step, allowed)
        if drawn is None:
            if step.hidden is None:
                assert step.drawn is not None
                logits = self.replay.retract(step)
            else:
                logits = self._logits(step, step.hidden, some=not changed and allowed is None)
            size = cast("Model", self._model).spec.vocab_size
            if logits.shape[1] > size and allowed is not None:
                allowed = allowed.within(size, logits.shape[1])
            failed |= hooks.apply(logits[:, :size] if logits.shape[1] > size else logits, order, payload)
            drawn = self._sampler.sample(logits, step, allowed)
        step.drawn, step.failed = drawn, failed

    def _logits(self, step: Step, hidden: Tensor, *, some: bool) -> Tensor:
        """Return a step's logits [S, vocab]; with `some`, perhaps with minus infinity for tokens that can't be drawn,
        which the ranks then need not exchange."""
        model = self._model
        if some and isinstance(model, CausalLM) and model.divides_logits:
            count = self._sampler.num_candidates(step)
            parts = model.logits_in_parts(hidden) if count else None
            if parts is not None:
                return parts.most_likely(count)
        return cast("Model", model).logits(hidden)

    def _prompt_logits(self, row: int, hidden: Tensor) -> Tensor:
        """Return the logits of some tokens of a row's prompt."""
        self.hooks.only_row(row, len(hidden))
        return cast("Model", self._model).logits(hidden)

    @torch.inference_mode()
    def _propose(self, step: Step, payload: dict[str, Any]) -> None:
        """Let hooks propose drafts after the step's tokens, and store them for the next step."""
        drafting = self.slots.drafting(step.plan)
        step.drafts = self.slots.draft(drafting, self.hooks.propose(drafting, step.plan.payload | payload))

    def watch(self, spans: Spans) -> None:
        """Record the host's work for a step, and the kernels of a native program, in a profile's spans."""
        watch_model(spans, self._model)
        spans.watch(Watched(self.slots, "apply", "slots"))
        self._sampler.watch(spans)
        self.replay.watch(spans)

    def close(self) -> None:
        """Free recordings and KV cache. The model is freed with the runner."""
        if self._mover is not None:
            self._mover.close()
        self.hooks.detach()
        self._blocks.close()
        self.replay.close()
        self.replay = NoReplay()
