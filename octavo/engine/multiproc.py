"""The engine's proxies for workers in separate processes: `RankExecutor`, `RankBuild`, `RankWorker`.

A plan is encoded once and sent to all ranks; the encoded output of one is received. No tensor passes between an engine
and its ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.errors import ConfigError, DeviceLostError, UnsupportedError
from octavo.core.futures import mapped
from octavo.core.output import StepOutput
from octavo.core.pausing import SleepTag
from octavo.core.plan import SampledRow, StepPlan
from octavo.core.profiling import ProfileSettings
from octavo.core.spans import Spans
from octavo.core.worker_info import CacheSizes, LoadedFacts, WorkerFacts
from octavo.engine import rank_wire as wire
from octavo.engine.phases import PhaseTimer
from octavo.engine.plan_codec import PlanCodec
from octavo.engine.rank_group import RankGroup, ranks_of

_APART = "The model is in separate processes (several devices, or --distributed-executor-backend)"


@dataclass(slots=True)
class RankStep:
    """A step sent to the ranks. Its tokens and drafts are added to `sampled`, if given, for the ranks that do not
    sample."""

    plan: StepPlan
    ranks: RankGroup
    sampled: list[SampledRow] | None = None

    def result(self) -> StepOutput:
        output = self.ranks.fetch(self.plan.id)
        if self.sampled is not None:
            rows = enumerate(zip(self.plan.slots, output.tokens, self.plan.num_drafts, strict=True))
            self.sampled += [
                SampledRow(slot, tokens, drafts, output.drafted.get(row, []))
                for row, (slot, tokens, drafts) in rows
                if tokens
            ]
        return output


class RankExecutor:
    """An `Executor` over ranks. Errors of a step are raised by `RankStep.result`.

    Args:
        passes_tokens: only some of the ranks sample, so that plans bring the others the tokens and drafts of earlier
            steps.
    """

    def __init__(self, ranks: RankGroup, codec: PlanCodec, *, passes_tokens: bool = False) -> None:
        self._ranks = ranks
        self._codec = codec
        self._sampled: list[SampledRow] | None = [] if passes_tokens else None

    def forward(self, plan: StepPlan) -> RankStep:
        sent = plan
        if self._sampled is not None and (self._sampled or plan.proposals):
            reports = plan.reports_drafts or bool(plan.proposals)
            sent = msgspec.structs.replace(plan, sampled=self._sampled.copy(), reports_drafts=reports)
            self._sampled.clear()
        self._ranks.send(wire.LaunchStep(plan.id, self._codec.encode_plan(sent)))
        return RankStep(plan, self._ranks, self._sampled)

    def sample(self, step: RankStep, payload: dict[str, Any]) -> None:
        self._ranks.send(wire.SampleStep(step.plan.id, self._codec.encode_payload(payload)))

    def watch(self, spans: Spans) -> None:
        """Do nothing: the steps run in another process, which adds its own spans to the trace."""


class RankBuild:
    """A `WorkerBuild` whose worker is divided over ranks."""

    def __init__(self, ranks: RankGroup, codec: PlanCodec, stages: int = 1) -> None:
        """
        Args:
            stages: of the pipeline that the ranks are divided into.

        Raises:
            ConfigError: the ranks found different kinds of devices.
        """
        self._ranks = ranks
        self._codec = codec
        self._stages = stages
        found = ranks.call(WorkerFacts, "begin", at_once=True)
        for process, facts in zip(ranks.processes, found, strict=True):
            process.device = facts.device
        self.facts = _common(found)

    def load(self, timer: PhaseTimer, max_drafts: int = 0) -> LoadedFacts:
        timer.begin("weights")
        loaded = _together(self._ranks.call(LoadedFacts, "load", max_drafts, at_once=True), self._stages)
        timer.begin("kv cache")
        return loaded

    def allocate(self, sizes: CacheSizes) -> RankWorker:
        can_sleep = self._ranks.call(bool, "allocate", msgspec.to_builtins(sizes), at_once=True)
        passes_tokens = self._stages > 1
        return RankWorker(self._ranks, self._codec, can_sleep=all(can_sleep), passes_tokens=passes_tokens)

    def abandon(self) -> None:
        self._ranks.kill()


def _common(found: Sequence[WorkerFacts]) -> WorkerFacts:
    """Return the facts of all ranks, which must equal those of the first except for the names of devices."""
    first = found[0]
    for number, facts in enumerate(found):
        if facts.accelerator != first.accelerator or facts.dtype != first.dtype:
            raise ConfigError(
                f"Rank {number} would compute on {facts.device} in {facts.dtype}, but rank 0 on {first.device} in "
                f"{first.dtype}. Lower --tensor-parallel-size to the number of equal devices, or set --device and "
                "--dtype."
            )
    return msgspec.structs.replace(first, device=ranks_of([facts.device for facts in found]))


def _together(found: Sequence[LoadedFacts], stages: int) -> LoadedFacts:
    """Return the facts of the whole model. The sizes of blocks are those of the rank whose blocks are the largest, and
    the budget of the KV cache is for as many blocks as fit in all."""
    most = max(found, key=lambda facts: facts.block_bytes)
    budgets = [
        facts.kv_budget * most.block_bytes // facts.block_bytes
        for facts in found
        if facts.kv_budget is not None and facts.block_bytes
    ]
    firsts = found[:: len(found) // stages]
    return msgspec.structs.replace(
        most,
        weight_bytes=sum(facts.weight_bytes for facts in found),
        step_parameters=sum(facts.step_parameters for facts in firsts),
        step_weight_bytes=sum(facts.step_weight_bytes for facts in found),
        kv_budget=min(budgets, default=None),
    )


class RankWorker:
    """A `WorkerPort` over ranks."""

    def __init__(self, ranks: RankGroup, codec: PlanCodec, *, can_sleep: bool, passes_tokens: bool = False) -> None:
        self.can_sleep = can_sleep
        self._passes_tokens = passes_tokens
        self._begun = False
        """The ranks have had an executor; before, the first error of one ends them all."""
        self.weight_version = "default"
        self.kv_form = ""
        self.ranks = ranks
        self._codec = codec
        self._numbers = count()

    def executor(self) -> RankExecutor:
        facts = self.ranks.call(tuple[str, str], "executor", together=True, at_once=not self._begun)
        (self.weight_version, self.kv_form), self._begun = facts[0], True
        return RankExecutor(self.ranks, self._codec, passes_tokens=self._passes_tokens)

    def check(self) -> None:
        self.ranks.check()

    def loss(self, error: Exception) -> DeviceLostError | None:
        """Return None: calls to lost ranks raise DeviceLostError themselves."""
        return None

    def check_weights(self) -> None:
        self.ranks.call(type(None), "check_weights")

    def stage_weights(self, path: str | None, load_format: str | None) -> RankStaged:
        return self._staged("stage_weights", path, load_format)

    def begin_weights(self) -> None:
        self.ranks.call(type(None), "begin_weights")

    def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        self.ranks.call(type(None), "receive_weights", dict(update_info))

    def take_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
        raise UnsupportedError(
            f"{_APART}, which can't use tensors of this one: send "
            '{"path": FILE}. A file in /dev/shm stays in memory.'
        )

    def stage_received(self) -> RankStaged:
        return self._staged("stage_received")

    def _staged(self, method: str, *args: Any) -> RankStaged:
        """Stage weights in all ranks. If one fails, the others drop what they have staged."""
        staged = RankStaged(self, next(self._numbers))
        self.ranks.call(type(None), method, staged.number, *args)
        return staged

    def put_in_place(self, number: int, version: str | None, *, rescale: bool) -> None:
        self.weight_version = self.ranks.call(str, "put_in_place", number, version, rescale, together=True)[0]

    def drop(self, number: int) -> None:
        """Drop staged weights, without waiting. Does nothing if a rank has ended."""
        with contextlib.suppress(DeviceLostError):
            self.ranks.post("drop_weights", number)

    def sleep(self, level: int) -> None:
        self.ranks.call(type(None), "sleep", level, together=True)

    def wake_up(self, part: SleepTag) -> None:
        self.ranks.call(type(None), "wake_up", str(part), together=True)

    def tracer(self, settings: ProfileSettings) -> RankTracer:
        return RankTracer(self.ranks, settings)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        raise UnsupportedError(
            f"{_APART}, which can't call functions of this one. Run it on one device without that flag."
        )

    def call_hook(self, feature: str, method: str, args: Mapping[str, Any]) -> Future[list[Any]]:
        answers = self.ranks.post("call_hook", feature, method, dict(args))
        return mapped(
            answers, lambda found: list(chain(*(msgspec.msgpack.decode(one, type=list[Any]) for one in found)))
        )

    def abandon(self) -> None:
        self.ranks.kill()

    def close(self) -> None:
        self.ranks.call(type(None), "close")
        self.ranks.close()


class RankStaged:
    """Weights that the ranks have staged."""

    def __init__(self, worker: RankWorker, number: int) -> None:
        self._worker = worker
        self.number = number

    def put_in_place(self, version: str | None, *, rescale: bool) -> None:
        self._worker.put_in_place(self.number, version, rescale=rescale)

    def __del__(self) -> None:
        self._worker.drop(self.number)


class RankTracer:
    """A `Tracer` of the rank that samples, whose process writes the file."""

    def __init__(self, ranks: RankGroup, settings: ProfileSettings) -> None:
        self._ranks = ranks
        self._settings = settings

    def start(self) -> None:
        self._ranks.call(type(None), "start_trace", msgspec.to_builtins(self._settings, enc_hook=str))

    def stop(self, path: Path) -> None:
        self._ranks.call(type(None), "stop_trace", str(path))
