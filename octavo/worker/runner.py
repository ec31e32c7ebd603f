"""`Runner`: one step on one device. It computes what the plan says and decides nothing.

No feature is named here: features come in through `WorkerHook`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.core.output import BAD_LOGITS, StepOutput
from octavo.core.plan import StepPlan
from octavo.core.spans import Spans, Watched
from octavo.models.model import Model, watch_model
from octavo.models.native import NativeDecoder
from octavo.nn.attention.base import AttentionBackend
from octavo.nn.step import StepInput
from octavo.sampling.prompt_logprobs import prompt_logprobs
from octavo.worker.choosing import Choosing
from octavo.worker.decoding import DecodeStep, Decoding
from octavo.worker.hooks import Findings, Hooks, WorkerHook, gather
from octavo.worker.inputs import build_input
from octavo.worker.slots import Slots


@dataclass(slots=True)
class PromptRow:
    """A row that computes part of a prompt whose log-probabilities were asked for.

    `start` is its first token's place in the batch, `following` [n] the prompt's tokens after each of its first n.
    """

    row: int
    start: int
    count: int
    following: Tensor


@dataclass(slots=True)
class RunnerStep:
    """A step on its way: laid out, then computed, then sampled."""

    plan: StepPlan
    input: StepInput
    hidden: Tensor
    prompts: list[PromptRow]
    findings: dict[str, Findings]
    output: StepOutput | None = None

    def result(self) -> StepOutput:
        if self.output is None:
            raise AssertionError("the step was never sampled")
        return self.output


class Runner:
    """Model, slots and sampling, behind the `Executor` protocol."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        slots: Slots,
        choosing: Choosing,
        block_size: int,
        hooks: Sequence[WorkerHook] = (),
        decoding: Decoding | None = None,
    ) -> None:
        """`decoding` computes the steps that it takes, unless a hook wants to follow every step."""
        self._model = model
        self._attention = attention
        self._slots = slots
        self._choosing = choosing
        self._block_size = block_size
        self._hooks = Hooks(hooks)
        self._decoding = None if self._hooks.follow_steps else decoding
        self._hooks.attach(model)

    def forward(self, plan: StepPlan) -> RunnerStep | DecodeStep:
        self._slots.apply(plan)
        self._hooks.add(plan.new)
        self._copy_blocks(plan.copies)
        if self._decoding is not None and self._decoding.takes(plan) and self._only_forbids(plan.payload):
            return self._decoding.forward(plan, self._hooks.allowed(plan.slots, plan.payload))
        return self._forward(plan)

    def _only_forbids(self, payload: dict[str, Any]) -> bool:
        """Whether a step with this payload is as any other, but for the tokens that are possible."""
        hooks = self._hooks
        return not payload or not (hooks.change_logits(payload) or hooks.read_hidden(payload) or hooks.feed(payload))

    def sample(self, step: RunnerStep | DecodeStep, payload: dict[str, Any]) -> None:
        known = step.plan.payload
        if isinstance(step, DecodeStep):
            if payload:
                self._sample_again(step, known | payload)
            else:
                errors = dict.fromkeys(step.flawed, BAD_LOGITS) | step.failed
                step.output = StepOutput([[token] for token in step.chosen.tolist()], errors=errors)
        else:
            self._sample(step, known | payload)

    @torch.inference_mode()
    def _forward(self, plan: StepPlan) -> RunnerStep:
        rows, counts = np.array(plan.slots), np.array(plan.num_tokens)
        step = build_input(plan, rows, counts, self._slots, self._block_size)
        step.attn = self._attention.prepare(step, self._block_size)
        prompts = self._prompt_rows(plan)
        if len(step.logit_rows) < step.num_tokens and not prompts and not self._hooks.read_hidden(plan.payload):
            step.hidden_rows = step.logit_rows
        self._hooks.before_forward(step, plan.payload)
        hidden = self._model.forward(self._hooks.embed(self._model, step, plan.payload), step)
        findings = self._hooks.after_forward(hidden, plan.payload)
        self._slots.advance(rows, counts)
        return RunnerStep(plan, step, hidden, prompts, findings)

    @torch.inference_mode()
    def _sample(self, step: RunnerStep, payload: dict[str, Any]) -> None:
        plan = step.plan
        rows = [row for row, samples in enumerate(plan.samples) if samples]
        output = StepOutput([[] for _ in plan.slots])
        if rows:
            all_sampled = len(rows) == len(step.hidden)
            logits = self._model.logits(step.hidden if all_sampled else step.hidden[step.input.logit_rows])
            output = self._choose(plan, rows, logits, payload)
        prompted = {
            one.row: prompt_logprobs(
                step.hidden[one.start : one.start + len(one.following)], one.following, one.count, self._model.logits
            )
            for one in step.prompts
        }
        found, unfound = gather(step.findings)
        step.output = StepOutput(output.tokens, output.logprobs, output.errors | unfound, prompted, found)
        self._hooks.after_sample(step.input, step.output)

    @torch.inference_mode()
    def _sample_again(self, step: DecodeStep, payload: dict[str, Any]) -> None:
        """Features have a say in the tokens after all."""
        self._slots.retract(step.plan.slots)
        step.output = self._choose(step.plan, list(range(len(step.plan.slots))), step.logits, payload)

    def _choose(self, plan: StepPlan, rows: list[int], logits: Tensor, payload: dict[str, Any]) -> StepOutput:
        """A token for each of the rows, from logits [len(rows), vocab]; appended to their slots."""
        slots = [plan.slots[row] for row in rows]
        failed = self._hooks.apply(logits, slots, payload)
        allowed = self._hooks.allowed(slots, payload)
        failed |= {} if allowed is None else allowed.errors
        sampled = self._choosing.choose(logits, slots, allowed)
        self._slots.append(slots, sampled.tokens.numpy())
        tokens: list[list[int]] = [[] for _ in plan.slots]
        for row, token in zip(rows, sampled.tokens.tolist(), strict=True):
            tokens[row] = [token]
        logprobs = {rows[i]: [entry] for i, entry in sampled.logprobs.items()}
        errors = {rows[i]: error for i, error in (dict.fromkeys(sampled.bad_rows, BAD_LOGITS) | failed).items()}
        return StepOutput(tokens, logprobs, errors)

    def _prompt_rows(self, plan: StepPlan) -> list[PromptRow]:
        found = []
        for row, slot, count, following in self._slots.prompt_rows(plan):
            first = int(self._slots.computed[slot]) + 1
            tokens = torch.from_numpy(self._slots.tokens[slot, first : first + following].copy())
            found.append(PromptRow(row, sum(plan.num_tokens[:row]), count, tokens))
        return found

    def watch(self, spans: Spans) -> None:
        """Have a profile see what a step consists of; of a native program also its kernels."""
        watch_model(spans, self._model)
        spans.watch(Watched(self._slots, "apply", "slots"))
        spans.watch(Watched(self._choosing, "choose", "choose"))
        if self._decoding is not None:
            spans.watch(Watched(self._decoding, "forward", "decode"))
        if isinstance(self._model, NativeDecoder):
            self._model.watch(spans)

    def close(self) -> None:
        """Drop the KV cache; the model goes with the runner."""
        for layer in self._model.attention_layers:
            layer.cache = torch.empty(0)
        if isinstance(self._model, NativeDecoder):
            self._model.forget_caches()

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        for source, destination in copies:
            for layer in self._model.attention_layers:
                layer.cache[destination].copy_(layer.cache[source])
