"""What the engine half reports of a request, and the words for its kinds."""

from __future__ import annotations

import msgspec

NAME = "timeline"
PARAM = "return_cache_misses"
"""The field of a request that asks for `cache_misses` in its answer."""

STEP = "step"
"""What a waiting request lacks if it lacks nothing: the step under way has to end first."""


class Miss(msgspec.Struct, frozen=True):
    """A part of a prompt that was not in the prefix cache.

    Attributes:
        reason: one of `REASONS`.
        tokens: its length.
        position: where it begins; for "diverged" the first token that differs.
        ago: seconds since its blocks left the cache, where that is the reason.
    """

    reason: str
    tokens: int
    position: int
    ago: float | None = None


REASONS = {
    "new": "nothing cached goes on like it",
    "diverged": "the closest cached prompt goes on differently",
    "evicted": "it was cached, and its blocks were evicted for other requests",
    "dropped": "it was cached, and the whole cache was dropped (a reset, new weights, a sleep or a failed step)",
    "namespace": "it is cached for another cache_salt, adapter or other condition",
    "rank": "it is cached on another rank (context parallelism), where there was no room",
    "state": "it is cached, but without the window or state that the model continues from",
    "last_block": "blocks are shared when they are full, and the last token is always computed",
    "not_read": "the request reads no cache, since it asks for prompt_logprobs or skip_reading_prefix_cache",
    "off": "prefix caching is off (--no-enable-prefix-caching)",
}
"""Reason of a miss -> what it means."""


class Preemption(msgspec.Struct):
    """A preemption.

    Attributes:
        at: when, by `time.monotonic`.
        cause: of `PreemptionCause`.
        by: id of the request that it made room for; "" for none.
        computed: its tokens whose KV was computed by then.
        resumed: when it was admitted again; 0.0 while it waits.
        recomputed: of `computed`, those that the cache no longer had.
    """

    at: float
    cause: str
    by: str
    computed: int
    resumed: float = 0.0
    recomputed: int = 0


class Story(msgspec.Struct, kw_only=True):
    """One choice of a request. Times are in seconds by `time.monotonic`, 0.0 for what has not happened.

    Attributes:
        arrival, queued: when the front end got the request, and when the scheduler did.
        waits: what it waited for before its first admission -> seconds: of `LIMITS`, STEP, or "FEATURE: what".
        waiting_for: what it waits for now; "" if it does not wait.
        cached: prompt tokens that it shared at its first admission.
        forked: they were those of the request's first choice.
        loaded: tier -> tokens among `cached` that were loaded for it.
        chunks: steps that computed a part of its prompt, since its last admission.
        prompt_planned: when the step that completes its prompt was planned, since its last admission.
        preemptions: the first of `num_preemptions`.
        decode_s: the time since `first_token` in which its prompt was complete.
        decode_steps: the engine's steps after those that completed its prompt.
        decode_rows, decode_prompt_tokens: sums over these steps, over all requests.
        drafted, accepted: draft tokens that were verified, and those that were right.
        finish: finish reason; "" if it has not ended.
    """

    id: str
    index: int
    num_prompt: int
    max_tokens: int
    priority: int
    arrival: float
    queued: float
    waits: dict[str, float] = {}
    waiting_for: str = ""
    admitted: float = 0.0
    cached: int = 0
    forked: bool = False
    loaded: dict[str, int] = {}
    misses: list[Miss] = []
    chunks: int = 0
    prompt_planned: float = 0.0
    first_token: float = 0.0
    generated: int = 0
    num_preemptions: int = 0
    preemptions: list[Preemption] = []
    decode_s: float = 0.0
    decode_steps: int = 0
    decode_rows: int = 0
    decode_prompt_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    ended: float = 0.0
    finish: str = ""

    @property
    def seconds(self) -> float:
        """From its arrival to its end; 0.0 if it has not ended."""
        return self.ended - self.arrival if self.ended else 0.0


class Decision(msgspec.Struct, frozen=True, gc=False):
    """A decision of the scheduler.

    Attributes:
        at: when, by `time.monotonic`.
        kind: "queued", "deferred", "admitted", "preempted", "evicted" or "ended".
        id, index: the request and its choice; "" and 0 for none.
        about: what it is deferred for, the cause of a preemption, or the finish reason.
        tokens: of the prompt (queued), shared (admitted), computed until then (preempted), generated (ended).
        blocks: that were evicted since the decision before.
        by: id of the request that one was preempted for.
    """

    at: float
    kind: str
    id: str = ""
    index: int = 0
    about: str = ""
    tokens: int = 0
    blocks: int = 0
    by: str = ""


class Told(msgspec.Struct):
    """An engine's answer.

    Attributes:
        now: of the engine's clock.
    """

    now: float
    stories: list[Story]
    decisions: list[Decision] = []


class Found(msgspec.Struct, frozen=True):
    """What the text half gets at the end of a request that asked for its misses.

    Attributes:
        before: the prompt's tokens before the first miss; empty if there are too many.
    """

    misses: list[Miss]
    before: list[int]
