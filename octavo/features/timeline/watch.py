"""`Timeline`: follows each request from the scheduler's events, and keeps the stories of the last ones.

What is the same for all requests is counted once, not for each: how long the queue lacked what, and the engine's steps
and rows. A request's share is the difference between two readings, so a step costs the same for any number of requests.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from msgspec import structs

from octavo.cache.cache import KVCache
from octavo.cache.prefix_tree import Node
from octavo.core.request import answers_to
from octavo.core.stats import LIMITS, EngineStats
from octavo.features.timeline.misses import Evictions, explain
from octavo.features.timeline.story import REASONS, STEP, Decision, Miss, Preemption, Story
from octavo.schedule.request import Request
from octavo.schedule.step_builder import StepBuilder
from octavo.schedule.watcher import PreemptionCause, WaitsFor, Watcher

_DECISIONS = 4096
_PREEMPTIONS = 16
_REMEMBERED = (1024, 65536)
"""Fewest and most evicted blocks that are remembered; between them, as many as the cache has."""

Reading = tuple[float, ...]
Steps = tuple[float, int, int, int]


class WaitClock:
    """How long the queue lacked each of `LIMITS`, or nothing but the end of the step under way."""

    kinds = ("", *LIMITS)

    def __init__(self, now: float) -> None:
        self.lacking = ""
        self._since = now
        self._totals = dict.fromkeys(self.kinds, 0.0)

    def turn(self, lacking: str, now: float) -> None:
        """From now on, the queue lacks `lacking`."""
        self._totals[self.lacking] += now - self._since
        self.lacking, self._since = lacking, now

    def read(self, now: float) -> Reading:
        self.turn(self.lacking, now)
        return tuple(self._totals.values())


class Following:
    """A request that has not ended.

    Attributes:
        read: the clock's reading up to which `story.waits` has its waiting; None once it was admitted.
        held: what it is deferred for, and since when.
        loading: the tier that it waits for, the tokens that it shared before, and those that it will share.
        computed: up to which position its steps were planned.
        began: when the step that completes its prompt was planned, and the engine's steps, rows and prompt tokens
            with this step; None while there is none.
    """

    __slots__ = ("began", "computed", "held", "loading", "read", "request", "story")

    def __init__(self, request: Request, now: float, read: Reading) -> None:
        spec = request.spec
        self.request = request
        self.read: Reading | None = read
        self.held: tuple[str, float] | None = None
        self.loading: tuple[str, int, int] | None = None
        self.computed = 0
        self.began: Steps | None = None
        self.story = Story(
            id=spec.id,
            index=request.index,
            num_prompt=request.num_prompt,
            max_tokens=request.max_tokens,
            priority=spec.priority,
            arrival=spec.arrival or now,
            queued=now,
        )

    def wait(self, what: str, seconds: float) -> None:
        if self.read is not None and seconds > 0:
            waits = self.story.waits
            waits[what] = waits.get(what, 0.0) + seconds

    def settle(self, read: Reading) -> None:
        """Add what the queue lacked since the last reading."""
        if self.read is not None:
            for what, before, after in zip(WaitClock.kinds, self.read, read, strict=True):
                self.wait(what or STEP, after - before)
            self.read = read


class Timeline(Watcher):
    """Follows the requests of one engine.

    Args:
        history: stories of ended requests to keep; choices count.
        shares_prefixes: whether requests read the prefix cache.
        clock: seconds, as of `time.monotonic`.

    Attributes:
        missed: tokens of prompts that were not cached, by reason.
    """

    def __init__(
        self, history: int, *, shares_prefixes: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._history = history
        self._shares_prefixes = shares_prefixes
        self._now = clock
        self._gone = Evictions(0)
        self._reset()

    def _reset(self) -> None:
        self.missed: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._clock = WaitClock(self._now())
        self._following: dict[Request, Following] = {}
        self._held: dict[Request, Following] = {}
        self._ended: deque[Story] = deque(maxlen=self._history)
        self._decisions: deque[Decision] = deque(maxlen=_DECISIONS)
        self._evicted = 0
        self._stats = EngineStats()
        self._gone.forget()

    # Events

    def begin(self, cache: KVCache, waits_for: WaitsFor) -> None:
        self._cache, self._waits_for = cache, waits_for
        least, most = _REMEMBERED
        self._gone = Evictions(min(max(least, cache.num_blocks), most))

    def forget(self) -> None:
        self._reset()

    def queued(self, choices: Sequence[Request]) -> None:
        now = self._now()
        read = self._clock.read(now)
        for request in choices:
            self._following[request] = Following(request, now, read)
        first = choices[0]
        self._decisions.append(Decision(now, "queued", first.id, tokens=first.num_prompt))

    def planned(self, step: StepBuilder, lacking: str, stats: EngineStats) -> None:
        now = self._now()
        self._stats = stats
        self._clock.turn(lacking, now)
        if step.deferred or self._held:
            self._defer(step.deferred, now)
        if self._evicted:
            self._note_evictions(now)
        for request in step.prompts:
            if (following := self._following.get(request)) is not None:
                self._compute(following, step, now)

    def _compute(self, following: Following, step: StepBuilder, now: float) -> None:
        """Count a part of a prompt that the step computes."""
        request, story = following.request, following.story
        if following.began is not None or request.num_computed <= following.computed:
            return
        following.computed = request.num_computed
        story.chunks += 1
        if request.num_computed >= request.num_prompt:
            story.prompt_planned = now
            stats = self._stats
            rows, prompt_tokens = stats.step_rows + len(step.rows), stats.step_prompt_tokens + step.num_prompt_tokens
            following.began = now, stats.num_steps + 1, rows, prompt_tokens

    def _defer(self, deferred: Iterable[Request], now: float) -> None:
        """Tell requests that wait for something of their own from those that wait for what the queue lacks."""
        waiting = dict.fromkeys(deferred)
        for request in [request for request in self._held if request not in waiting]:
            self._let_go(request, now)
        for request in waiting:
            following = self._following.get(request)
            if following is None or request in self._held:
                continue
            cause = self._cause(following)
            following.settle(self._clock.read(now))
            following.held = cause, now
            self._held[request] = following
            self._decisions.append(Decision(now, "deferred", request.id, request.index, cause))

    def _cause(self, following: Following) -> str:
        """Return what a deferred request waits for."""
        request = following.request
        feature, text = self._waits_for(request)
        if feature:
            return f"{feature}: {text}"
        if following.loading is not None:
            return f"{following.loading[0]}: pages of its prompt"
        if request.index:
            return "the prompt, which its first choice computes"
        return "other"

    def _let_go(self, request: Request, now: float) -> None:
        """A request is no longer deferred."""
        following = self._held.pop(request, None)
        if following is not None and following.held is not None:
            what, since = following.held
            following.wait(what.partition(" (")[0], now - since)
            following.held = None
            if following.read is not None:
                following.read = self._clock.read(now)

    def loading(self, request: Request, tier: str, num_tokens: int) -> None:
        following = self._following.get(request)
        if following is not None and following.loading is None:
            following.loading = tier, request.num_computed, num_tokens

    def admitted(self, request: Request) -> None:
        following = self._following.get(request)
        if following is None:
            return
        now, story = self._now(), following.story
        self._let_go(request, now)
        following.computed = request.num_computed
        story.chunks = 0
        self._decisions.append(Decision(now, "admitted", request.id, request.index, tokens=request.num_computed))
        if story.admitted:
            last = story.preemptions[-1]
            if not last.resumed:
                last.resumed, last.recomputed = now, max(0, last.computed - request.num_computed)
            return
        following.settle(self._clock.read(now))
        following.read = None
        story.admitted, story.cached = now, request.num_computed
        if following.loading is not None:
            tier, before, after = following.loading
            if (loaded := min(after, story.cached) - before) > 0:
                story.loaded = {tier: loaded}
        story.misses = self._misses(following, now)
        for miss in story.misses:
            self.missed[miss.reason] += miss.tokens

    def _misses(self, following: Following, now: float) -> list[Miss]:
        request, story = following.request, following.story
        rest = request.num_prompt - request.num_computed
        if not self._cache.groups:  # a model that keeps nothing
            return []
        if request.index and rest == 1:
            story.forked = True
            return [Miss("last_block", rest, request.num_computed)]
        if not self._shares_prefixes or not request.reads_cache:
            return [Miss("not_read" if self._shares_prefixes else "off", rest, request.num_computed)]
        return explain(self._cache, self._gone, request, now)

    def preempted(self, request: Request, cause: PreemptionCause, by: Request | None) -> None:
        following = self._following.get(request)
        if following is None:
            return
        now, story = self._now(), following.story
        self._end_span(following, now)
        story.generated, story.prompt_planned = request.num_output, 0.0
        for_whom = "" if by is None or by is request else by.id
        story.num_preemptions += 1
        if len(story.preemptions) < _PREEMPTIONS:
            story.preemptions = [*story.preemptions, Preemption(now, cause.value, for_whom, request.num_computed)]
        self._decisions.append(
            Decision(now, "preempted", request.id, request.index, cause.value, request.num_computed, by=for_whom)
        )

    def _end_span(self, following: Following, now: float) -> None:
        """Add the steps since the one that completed the prompt, and the time since the first token."""
        if following.began is None:
            return
        began, steps, rows, prompt_tokens = following.began
        story, stats = following.story, self._stats
        if first := following.request.first_token:
            story.decode_s += now - max(began, first)
        story.decode_steps += stats.num_steps - steps
        story.decode_rows += stats.step_rows - rows
        story.decode_prompt_tokens += stats.step_prompt_tokens - prompt_tokens
        following.began = None

    def ended(self, request: Request) -> None:
        following = self._following.pop(request, None)
        if following is None:
            return
        now, story = self._now(), following.story
        self._let_go(request, now)
        following.settle(self._clock.read(now))
        self._end_span(following, now)
        story.ended, story.finish = now, request.finish.value if request.finish else ""
        story.generated, story.first_token = request.num_output, request.first_token
        self._ended.append(story)
        self._decisions.append(Decision(now, "ended", request.id, request.index, story.finish, tokens=story.generated))

    def removed(self, node: Node, dropped: bool) -> None:
        if node.parent is not None:
            self._gone.add(node.digest, self._now(), dropped)
            self._evicted += not dropped

    def _note_evictions(self, now: float) -> None:
        self._decisions.append(Decision(now, "evicted", blocks=self._evicted))
        self._evicted = 0

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Drafts of a request were verified."""
        if (following := self._following.get(request)) is not None:
            following.story.drafted += num_drafts
            following.story.accepted += num_accepted

    # Readings

    def misses_of(self, request: Request) -> list[Miss]:
        """Return the parts of a request's prompt that were not cached."""
        following = self._following.get(request)
        if following is not None:
            return following.story.misses
        stories = (story for story in reversed(self._ended) if (story.id, story.index) == (request.id, request.index))
        return next((story.misses for story in stories), [])

    def find(self, name: str) -> list[Story]:
        """Return the choices of requests with this id, or to which a client refers so; those that ended first."""
        known = itertools.chain(self._ended, (one.story for one in self._following.values()))
        wanted = {story.id for story in known if story.id == name or answers_to(story.id, name)}
        ended = [story for story in self._ended if story.id in wanted]
        now = self._now()
        return ended + [self._current(one, now) for one in self._following.values() if one.story.id in wanted]

    def unfinished(self, limit: int) -> list[Story]:
        """Return the requests that have not ended, at most `limit`, the oldest first."""
        now = self._now()
        return [self._current(one, now) for one in itertools.islice(self._following.values(), limit)]

    def slowest(self, limit: int) -> list[Story]:
        """Return the slowest of the requests that have ended, at most `limit`."""
        return sorted(self._ended, key=lambda story: -story.seconds)[:limit]

    def decisions(self, limit: int) -> list[Decision]:
        """Return the last decisions, at most `limit`, the oldest first."""
        return list(self._decisions)[-limit:] if limit else []

    @property
    def waited(self) -> dict[str, float]:
        """Seconds for which the first request of the queue lacked each of `LIMITS`."""
        read = self._clock.read(self._now())
        return {what: seconds for what, seconds in zip(WaitClock.kinds, read, strict=True) if what}

    def _current(self, following: Following, now: float) -> Story:
        """Return the story of an unfinished request up to now, as a copy."""
        request, was = following.request, following.story
        shown = Following(request, now, ())
        shown.story = copied(was)
        shown.read, shown.began = following.read, following.began
        if following.held is not None:
            shown.wait(following.held[0].partition(" (")[0], now - following.held[1])
            shown.story.waiting_for = following.held[0]
            feature, text = self._waits_for(request)
            if feature:
                shown.story.waiting_for = f"{feature}: {text}"
        else:
            shown.settle(self._clock.read(now))
            if request.slot < 0:
                shown.story.waiting_for = self._clock.lacking or STEP
        self._end_span(shown, now)
        shown.story.generated, shown.story.first_token = request.num_output, request.first_token
        return shown.story


def copied(story: Story) -> Story:
    """Return a copy whose containers can change."""
    return structs.replace(story, waits=dict(story.waits), preemptions=list(story.preemptions))
