"""`replay`: compute a recorded run again on a fresh worker, and compare the tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from octavo.build_worker import build_local
from octavo.config import EngineConfig, ParallelConfig
from octavo.core.errors import ConfigError
from octavo.core.output import StepOutput, TransferState
from octavo.core.plan import PlanDraft, StepPlan, Transfers
from octavo.engine.executor import AnyExecutor, LaunchedStep
from octavo.engine.phases import PhaseTimer
from octavo.engine.plan_codec import PlanCodec
from octavo.engine.record import Gave, Header, Planned, Sampled, read_records
from octavo.features import payload_types
from octavo.text.sources import model_files

_POLL_S = 0.001


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a record and its replay.

    Attributes:
        step, row: the plan's id, and the row in its batch.
        request: the request's id and, after a slash, the index of the choice.
        recorded, found: the row's tokens, or its error.
    """

    step: int
    row: int
    request: str
    recorded: list[int] | str
    found: list[int] | str


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayReport:
    """Result of a replay: the number of steps and tokens compared, and the first difference, if any."""

    steps: int
    tokens: int
    difference: Difference | None


def replay(
    path: Path, *, model: str | None = None, announce: Callable[[str], None] = lambda text: None
) -> ReplayReport:
    """Compute the steps of a record again on one device, in order, until one gives other tokens.

    Args:
        model: the model's path or name, if it differs from the recorded one.
        announce: called with a line about versions and devices.

    Raises:
        ConfigError: the file is not a record, or its settings can't be used here.
        ModelNotFoundError, ModelFileError: the model can't be read.
    """
    header, records = read_records(path)
    recorded = _settings(header, model)
    config = dataclasses.replace(recorded, parallel=ParallelConfig())
    num_blocks = header.sizes.num_blocks * recorded.parallel.cache_ranks  # of all ranks
    codec = PlanCodec(payload_types())
    build = build_local(config, model_files(config.model))
    announce(
        f"recorded by Octavo {header.version} on {header.facts.device} ({header.facts.dtype}), computed again on "
        f"{build.facts.device} ({build.facts.dtype})"
    )
    build.load(PhaseTimer(lambda name, seconds: None))
    port = build.allocate(msgspec.structs.replace(header.sizes, num_blocks=num_blocks))
    player = _Player(port.executor(), codec)
    try:
        for record in records:
            if (difference := player.take(record)) is not None:
                return ReplayReport(player.steps, player.tokens, difference)
    finally:
        port.close()
    return ReplayReport(player.steps, player.tokens, None)


def _settings(header: Header, model: str | None) -> EngineConfig:
    try:
        config = EngineConfig.restored(header.config)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"the record's settings, by Octavo {header.version}, can't be used here: {exc}.") from exc
    device = dataclasses.replace(config.device, record_steps=None, profiler_config={})
    found = config.model if model is None else dataclasses.replace(config.model, model=model, revision=None)
    return dataclasses.replace(config, device=device, model=found)


class _Player:
    """Replays records on an executor.

    Attributes:
        steps, tokens: number of compared steps and tokens so far.
    """

    def __init__(self, executor: AnyExecutor, codec: PlanCodec) -> None:
        self.steps = self.tokens = 0
        self._executor = executor
        self._codec = codec
        self._names: dict[int, str] = {}
        self._launched: dict[int, tuple[LaunchedStep, list[str]]] = {}
        self._failures: dict[int, list[int]] = {}
        """Ticket of a transfer that has ended -> which of its pages failed; one if it never began."""

    def take(self, record: Planned | Sampled | Gave) -> Difference | None:
        """Return the first difference, if this is an output that has one."""
        match record:
            case Planned(newcomers, encoded):
                self._names |= newcomers
                plan = self._codec.decode_plan(encoded)
                self._launched[plan.id] = self._executor.forward(plan), self._names_of(plan)
            case Sampled(number, payload):
                self._executor.sample(self._launched[number][0], self._codec.decode_payload(payload))
            case Gave(number, output):
                step, names = self._launched.pop(number)
                if output is not None:  # else it failed, which is not compared
                    found = step.result()
                    self._await_transfers(number, output, found)
                    return self._compare(number, names, output, found)
        return None

    def _await_transfers(self, number: int, recorded: StepOutput, found: StepOutput) -> None:
        """Let every transfer end that had ended in the recorded run, since the next steps may rely on it.

        Raises:
            ConfigError: one fails that did not.
        """
        self._take_moved(found)
        for news in recorded.moved:
            if news.state is not TransferState.ENDED:
                continue
            while news.ticket not in self._failures:
                time.sleep(_POLL_S)
                self._take_moved(self._executor.forward(_asking(number, news.ticket)).result())
            if self._failures[news.ticket] and not news.failed:
                raise ConfigError(
                    f"step {number} goes on from KV blocks that a tier held in the recorded run, and it does not hold "
                    "them here. Record a run that begins with an empty tier, or give the replay the same one."
                )

    def _take_moved(self, output: StepOutput) -> None:
        for one in output.moved:
            if one.state is TransferState.ENDED:
                self._failures[one.ticket] = one.failed
            elif one.state is TransferState.UNKNOWN:
                self._failures.setdefault(one.ticket, [0])

    def _names_of(self, plan: StepPlan) -> list[str]:
        return [self._names.get(slot, f"slot {slot}") for slot in plan.slots]

    def _compare(self, number: int, names: list[str], recorded: StepOutput, found: StepOutput) -> Difference | None:
        self.steps += 1
        for row, name in enumerate(names):
            before, now = _of(recorded, row), _of(found, row)
            if before != now:
                return Difference(number, row, name, before, now)
            self.tokens += len(recorded.tokens[row])
        return None


def _asking(number: int, ticket: int) -> StepPlan:
    """A plan without rows, which asks how far a transfer is."""
    return PlanDraft(transfers=Transfers(doubted=[ticket])).freeze(number)


def _of(output: StepOutput, row: int) -> list[int] | str:
    return output.errors.get(row) or output.tokens[row]
