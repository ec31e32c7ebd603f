"""`TimelineEngine`: the engine half. It answers questions about requests, and counts why the prefix cache missed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.stats import FeatureMetric
from octavo.features import FeatureContext
from octavo.features.timeline.settings import TimelineSettings
from octavo.features.timeline.story import NAME, Decision, Found, Story, Told
from octavo.features.timeline.watch import Timeline
from octavo.schedule.hooks import EngineHook
from octavo.schedule.request import Request

_MOST_TOKENS = 1 << 16
"""Most tokens of a prompt that are sent to the front end, which finds the offset of their text."""
_PRIVATE = ("namespace", "rank")
"""Reasons that tell a client about requests of others, so its answer has "new" for them."""


class TimelineEngine(EngineHook):
    """Requests with its option get the misses of their prompt with their answer; all others are only watched."""

    name = NAME
    opt_in = True
    sends_options = False
    admits_for_good = True

    def __init__(self, timeline: Timeline) -> None:
        self.watcher = self._timeline = timeline

    def call(self, method: str, args: Mapping[str, Any]) -> Any:
        """Answer "find" (`id`) or "list" (`unfinished`, `slowest`, `decisions`: how many of each)."""
        match method:
            case "find":
                return self._told(self._timeline.find(str(args["id"])), [])
            case "list":
                stories = self._timeline.unfinished(int(args["unfinished"]))
                stories += self._timeline.slowest(int(args["slowest"]))
                return self._told(stories, self._timeline.decisions(int(args["decisions"])))
        raise InvalidRequestError(f"The feature {NAME!r} has no method {method!r}.", param="method", value=method)

    def _told(self, stories: list[Story], decisions: list[Decision]) -> Any:
        return msgspec.to_builtins(Told(time.monotonic(), stories, decisions))

    def on_verify(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self._timeline.verified(request, num_drafts, num_accepted)

    def result(self, request: Request) -> bytes | None:
        if request.index:
            return None
        misses = [
            msgspec.structs.replace(miss, reason="new") if miss.reason in _PRIVATE else miss
            for miss in self._timeline.misses_of(request)
        ]
        position = misses[0].position if misses else 0
        before = request.tokens[:position] if position <= _MOST_TOKENS else []
        return msgspec.msgpack.encode(Found(misses, before))

    def metrics(self) -> Sequence[FeatureMetric]:
        missed = {reason: float(count) for reason, count in self._timeline.missed.items()}
        return (
            FeatureMetric(
                "prefix_cache_missed_tokens",
                "counter",
                "Prompt tokens of admitted requests that were not in the prefix cache, by the reason.",
                "reason",
                missed,
            ),
            FeatureMetric(
                "queue_waited_seconds",
                "counter",
                "Seconds in which the first request of the queue lacked a seat, tokens of the step, or KV blocks.",
                "for",
                self._timeline.waited,
            ),
        )


def build_engine(context: FeatureContext) -> TimelineEngine | None:
    history = context.settings_of(TimelineSettings).request_history
    return TimelineEngine(Timeline(history, shares_prefixes=context.shares_prefixes)) if history else None
