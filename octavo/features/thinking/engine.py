"""`ThinkingEngine`: the engine half. It counts tokens of reasoning and forces the end mark at the limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum, auto

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.plan import PlanDraft, StepPlan
from octavo.features import FeatureContext
from octavo.features.thinking.budget import ThinkingBudget
from octavo.features.thinking.payload import NAME, Forced
from octavo.schedule.hooks import EngineHook
from octavo.schedule.request import Request
from octavo.text.tokenizers.tokenizer import Tokenizer


class _State(Enum):
    UNDECIDED = auto()
    """At the output's beginning: it may or may not begin with reasoning."""
    THINKING = auto()
    ENDING = auto()
    """The end mark is being forced."""
    DONE = auto()


class Watch:
    """The state of one output, up to the end of its reasoning.

    Attributes:
        forced: the next tokens, in order.
    """

    def __init__(self, budget: ThinkingBudget, tokenizer: Tokenizer) -> None:
        self.forced: list[int] = []
        self._budget = budget
        self._tokenizer = tokenizer
        self._count = 0
        self._text = ""
        self._state = _State.UNDECIDED
        if budget.open:
            self._begin()

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    def may_end_within(self, pending: int) -> bool:
        """Return whether the last of `pending` unknown tokens may have to be forced."""
        return self._state is _State.ENDING or (not self.done and self._count + pending > self._budget.tokens)

    def drafts_after(self, pending: int) -> int | None:
        """Return how many drafts may follow `pending` unknown tokens, so that none has to be forced; None for any."""
        if self.done:
            return None
        left = 0 if self._state is _State.ENDING else self._budget.tokens - self._count - pending - 1
        return max(0, left)

    def read(self, token: int) -> None:
        """Advance by the next token of the output."""
        if self._state is _State.ENDING:
            self.forced.pop(0)
            self._state = _State.ENDING if self.forced else _State.DONE
            return
        self._text += self._tokenizer.decode([token], skip_special_tokens=False)
        if self._state is _State.UNDECIDED:
            self._decide()
        elif self._state is _State.THINKING:
            self._think()

    def _decide(self) -> None:
        begin, seen = self._budget.begin, self._text.lstrip()
        if seen.startswith(begin):
            self._begin()
        elif not begin.startswith(seen):
            self._state = _State.DONE

    def _begin(self) -> None:
        self._text = ""
        self._state = _State.THINKING
        self._spend(0)

    def _think(self) -> None:
        if self._budget.end in self._text:
            self._state = _State.DONE
            return
        self._text = self._text[-len(self._budget.end) :]
        self._spend(1)

    def _spend(self, tokens: int) -> None:
        self._count += tokens
        if self._count >= self._budget.tokens:
            self.forced = self._tokenizer.encode(self._budget.end, add_special_tokens=False)
            self._state = _State.ENDING


class ThinkingEngine(EngineHook):
    """Requests without a budget cost one dictionary look-up a step."""

    opt_in = True
    admits_for_good = True

    def __init__(self, name: str, load_tokenizer: Callable[[], Tokenizer]) -> None:
        self.name = name
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Future[Tokenizer] | None = None
        self._watches: dict[Request, Watch] = {}

    def admit(self, request: Request, num_tokens: int) -> int:
        """Admit nothing until the tokenizer is loaded, by a thread that the first request with a budget starts."""
        option = request.spec.options.get(self.name)
        if option is None or request in self._watches:
            return num_tokens
        if self._tokenizer is None:
            self._tokenizer = Future()
            threading.Thread(target=self._load, args=(self._tokenizer,), daemon=True).start()
        if not self._tokenizer.done():
            return 0
        budget = msgspec.msgpack.decode(option, type=ThinkingBudget)
        self._watches[request] = Watch(budget, self._tokenizer.result())
        return num_tokens

    def _load(self, loaded: Future[Tokenizer]) -> None:
        try:
            loaded.set_result(self._load_tokenizer())
        except Exception as exc:  # on a thread: any error must reach the requests that wait
            loaded.set_exception(
                InvalidRequestError(f"The engine can't limit reasoning, because it has no tokenizer: {exc}")
            )

    def on_plan(self, draft: PlanDraft, rows: Sequence[Request]) -> None:
        """Hold back a token that may have to be forced until the tokens before it are known."""
        if not self._watches:
            return
        for request, samples in zip(rows, draft.samples, strict=True):
            watch = self._watches.get(request)
            if samples and watch is not None and watch.may_end_within(request.pending):
                draft.needs_feedback = True

    def before_sample(self, plan: StepPlan, rows: Sequence[Request]) -> Forced | None:
        if not self._watches:
            return None
        forced = {}
        for slot, samples, request in zip(plan.slots, plan.samples, rows, strict=True):
            watch = self._watches.get(request)
            if samples and watch is not None and watch.forced and request.finish is None:
                forced[slot] = watch.forced[0]
        return Forced(forced) if forced else None

    def drafts(self, request: Request) -> int | None:
        """Leave room for the token that may have to be forced, which must not be a draft."""
        watch = self._watches.get(request)
        return None if watch is None else watch.drafts_after(request.pending)

    def on_commit(self, request: Request, tokens: Sequence[int]) -> bool:
        watch = self._watches.get(request)
        if watch is not None:
            for token in tokens:
                if not watch.done:
                    watch.read(token)
        return False

    def on_release(self, request: Request) -> None:
        self._watches.pop(request, None)


def build_engine(context: FeatureContext) -> ThinkingEngine:
    """Return the engine half. No cost until the first request with a budget."""
    return ThinkingEngine(NAME, context.load_tokenizer)
