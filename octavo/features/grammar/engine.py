"""`GrammarEngine`: the engine half. It follows each request through its grammar and makes the masks.

One request's round: a token is committed and its matcher advances; before the next token is sampled its mask is
computed. The masks of a step are computed together, many of them on threads that know nothing of Python: before the
step's forward pass where all earlier tokens are known by then, else during it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher

from octavo.core.errors import InvalidRequestError
from octavo.core.plan import PlanDraft, StepPlan
from octavo.core.request import Request
from octavo.device.host import physical_cores
from octavo.features.grammar.compiler import Compiler
from octavo.schedule.hooks import EngineHook

_MAX_THREADS = 8
_FEW = 24
"""So many masks are computed before other threads, which the compute threads of a CPU compete with, are awake."""


class Masks(msgspec.Struct):
    """What the worker half needs.

    Attributes:
        slots: whose rows are masked.
        bits: for each slot as many bytes as `vocab_size` bits need in whole 32-bit words, the lowest bit first; a set
            bit allows its token. To be read before the next step's masks are made.
        errors: slot -> why its row can't be sampled.
    """

    slots: list[int]
    bits: memoryview
    errors: dict[int, str]


class _Guide:
    """One request's way through its grammar."""

    __slots__ = ("compiled", "error", "matcher")

    def __init__(self, compiled: Future[LLMatcher]) -> None:
        self.compiled = compiled
        self.matcher: LLMatcher | None = None
        self.error = ""


class GrammarEngine(EngineHook):
    """Requests without a grammar cost it one dictionary look-up a step."""

    opt_in = True

    def __init__(self, name: str, compiler: Compiler) -> None:
        self.name = name
        self._compiler = compiler
        self._guides: dict[Request, _Guide] = {}
        self._executor = LLExecutor(min(_MAX_THREADS, physical_cores()))
        self._bits = np.zeros((1, -(-compiler.vocab_size // 32)), dtype=np.int32)

    def admit(self, request: Request, num_tokens: int) -> int:
        """Nothing until the grammar is compiled. Raises InvalidRequestError if it can't be."""
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
            guide.matcher = guide.compiled.result().deep_copy()
        return num_tokens

    def on_plan(self, draft: PlanDraft, rows: Sequence[Request]) -> None:
        guided = self._guided(draft, rows)
        if not guided:
            return
        if all(request.inflight == 1 for request, _ in guided.values()):  # nothing but this step
            draft.payload[self.name] = self._masks(guided)
        else:
            draft.needs_feedback = True

    def before_sample(self, plan: StepPlan, rows: Sequence[Request]) -> Any:
        if self.name in plan.payload:
            return None
        guided = self._guided(plan, rows)
        return self._masks(guided) if guided else None

    def on_commit(self, request: Request, tokens: Sequence[int]) -> bool:
        """Whether the grammar is fulfilled and nothing can follow."""
        guide = self._guides.get(request)
        if guide is None or guide.matcher is None:
            return False
        taken = guide.matcher.try_consume_tokens(list(tokens))
        if taken == len(tokens) and not guide.matcher.is_stopped():  # as it also is in error
            return False
        if taken < len(tokens) or guide.matcher.is_error():
            guide.error = f"The grammar could not go on: {guide.matcher.get_error() or 'a token does not fit it'}"
            return False
        return True

    def on_release(self, request: Request) -> None:
        self._guides.pop(request, None)

    def _guided(self, step: PlanDraft | StepPlan, rows: Sequence[Request]) -> dict[int, tuple[Request, _Guide]]:
        """Slot -> request and guide, of rows that sample by a grammar."""
        guides = self._guides
        if not guides:
            return {}
        return {
            slot: (request, guides[request])
            for slot, samples, request in zip(step.slots, step.samples, rows, strict=True)
            if samples and request in guides and request.finish is None
        }

    def _masks(self, guided: dict[int, tuple[Request, _Guide]]) -> Masks:
        count, words = len(guided), self._bits.shape[1]
        if count > len(self._bits):
            self._bits = np.zeros((2 * count, words), dtype=np.int32)
        bits = self._bits[:count]
        first, stride = bits.ctypes.data, bits.strides[0]
        matchers = [(guide.matcher, row) for row, (_, guide) in enumerate(guided.values()) if guide.matcher is not None]
        if count <= _FEW:
            for matcher, row in matchers:
                matcher.unsafe_compute_mask_ptr(first + row * stride, stride)
        else:
            self._executor.unsafe_compute_mask_ptr(matchers, first, stride, count)
        errors: dict[int, str] = {}
        for slot, (_, guide) in guided.items():
            if guide.matcher is not None and guide.matcher.is_error() and not guide.error:
                guide.error = f"The grammar became too complex for this output: {guide.matcher.get_error()}"
            if guide.error:
                errors[slot] = guide.error
        return Masks(list(guided), bits.data.cast("B"), errors)
