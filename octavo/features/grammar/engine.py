"""`GrammarEngine`: the engine half. It advances each request's matcher and computes the masks.

For each request, a committed token advances the matcher, and the mask is computed before the next token is sampled.
The masks of a step are computed together, during its forward pass; on a CPU, where a forward pass is synchronous,
before it if all earlier tokens are known. A row with drafts has a mask for each position: those after a draft are
computed as if it had been accepted, and the matcher is then rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from time import perf_counter

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from octavo.core.errors import InvalidRequestError
from octavo.core.plan import PlanDraft, StepPlan
from octavo.core.structured import UNFOLLOWED
from octavo.device.host import physical_cores
from octavo.features import FeatureContext
from octavo.features.grammar.compiler import CompiledGrammar, Compiler
from octavo.features.grammar.defaults import StructuredDefaults
from octavo.features.grammar.payload import NAME, Masks
from octavo.features.grammar.settings import GrammarSettings
from octavo.schedule.hooks import EngineHook
from octavo.schedule.request import Request

_MAX_THREADS = 4
"""Most threads for masks: a step waits for the slowest, and more threads make it likelier that one is descheduled."""
_LONG_S = 0.004
"""Masks that take longer than this are worth threads. Most take 3 us: for 64 of them one thread took 0.9 ms, four
threads 1.6 ms; and on a CPU they compete with the compute threads."""
_COSTLY_S = 0.02
"""A mask or token takes longer than this only with a highly ambiguous grammar: with large schemas it is 5 ms, with
`s: s s s | "a"` 350 ms, and all other requests wait for it."""
_ALLOWANCE_S = 2.0
"""Total of such delays after which a request is ended. A single delay counts as a quarter of it at most, in case the
machine itself was stalled."""
_ALL = -1
"""A word of a mask that allows all its tokens."""
_UNTIMED = 16
"""Costs of masks made on threads can't be attributed: after this many costly steps, one is made without threads."""


class _Guided:
    """The rows of one step that sample by a grammar, in the step's order.

    Attributes:
        room: how many drafts each row verifies at most.
        work: each guide's matcher and its place, as the executor takes them.
    """

    __slots__ = ("guides", "requests", "room", "slots", "work")

    def __init__(self, step: PlanDraft, rows: Sequence[Request], guides: dict[Request, _Guide]) -> None:
        chosen = [
            (slot, request, guide, drafts)
            for slot, samples, request, drafts in zip(step.slots, step.samples, rows, step.num_drafts, strict=True)
            if samples and request.finish is None and (guide := guides.get(request)) is not None
        ]
        self.slots = [slot for slot, _, _, _ in chosen]
        self.requests = [request for _, request, _, _ in chosen]
        self.guides = [guide for _, _, guide, _ in chosen]
        self.room = [drafts for _, _, _, drafts in chosen]
        self.match()

    def match(self) -> None:
        """Take the guides' matchers."""
        self.work = [(guide.matcher, place) for place, guide in enumerate(self.guides) if guide.matcher is not None]


class _Guide:
    """One request's matcher. `begun` is set by its first token; before that the mask is the grammar's `first`.

    `drafts` are those after its last token, as far as the grammar allows them. It `takes_drafts` unless masks are
    costly: each draft needs one more.
    """

    __slots__ = ("begun", "compiled", "drafts", "error", "matcher", "spent", "takes_drafts")

    def __init__(self, compiled: Future[CompiledGrammar]) -> None:
        self.compiled = compiled
        self.begun = False
        self.matcher: LLMatcher | None = None
        self.drafts: list[int] = []
        self.takes_drafts = True
        self.error = ""
        self.spent = 0.0

    def charge(self, seconds: float) -> None:
        """Add the cost of a mask or token; end the request once the total exceeds the limit."""
        if seconds > _COSTLY_S:
            self.takes_drafts = False
            self.spent += min(seconds, _ALLOWANCE_S / 4)
            if self.spent > _ALLOWANCE_S and not self.error:
                self.error = (
                    f"{UNFOLLOWED}its grammar is too ambiguous, which has cost {self.spent:.1f} s so far. Write the "
                    "rules so that there are few ways to read the same text."
                )


