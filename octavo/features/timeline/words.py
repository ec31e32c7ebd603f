"""A request's timeline as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.core.stats import EngineStats
from octavo.features.timeline.story import REASONS, STEP, Decision, Miss, Story


class Seen(msgspec.Struct, kw_only=True):
    """What a server saw of a request; times as in `Story`.

    Attributes:
        begun: when its prompt was tokenized and the request was sent to the engine.
        first_output, last_output: when output was ready to be sent to the client.
        reasons: finish reasons of its choices; empty if it has not ended.
        cause: who or what ended it early.
    """

    id: str
    arrival: float
    begun: float
    first_output: float
    last_output: float
    ended: float = 0.0
    prompt_tokens: int
    generated: int
    reasons: list[str] = []
    cause: str = ""


_LACKS = {
    "seats": "a seat (--max-num-seqs)",
    "step_tokens": "tokens of the step (--max-num-batched-tokens)",
    "kv_blocks": "KV blocks",
    STEP: "the step under way",
}
_PREEMPTED = {
    "kv_blocks": "it lacked KV blocks",
    "priority": "it is more urgent",
    "suspect": "it ran alone after a failed step",
    "failed_step": "its step failed",
    "parked": "the engine dropped its KV cache, for a sleep or new weights",
}
_LONG_S = 0.01
_LATER = "it reads between steps, and a pause holds requests"
_SHOWN = 6
"""Most kinds of waiting in a line."""

Line = tuple[float, str]


def lines(stories: Sequence[Story], seen: Seen | None, now: float, text_offset: int | None = None) -> list[str]:
    """Return the timeline of one request: what its choices went through, and what the server saw.

    Args:
        stories: of its choices, by index; empty if the engine does not know it any more.
        text_offset: characters of the prompt's text before its first miss, if that is known.
    """
    arrival = stories[0].arrival if stories else seen.arrival if seen else now
    name = stories[0].id if stories else seen.id if seen else ""
    prompt = stories[0].num_prompt if stories else seen.prompt_tokens if seen else 0
    found = [f"request {name}: {_count(prompt, 'prompt token')}"]
    events: list[Line] = [(arrival, "arrived")]
    if seen is not None:
        events.append((seen.begun, "tokenized and sent to the engine"))
        if stories and stories[0].queued - seen.begun >= _LONG_S:
            events.append((seen.begun, f"read by the engine {_ms(stories[0].queued - seen.begun)} later: {_LATER}"))
    for story in stories:
        whose = f"choice {story.index}: " if len(stories) > 1 else ""
        events += [(at, whose + text) for at, text in _engine_lines(story, now, text_offset)]
    if seen is not None:
        events += _server_lines(seen, stories)
    found += [f"  {at - arrival:+10.3f} s  {text}" for at, text in sorted(events, key=lambda line: line[0])]
    return found


def _engine_lines(story: Story, now: float, text_offset: int | None) -> list[Line]:
    found: list[Line] = [(story.queued, f"queued in the engine{_priority(story)}")]
    if story.admitted:
        found.append((story.admitted, f"admitted{_waited(story, story.admitted)}; {_cached(story)}"))
        found += [(story.admitted, _miss(miss, text_offset if i == 0 else None)) for i, miss in enumerate(story.misses)]
    if story.prompt_planned:
        found.append((story.prompt_planned, f"the rest of the prompt planned, in {_count(story.chunks, 'step')}"))
    found += _preemptions(story)
    if story.first_token:
        found.append((story.first_token, "first token in the engine"))
    if story.ended:
        found.append((story.ended, f"ended in the engine: {story.finish}, {_count(story.generated, 'token')}"))
    end = story.ended or now
    if story.generated > 1 and story.decode_steps:
        found.append((end, _decoding(story)))
    if story.drafted:
        share = story.accepted / story.drafted
        found.append((end, f"{story.accepted:,} of {story.drafted:,} drafted tokens accepted ({share:.0%})"))
    if not story.ended:
        found.append((now, f"now {_now(story, now)}"))
    return found


def _server_lines(seen: Seen, stories: Sequence[Story]) -> list[Line]:
    found: list[Line] = []
    if seen.first_output:
        firsts = [story.first_token for story in stories if story.first_token]
        after = f", {_ms(seen.first_output - min(firsts))} after the engine's first token" if firsts else ""
        found.append((seen.first_output, f"first output ready for the client{after}"))
    if seen.ended:
        cause = f": {seen.cause}" if seen.cause else ""
        ends = [story.ended for story in stories if story.ended]
        after = f", {_ms(seen.ended - max(ends))} after the engine" if ends and seen.ended >= max(ends) else ""
        reasons = ", ".join(dict.fromkeys(seen.reasons))
        found.append((seen.ended, f"ended in the server ({reasons}), {seen.generated:,} tokens{after}{cause}"))
    return found


def _priority(story: Story) -> str:
    return f" with priority {story.priority}" if story.priority else ""


def _waited(story: Story, until: float) -> str:
    waits = sorted(story.waits.items(), key=lambda item: -item[1])[:_SHOWN]
    told = ", ".join(f"{_ms(seconds)} for {_LACKS.get(what, what)}" for what, seconds in waits if seconds >= 0.0005)
    return f" after {_ms(until - story.queued)}" + (f" ({told})" if told else "")


def _cached(story: Story) -> str:
    if story.forked:
        return "it shares the prompt of the first choice"
    loaded = "".join(f", {count:,} of them loaded by {tier}" for tier, count in story.loaded.items())
    return f"{story.cached:,} of {_count(story.num_prompt, 'prompt token')} from the prefix cache{loaded}"


def _miss(miss: Miss, text_offset: int | None) -> str:
    where = f"at token {miss.position:,}"
    if text_offset is not None:
        where += f" (character {text_offset:,} of its text)"
    ago = "" if miss.ago is None else f", {_ms(miss.ago)} before"
    return f"not cached: {_count(miss.tokens, 'token')}, {where}: {REASONS.get(miss.reason, miss.reason)}{ago}"


def _preemptions(story: Story) -> list[Line]:
    found: list[Line] = []
    for one in story.preemptions:
        whom = f"for request {one.by}, as " if one.by else "as "
        why = _PREEMPTED.get(one.cause, one.cause)
        found.append((one.at, f"preempted {whom}{why}; {_count(one.computed, 'token')} computed until then"))
        if one.resumed:
            again = f"admitted again after {_ms(one.resumed - one.at)}; {_count(one.recomputed, 'token')}"
            found.append((one.resumed, f"{again} to be computed again"))
    left = story.num_preemptions - len(story.preemptions)
    if left:
        found.append((story.preemptions[-1].at, f"and preempted {left:,} more times"))
    return found


def _decoding(story: Story) -> str:
    steps, later = story.decode_steps, story.generated - 1
    own = max(1, later - story.accepted)
    beside = story.decode_prompt_tokens / steps
    others = f" and {beside:.0f} prompt tokens of others" if beside >= 0.5 else ""
    return (
        f"decoded {_count(later, 'further token')}, {_ms(story.decode_s / own)} for each of its steps; the engine's "
        f"steps then had {story.decode_rows / steps:.1f} rows{others} in the mean"
    )


def _now(story: Story, now: float) -> str:
    if story.waiting_for:
        what = _LACKS.get(story.waiting_for, story.waiting_for)
        since = story.preemptions[-1].at if story.num_preemptions and story.admitted else story.queued
        return f"waiting for {what}; {_ms(now - since)} so far{'' if story.admitted else _so_far(story)}"
    if not story.first_token:
        return "its prompt is computed"
    return f"generating: {_count(story.generated, 'token')} of at most {story.max_tokens:,}"


def _so_far(story: Story) -> str:
    waits = sorted(story.waits.items(), key=lambda item: -item[1])[:_SHOWN]
    told = ", ".join(f"{_LACKS.get(what, what)} {_ms(seconds)}" for what, seconds in waits if seconds >= 0.0005)
    return f" ({told})" if told else ""


def engine_line(stats: EngineStats) -> str:
    """Return a line about the engine."""
    lacks = f", the first lacks {_LACKS[stats.waits_for]}" if stats.waits_for else ""
    paused = "; paused" if stats.paused else ""
    return (
        f"{stats.num_running:,} running, {stats.num_waiting:,} waiting{lacks}; {stats.kv_usage:.0%} of the KV cache in "
        f"use; {_count(stats.num_preemptions, 'preemption')} so far{paused}"
    )


def seen_line(seen: Seen, now: float) -> str:
    """Return a line about an unfinished request that only the server knows."""
    return f"{seen.id}: {_ms(now - seen.arrival)}; {_count(seen.generated, 'token')} received"


def summary(story: Story, now: float) -> str:
    """Return a line about a request."""
    choice = f" choice {story.index}" if story.index else ""
    begun = story.admitted or story.ended or now
    first = f", first token after {_ms(story.first_token - story.arrival)}" if story.first_token else ""
    preempted = f", preempted {story.num_preemptions} times" if story.num_preemptions else ""
    state = f"ended ({story.finish})" if story.ended else f"now {_now(story, now)}"
    return (
        f"{story.id}{choice}: {_ms((story.ended or now) - story.arrival)}; waited {_ms(begun - story.queued)}; "
        f"{story.cached:,} of {_count(story.num_prompt, 'prompt token')} cached{first}, "
        f"{story.generated:,} generated{preempted}; {state}"
    )


def decision_line(one: Decision, now: float) -> str:
    """Return a line about a decision."""
    whom = f" {one.id}" + (f"/{one.index}" if one.index else "") if one.id else ""
    text = {
        "queued": f"{one.tokens:,} prompt tokens",
        "deferred": f"for {one.about}",
        "admitted": f"{one.tokens:,} tokens cached",
        "preempted": f"{one.about}{f', for {one.by}' if one.by else ''}, {one.tokens:,} tokens computed",
        "evicted": _count(one.blocks, "block") + " of the prefix cache",
        "ended": f"{one.about}, {one.tokens:,} tokens",
    }[one.kind]
    return f"{one.at - now:+10.3f} s  {one.kind}{whom}: {text}"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
