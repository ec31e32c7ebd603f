"""`ResidentRunner`: one step on a device that runs behind the host. Launching reads nothing back; results come later.

It computes what the plan says and decides nothing. Features come in through `WorkerHook`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.core.output import BAD_LOGITS, StepOutput, TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.core.plan import NewRow, StepPlan
from octavo.core.spans import Spans, Watched
from octavo.device.transfer import Download, mark
from octavo.models.model import Model, watch_model
from octavo.nn.attention.base import AttentionBackend, FusedBackend
from octavo.nn.step import StepInput
from octavo.sampling.resident import ResidentSampler, Row, Sampled
from octavo.sampling.resident_logprobs import Columns, PromptRow, entries_of, prompt_columns
from octavo.worker.hooks import Findings, Hooks, WorkerHook, gather
from octavo.worker.resident.graphs import DecodeGraphs
from octavo.worker.resident.mixed import MixedGraphs
from octavo.worker.resident.rows import ResidentSlots, empty_step, make_batch


@dataclass(slots=True)
class ResidentStep:
    """A step on its way.

    Attributes:
        input: its batch; None for a step that was replayed.
        hidden: [S, H], the states of the tokens that get logits.
        slots: [S] int32, their slots.
        bucket: the recorded batch size by which tokens are drawn; 0 if by none.
        prompted: row -> log-probabilities of its prompt.
        failed: why hooks end the requests of some of the S rows.
        began: when the device got to it.
        before: the step that was under way when it was launched.
        retired: its result was read.
    """

    plan: StepPlan
    input: StepInput | None
    hidden: Tensor
    slots: Tensor
    rows: list[Row]
    bucket: int = 0
    sampled: Sampled | None = None
    prompts: list[PromptRow] = field(default_factory=list)
    prompted: dict[int, list[Columns]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    findings: dict[str, Findings] = field(default_factory=dict)
    hooks: Hooks = field(default_factory=Hooks)
    began: torch.cuda.Event | None = None
    before: ResidentStep | None = None
    retired: bool = False

    def result(self) -> StepOutput:
        """Wait for the step's tokens, and put them in the plan's order."""
        tokens: list[list[int]] = [[] for _ in self.plan.slots]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        if self.sampled is not None:
            where = [row for row, samples in enumerate(self.plan.samples) if samples]
            for row, token in zip(where, self.sampled.token_list(), strict=False):
                tokens[row] = [max(token, 0)]
                if token < 0:
                    errors[row] = BAD_LOGITS
            errors |= {where[i]: error for i, error in self.failed.items()}
            found = self.sampled.logprobs_of()
            logprobs = {where[i]: [entry] for i, entry in found.items() if where[i] not in errors}
        prompted = {row: [one for part in parts for one in entries_of(part)] for row, parts in self.prompted.items()}
        found, unfound = gather(self.findings)
        output = StepOutput(tokens, logprobs, errors | unfound, prompted, found, self._idle())
        if self.input is not None:
            self.hooks.after_sample(self.input, output)
        self.retired = True
        return output

    def _idle(self) -> float:
        """Seconds for which the device stood still before this step, of which the tokens are here."""
        before, self.before = self.before, None
        if before is None or before.sampled is None or self.sampled is None or self.began is None:
            return 0.0
        ended = before.sampled.tokens.arrived
        return 0.0 if ended is None else max(0.0, ended.elapsed_time(self.began)) / 1e3


class ResidentRunner:
    """Model, slots and sampler, behind the `Executor` protocol.

    Attributes:
        graphs: replays what decoding repeats; None computes everything launch by launch.
        mixed: replays steps with prompts, where they are short.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        slots: ResidentSlots,
        block_size: int,
        hooks: Sequence[WorkerHook] = (),
    ) -> None:
        if not attention.follows_table_rows:
            raise AssertionError(f"attention by {attention.name} would read other rows' blocks")
        self._model = model
        self._attention = attention
        self._slots = slots
        self._sampler = ResidentSampler(slots.table, slots.vocab_size)
        self._block_size = block_size
        self._hooks = Hooks(hooks)
        self._last: ResidentStep | None = None
        self.graphs: DecodeGraphs | None = None
        self.mixed: MixedGraphs | None = None
        self._hooks.attach(model)

    @torch.inference_mode()
    def capture(self, max_rows: int, max_tokens: int, loaded: Collection[int] = (), *, shares: bool = True) -> None:
        """Record decoding and the smaller ones of other steps. With a feature that follows each step there are none.

        `loaded` and `shares` as in `DecodeGraphs.capture`. One that only forbids tokens leaves all as it is; one that
        changes logits has the forward pass of its steps replayed, and their sampling launched.
        """
        if not self._hooks.follow_steps:
            assert isinstance(self._attention, FusedBackend)
            self.graphs = DecodeGraphs(self._model, self._attention, self._slots, self._sampler, self._block_size)
            self.graphs.capture(max_rows, loaded, shares=shares)
            self.mixed = MixedGraphs(self._model, self._attention, self._slots, self._block_size, self.graphs)
            self.mixed.capture(max_tokens, loaded)

    def warm_up(self, max_tokens: int) -> None:
        """Run the largest and the oddest steps, before anything lives in slots or cache, so that nothing is compiled
        and no memory taken later."""
        all_slots = self._slots.num_slots
        long = min(self._slots.max_model_len - 1, max_tokens)
        long_rows = min(max(1, max_tokens // long), all_slots)
        rest = min(self._slots.max_model_len - 1, max(9, max_tokens - all_slots + 1))
        for counts in ([1, 1, 9], [2, 2], [long] * long_rows, [1] * (all_slots - 1) + [rest]):
            counts = counts[-all_slots:]
            step = self.forward(_trial(counts))
            self.sample(step, {})
            step.result()

    def forward(self, plan: StepPlan) -> ResidentStep:
        before = self._last if self._last is not None and not self._last.retired else None
        self._last = step = self._launch(plan)
        step.before = before
        return step

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> ResidentStep:
        slots = self._slots
        slots.apply(plan)
        self._hooks.add(plan.new)
        self._copy_blocks(plan.copies)
        rows = slots.sample_rows(plan)
        aside = self._hooks.read_hidden(plan.payload) or self._hooks.feed(plan.payload) or slots.reports(plan)
        return (None if aside else self._replayed(plan, rows)) or self._eager(plan, rows)

    def _replayed(self, plan: StepPlan, rows: list[Row]) -> ResidentStep | None:
        """The step, if it is one of those that are recorded."""
        began = mark(self._slots.device)
        if max(plan.num_tokens) == 1 and len(rows) == len(plan.slots):
            replayed = None if self.graphs is None else self.graphs.forward(plan.slots)
            if replayed is None:
                return None
            hidden, slots, bucket = replayed
        else:
            size = 0 if self.mixed is None else self.mixed.bucket(plan)
            if self.mixed is None or not size:
                return None
            hidden, slots, bucket = self.mixed.forward(plan, size)
        self._slots.note(plan)
        return ResidentStep(plan, None, hidden, slots, rows, bucket, began=began)

    @torch.inference_mode()
    def sample(self, step: ResidentStep, payload: dict[str, Any]) -> None:
        for prompt in step.prompts:
            step.prompted[prompt.row] = prompt_columns(prompt, self._model.logits)
        step.prompts = []
        if not step.rows:
            return
        payload = step.plan.payload | payload
        order = [row.slot for row in step.rows]
        allowed = self._hooks.allowed(order, payload)
        step.failed = {} if allowed is None else dict(allowed.errors)
        plain = not self._hooks.change_logits(payload) and all(row.plain for row in step.rows)
        with self._sampler.allowing(allowed):
            if step.bucket and self.graphs is not None and plain:
                sampled = self.graphs.sample(step.bucket)
                step.sampled = Sampled(Download(sampled[: len(step.rows)]), [])
                return
            logits = self._model.logits(step.hidden)
            step.failed |= self._hooks.apply(logits, order, payload)
            tokens, logprobs = self._sampler.sample(logits, step.slots, step.rows)
        self._slots.append(step.slots, tokens)
        step.sampled = Sampled(Download(tokens), logprobs)

    def watch(self, spans: Spans) -> None:
        """Have a profile see what the host does for a step; torch's profiler sees the device."""
        watch_model(spans, self._model)
        spans.watch(Watched(self._slots, "apply", "slots"))
        if self.graphs is not None:
            spans.watch(Watched(self.graphs, "forward", "replay layers"))
            spans.watch(Watched(self.graphs, "sample", "replay sampling"))
        if self.mixed is not None:
            spans.watch(Watched(self.mixed, "forward", "replay layers"))
        spans.watch(Watched(self._sampler, "sample", "choose"))

    def close(self) -> None:
        """Drop the graphs and the KV cache; the model goes with the runner."""
        self.graphs = self.mixed = None
        for layer in self._model.attention_layers:
            layer.cache = torch.empty(0)

    def _eager(self, plan: StepPlan, rows: list[Row]) -> ResidentStep:
        slots = self._slots
        batch, logit_rows, sample_slots = make_batch(plan, slots.device)
        step = StepInput(
            **empty_step(len(plan.slots), plan.total_tokens, slots.device),
            query_start=batch.query_start,
            block_tables=slots.block_tables,
            table_rows=batch.slots,
            logit_rows=logit_rows,
            max_query_len=max(plan.num_tokens),
            max_seq_len=slots.max_seq_len(plan),
            query_lens=plan.num_tokens,
            past_lens=slots.past_lens(plan),
        )
        slots.lay_out(batch, step, self._block_size)
        step.attn = self._attention.prepare(step, self._block_size)
        if len(rows) < plan.total_tokens and not slots.reports(plan) and not self._hooks.read_hidden(plan.payload):
            step.hidden_rows = logit_rows
        began = mark(slots.device)
        self._hooks.before_forward(step, plan.payload)
        hidden = self._model.forward(self._hooks.embed(self._model, step, plan.payload), step)
        findings = self._hooks.after_forward(hidden, plan.payload)
        slots.advance(batch)
        prompts = slots.prompt_rows(plan, hidden)
        slots.note(plan)
        last = hidden.index_select(0, logit_rows) if step.hidden_rows is None else hidden
        return ResidentStep(
            plan,
            step,
            last,
            sample_slots,
            rows,
            prompts=prompts,
            findings=findings,
            hooks=self._hooks,
            began=began,
        )

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        for source, destination in copies:
            for layer in self._model.attention_layers:
                layer.cache[destination].copy_(layer.cache[source])


def _trial(counts: list[int]) -> StepPlan:
    """A step of so many tokens a row, all in block 0, in which every way of sampling has a part."""
    bans = {"bad_token_ids": [[2], [0, 3]], "allowed_token_ids": [0, 1, 2]}
    ways: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 1, "prompt_logprobs": 1, "repetition_penalty": 1.1, "logit_bias": {0: 1.0}},
        {"temperature": 1, "top_k": 2, "top_p": 0.9, "min_p": 0.1, "frequency_penalty": 0.1, **bans},
    ]
    new = [
        NewRow(
            slot=slot,
            tokens=[0] * count,
            num_prompt=count,
            params=SamplingParams(min_tokens=1, **ways[slot % len(ways)]),
            seed=0,
            stop_ids=[1],
            num_computed=0,
            blocks=[[]],
        )
        for slot, count in enumerate(counts)
    ]
    return StepPlan(
        id=-1,
        new=new,
        slots=list(range(len(counts))),
        num_tokens=counts,
        num_drafts=[0] * len(counts),
        samples=[True] * len(counts),
        block_writes=[],
        copies=[],
        freed=[],
    )