class GrammarEngine(EngineHook):
    """Requests without a grammar cost one dictionary look-up a step. `device` runs the forward pass."""

    opt_in = True
    admits_for_good = True

    def __init__(self, name: str, compiler: Compiler, device: str = "cpu") -> None:
        self.name = name
        self._compiler = compiler
        self._guides: dict[Request, _Guide] = {}
        self._guided: _Guided | None = None
        threads = min(_MAX_THREADS, physical_cores() // 2)
        self._executor = LLExecutor(threads) if threads > 1 else None
        self._together = False
        self._untimed = 0
        self._computes_at_launch = device == "cpu"
        self._bits = np.zeros((1, -(-compiler.vocab_size // 32)), dtype=np.int32)

    def admit(self, request: Request, num_tokens: int) -> int:
        """Admit nothing until the grammar is compiled; raise InvalidRequestError if it can't be."""
        option = request.spec.options.get(self.name)
        if option is None:
            return num_tokens
        guide = self._guides.get(request)
        if guide is None:
            guide = self._guides[request] = _Guide(self._compiler.open(option))
        if guide.error:
            raise InvalidRequestError(guide.error)
        if guide.matcher is None:
            if not guide.compiled.done():
                return 0
            guide.matcher = guide.compiled.result().matcher.deep_copy()
        return num_tokens

    def waits(self, request: Request) -> bool:
        guide = self._guides.get(request)
        return guide is not None and guide.matcher is None and not guide.error and not guide.compiled.done()

    def waits_for(self, request: Request) -> str:
        return "the compilation of its grammar" if self.waits(request) else ""

    def on_plan(self, draft: PlanDraft, rows: Sequence[Request]) -> None:
        guided = self._guided = self._of(draft, rows)
        if guided is None:
            return
        if any(request.inflight > 1 for request in guided.requests):  # a step before this one is in flight
            draft.needs_feedback = True
        elif self._computes_at_launch:
            draft.payload[self.name] = self._masks(guided)

    def before_sample(self, plan: StepPlan, rows: Sequence[Request]) -> Masks | None:
        return None if self._guided is None or self.name in plan.payload else self._masks(self._guided)

    def drafts(self, request: Request) -> int | None:
        guide = self._guides.get(request)
        return None if guide is None or guide.takes_drafts else 0

    def on_drafts(self, request: Request, drafts: Sequence[int]) -> int:
        guide = self._guides.get(request)
        if guide is None or guide.matcher is None:
            return len(drafts)
        guide.drafts = list(drafts[: guide.matcher.validate_tokens(list(drafts))])
        if guide.matcher.is_error():
            self._restart(request, guide)
        return len(guide.drafts)

    def on_commit(self, request: Request, tokens: Sequence[int]) -> bool:
        """Return whether the grammar is complete and no token can follow."""
        guide = self._guides.get(request)
        if guide is None or guide.matcher is None:
            return False
        guide.begun, guide.drafts = True, []
        began = perf_counter()
        taken = guide.matcher.try_consume_tokens(list(tokens))
        guide.charge(perf_counter() - began)
        if taken == len(tokens) and not guide.matcher.is_stopped():  # stopped also after an error
            return False
        if taken < len(tokens) or guide.matcher.is_error():
            guide.error = f"{UNFOLLOWED}{guide.matcher.get_error() or 'a token does not fit it'}"
            return False
        return True

    def on_release(self, request: Request) -> None:
        self._guides.pop(request, None)
        if not self._guides:
            self._guided = None

    def _of(self, draft: PlanDraft, rows: Sequence[Request]) -> _Guided | None:
        """Return the guided rows of a step; None if there are none.

        A step that repeats the one before has the same guided rows. If one of them has ended since, its mask is unused.
        """
        if not self._guides:
            return None
        if draft.repeats and self._guided is not None:
            return self._guided
        guided = _Guided(draft, rows, self._guides)
        return guided if guided.guides else None

    def _masks(self, guided: _Guided) -> Masks:
        if any(guided.room):
            return self._drafted_masks(guided)
        bits = self._room_for(len(guided.guides))
        self._fill(bits, guided)
        errors: dict[int, str] = {}
        for row, guide in enumerate(guided.guides):
            if guide.matcher is not None and guide.matcher.is_error() and not guide.error:
                guide.error = _too_complex(guide.matcher)
            if guide.error:
                errors[row] = guide.error
        return Masks(guided.slots, bits.data.cast("B"), errors)

    def _drafted_masks(self, guided: _Guided) -> Masks:
        """Compute the masks of rows with drafts: `1 + k` for a row with k of them, all in sequence."""
        drafts = [guide.drafts[:room] for guide, room in zip(guided.guides, guided.room, strict=True)]
        slots = [slot for slot, mine in zip(guided.slots, drafts, strict=True) for _ in range(1 + len(mine))]
        bits = self._room_for(len(slots))
        errors: dict[int, str] = {}
        place = 0
        for request, guide, mine in zip(guided.requests, guided.guides, drafts, strict=True):
            found = self._fill_drafted(bits[place : place + 1 + len(mine)], request, guide, mine)
            errors |= {place + position: error for position, error in found.items()}
            place += 1 + len(mine)
        return Masks(slots, bits.data.cast("B"), errors)

    def _fill_drafted(
        self, bits: NDArray[np.int32], request: Request, guide: _Guide, drafts: list[int]
    ) -> dict[int, str]:
        """Fill the masks of a row's positions; return the first position that can have none, with the reason.

        A position after a draft that completes the grammar is never used. There all tokens are allowed: the grammar's
        only one, the end of the sequence, may be forbidden by `min_tokens`, and a row without any token fails.
        """
        matcher, read = guide.matcher, 0
        if guide.error or not guide.begun or matcher is None:
            bits[0] = guide.compiled.result().first
            return {0: guide.error} if guide.error else {}
        began = perf_counter()
        for position, mask in enumerate(bits):
            if position and matcher.is_stopped() and not matcher.is_error():
                mask[:] = _ALL
                continue
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher.is_error():
                self._restart(request, guide)
                return {position: _too_complex(matcher)}
            read += matcher.try_consume_tokens(drafts[position : position + 1])
        matcher.rollback(read)
        guide.charge((perf_counter() - began) / len(bits))
        return {0: guide.error} if guide.error else {}

    def _restart(self, request: Request, guide: _Guide) -> None:
        """Replace a matcher in an error, which it can't leave, by one that has read the output."""
        guide.matcher = guide.compiled.result().matcher.deep_copy()
        guide.matcher.try_consume_tokens(request.tokens[request.num_prompt :])
        guide.takes_drafts, guide.drafts = False, []
        if self._guided is not None:
            self._guided.match()

    def _room_for(self, count: int) -> NDArray[np.int32]:
        """Return memory for as many masks."""
        if count > len(self._bits):
            self._bits = np.zeros((2 * count, self._bits.shape[1]), dtype=np.int32)
        return self._bits[:count]

    def _fill(self, bits: NDArray[np.int32], guided: _Guided) -> None:
        """Compute the masks in sequence, or on native threads after a slow step."""
        new = {place: guide for place, guide in enumerate(guided.guides) if not guide.begun}
        for place, guide in new.items():
            bits[place] = guide.compiled.result().first
        work = [one for one in guided.work if one[1] not in new] if new else guided.work
        began, longest = perf_counter(), 0.0
        if self._executor is not None and self._together:
            self._executor.unsafe_compute_mask_ptr(work, bits.ctypes.data, bits.strides[0], len(bits))
            self._untimed += 1
        else:
            longest = _fill_one_by_one(bits, work, guided.guides)
            self._untimed = 0
        took = perf_counter() - began
        unclear = took > _COSTLY_S and (longest > _COSTLY_S or self._untimed >= _UNTIMED)
        self._together = took > (_LONG_S / 2 if self._together else _LONG_S) and not unclear


def _fill_one_by_one(bits: NDArray[np.int32], work: Sequence[tuple[LLMatcher, int]], guides: Sequence[_Guide]) -> float:
    """Charge each guide the cost of its mask; return the seconds of the longest."""
    first, stride = bits.ctypes.data, bits.strides[0]
    longest, before = 0.0, perf_counter()
    for matcher, place in work:
        matcher.unsafe_compute_mask_ptr(first + place * stride, stride)
        now = perf_counter()
        guides[place].charge(now - before)
        longest, before = max(longest, now - before), now
    return longest


def _too_complex(matcher: LLMatcher) -> str:
    return f"{UNFOLLOWED}the grammar became too complex. {matcher.get_error()}"


def build_engine(context: FeatureContext) -> GrammarEngine:
    """Return the engine half. No cost until the first request with a grammar."""
    defaults = StructuredDefaults.of(context.settings_of(GrammarSettings).structured_outputs_config)
    compiler = Compiler(context.load_tokenizer, context.vocab_size, context.eos_token_ids, defaults)
    return GrammarEngine(NAME, compiler, context.device)
