"""`FakeEngine`: an `EngineClient` that plays a script instead of running a model, for tests of the layers above."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.core.errors import EngineDeadError, InvalidRequestError, internal_error
from octavo.core.info import Health, ModelInfo, Received
from octavo.core.output import FinishReason, RequestTimes, TokenDelta, TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.core.pausing import AWAKE, PauseMode, SleepTag
from octavo.core.request import GenerateRequest, answers_to
from octavo.core.stats import EngineStats
from octavo.schedule.outputs import repeats

Script = Callable[[GenerateRequest], Sequence[int] | Sequence[Sequence[int]]]

_INFO = ModelInfo(
    name="fake",
    architecture="FakeForCausalLM",
    device="cpu",
    dtype="float32",
    vocab_size=256,
    max_model_len=1024,
    eos_token_ids=[2],
    num_blocks=1024,
    block_size=16,
    kv_bytes_per_token=64,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    memory={"weights": 0, "kv_cache": 1024 * 16 * 64},
    phases={},
)


def fake_info(**changes: Any) -> ModelInfo:
    """Return a small, plausible `ModelInfo` (vocabulary 256, context 1024, end of sequence 2), with `changes`."""
    return msgspec.structs.replace(_INFO, **changes)


@dataclass(slots=True)
class _Live:
    """A running request."""

    request: GenerateRequest
    scripts: list[Sequence[int]]
    aborted: set[int] = field(default_factory=set)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    received: Received = field(default_factory=Received)
    started: float = field(default_factory=time.monotonic)
    counts: dict[int, int] = field(default_factory=dict)


class FakeEngine:
    """Plays `script(request)`: one list of token ids for all choices, or one list per choice.

    Choices end as in a real core: at an end-of-sequence token (unless `ignore_eos` or under `min_tokens`), at one of
    `stop_token_ids`, by `repetition_detection`, at `max_tokens`, at an abort. A script that ends earlier is followed by
    the first end-of-sequence token or, if that may not end the choice, by the finish LENGTH. A script that raises
    `InvalidRequestError` refuses the request; any other exception ends it with finish ERROR.

    Attributes:
        requests: all requests, in order.
        aborts: `(request id, choice)` of every explicit abort; the choice is None for the whole request.
        commands: pauses, sleeps, profiles and their ends, and calls of features, with their arguments, in order.
        abandoned: ids of requests whose iterator was closed before the end.
        running: ids of running requests.
        answers: (feature, method) -> function of the arguments that gives the result of `call`.
        current: the snapshot that `stats` returns; `num_running` is updated, tests may set the rest.

    Args:
        found: returns the features' results for a request that ends with its prompt.
        pace: awaited before every step, for tests that delay the engine; by default a step only yields control.
    """

    def __init__(
        self,
        script: Script,
        *,
        info: ModelInfo | None = None,
        pace: Callable[[], Awaitable[None]] | None = None,
        found: Callable[[GenerateRequest], dict[str, bytes]] | None = None,
    ) -> None:
        self.requests: list[GenerateRequest] = []
        self.aborts: list[tuple[str, int | None]] = []
        self.resets = 0
        self.commands: list[tuple[Any, ...]] = []
        self.abandoned: list[str] = []
        self.running: set[str] = set()
        self.current = EngineStats()
        self.answers: dict[tuple[str, str], Callable[[dict[str, Any]], Any]] = {}
        self.slow_readers = 0
        self.closed = False
        self._script = script
        self._info = info or fake_info()
        self._pace = pace
        self._found = found or (lambda request: {})
        self._live: dict[str, _Live] = {}
        self._dead: str | None = None

    @property
    def info(self) -> ModelInfo:
        return self._info

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        self._check_alive()
        self.requests.append(request)
        try:
            live = _Live(request, self._scripts(request))
        except InvalidRequestError:
            raise
        except Exception as exc:  # a script may raise anything
            for index in range(request.params.n):
                yield TokenDelta(request.id, index, [], finish=FinishReason.ERROR, error=internal_error(exc))
            return
        self._live[request.id] = live
        self.running.add(request.id)
        unfinished = request.params.n
        try:
            async for delta in self._play(live):
                live.received = Received(live.received.tokens + len(delta.tokens), time.monotonic())
                unfinished -= delta.finish is not None
                yield delta
        finally:
            del self._live[request.id]
            self.running.discard(request.id)
            if unfinished:
                self.abandoned.append(request.id)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborts.append((request_id, index))
        live = self._live.get(request_id)
        if live is not None:
            live.aborted.update(range(live.request.params.n) if index is None else [index])
            live.wake.set()

    async def reset_prefix_cache(self) -> None:
        self.resets += 1

    async def pause(self, mode: PauseMode, *, clear_cache: bool = True) -> None:
        """Record the command; running requests continue."""
        self.commands.append(("pause", mode, clear_cache))
        self.current.paused = True

    async def resume(self) -> None:
        self.commands.append(("resume",))
        self.current.paused = False

    async def sleep(self, level: int, mode: PauseMode) -> None:
        self.commands.append(("sleep", level, mode))
        self.current.paused, self.current.sleep_level = True, level

    async def wake_up(self, parts: Iterable[SleepTag]) -> None:
        self.commands.append(("wake_up", *parts))
        self.current.paused, self.current.sleep_level = False, AWAKE

    async def abort_named(self, names: Iterable[str] | None) -> int:
        wanted = None if names is None else list(names)
        ended = [one for one in self._live if wanted is None or any(answers_to(one, name) for name in wanted)]
        for one in ended:
            await self.abort(one)
        return len(ended)

    async def update_weights(self, path: str | None = None, load_format: str | None = None, **how: Any) -> Any:
        """Record the command; refuse a path that ends with "odd"."""
        if str(path).endswith("odd"):
            raise InvalidRequestError("These are the weights of another model.", param="model_path", value=path)
        self.commands.append(("update_weights", path, load_format, how))
        self.current.weight_version = how.get("version") or "update-1"
        return {"weight_version": self.current.weight_version, "num_paused_requests": len(self.running)}

    async def begin_weights(self) -> None:
        self.commands.append(("begin_weights",))

    async def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        self.commands.append(("receive_weights", update_info))

    async def start_profile(self, prefix: str = "") -> None:
        self.commands.append(("start_profile", prefix))

    async def stop_profile(self) -> str:
        self.commands.append(("stop_profile",))
        return "/profiles/fake.json"

    async def call(self, feature: str, method: str, args: Mapping[str, Any]) -> Any:
        """Record the command; return the result of the function for it in `answers`."""
        self._check_alive()
        self.commands.append(("call", feature, method, dict(args)))
        if (feature, method) not in self.answers:
            raise InvalidRequestError(f"The feature {feature!r} has no method {method!r}.", param="method")
        return self.answers[feature, method](dict(args))

    def stats(self) -> EngineStats:
        self.current.num_running = len(self.running)
        return self.current

    @property
    def replicas(self) -> list[FakeEngine]:
        return [self]

    def health(self) -> Health:
        return Health(ok=self._dead is None, final=self._dead is not None, reason=self._dead or "")

    def received(self, request_id: str) -> Received:
        live = self._live.get(request_id)
        return Received() if live is None else live.received

    async def close(self) -> None:
        self.closed = True
        self.die("The engine was closed.")

    def die(self, reason: str) -> None:
        """Fail every call with `EngineDeadError` from now on, calls in progress included."""
        self._dead = reason
        for live in self._live.values():
            live.wake.set()

    def _scripts(self, request: GenerateRequest) -> list[Sequence[int]]:
        played = self._script(request)
        alike: list[int] = []
        each: list[Sequence[int]] = []
        for item in played:
            if isinstance(item, int):
                alike.append(item)
            else:
                each.append(item)
        return each or [alike] * request.params.n

    async def _play(self, live: _Live) -> AsyncIterator[TokenDelta]:
        alive = list(range(live.request.params.n))
        while alive:
            await self._breathe(live)
            self._check_alive()
            for index in list(alive):
                delta = self._step(live, index)
                if delta.finish is not None:
                    alive.remove(index)
                yield delta

    async def _breathe(self, live: _Live) -> None:
        if self._pace is None:
            await asyncio.sleep(0)
            return
        turn = asyncio.ensure_future(self._pace())
        woken = asyncio.ensure_future(live.wake.wait())
        try:
            await asyncio.wait({turn, woken}, return_when=asyncio.FIRST_COMPLETED)
            if turn.done():
                turn.result()
        finally:
            live.wake.clear()
            turn.cancel()
            woken.cancel()
            await asyncio.wait({turn, woken})

    def _step(self, live: _Live, index: int) -> TokenDelta:
        params = live.request.params
        done = live.counts.get(index, 0)
        if index in live.aborted:
            return TokenDelta(live.request.id, index, [], finish=FinishReason.ABORT, times=self._times(live))
        if live.request.prompt_only:
            found, times = self._found(live.request), self._times(live)
            return TokenDelta(live.request.id, index, [], finish=FinishReason.STOP, times=times, found=found)
        script = live.scripts[index]
        eos = self._info.eos_token_ids
        can_end = bool(eos) and not params.ignore_eos and done >= params.min_tokens
        if done >= len(script) and not can_end:
            return TokenDelta(live.request.id, index, [], finish=FinishReason.LENGTH, times=self._times(live))
        token = script[done] if done < len(script) else eos[0]
        live.counts[index] = done + 1
        finish, reason = self._ending(live.request, [*script[:done], token], can_end)
        return TokenDelta(
            live.request.id,
            index,
            [token],
            logprobs=[self._reported(token, params)] if params.reports else None,
            finish=finish,
            stop_reason=reason,
            times=self._times(live) if finish or not done else None,
            found=self._found(live.request) if finish else None,
            prompt_logprobs=self._prompt_logprobs(live.request) if not done and not index else None,
        )

    def _prompt_logprobs(self, request: GenerateRequest) -> list[TokenLogprobs] | None:
        count = request.params.prompt_logprobs
        return None if count is None else [self._logprobs(token, count) for token in request.tokens[1:]]

    def _ending(
        self, request: GenerateRequest, tokens: list[int], can_end: bool
    ) -> tuple[FinishReason | None, int | None]:
        params, token, count = request.params, tokens[-1], len(tokens)
        rule = params.repetition_detection
        if token in self._info.eos_token_ids and can_end:
            return FinishReason.STOP, None
        if token in (params.stop_token_ids or []) and count > params.min_tokens:
            return FinishReason.STOP, token
        if rule is not None and repeats(tokens, rule):
            return FinishReason.REPETITION, None
        if params.max_tokens is not None and count >= params.max_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def _reported(self, token: int, params: SamplingParams) -> TokenLogprobs:
        named = params.logprob_token_ids
        if not named:
            return self._logprobs(token, params.logprobs or 0)
        return TokenLogprobs(-0.5, 1, named, [-0.5 if one == token else -2.5 for one in named])

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        others = [i for i in range(count + 1) if i != token][: max(count - 1, 0)]
        top = [token, *others][:count]
        return TokenLogprobs(-0.5, 1, top, [-0.5 - rank for rank in range(len(top))])

    def _times(self, live: _Live) -> RequestTimes:
        now = time.monotonic()
        arrival = live.request.arrival or live.started
        return RequestTimes(arrival, live.started, live.started, now)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
