"""`RequestAssembler`: converts the engine's token deltas of one request to the user's outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from octavo.core.output import Logprob, RequestOutput, RequestTimes, TokenDelta
from octavo.core.params import OutputKind
from octavo.core.request import GenerateRequest
from octavo.text.detokenize.choice import ChoiceText, Ender, no_text, readable
from octavo.text.hooks import TextHook
from octavo.text.tokenizers.tokenizer import Tokenizer


class RequestAssembler:
    """Detokenizes, finds stop strings, and builds outputs in the form of `params.output_kind`.

    CUMULATIVE and DELTA items hold the one choice that has new output; FINAL_ONLY gives one item with all choices in
    order. Each choice appears with a finish reason exactly once.

    Attributes:
        request: the request whose deltas it processes.
        aborts: choices that the last `push` ended at a stop string or by `ender`; the caller must abort them.
        finished: all choices have ended; there will be no further output.

    Args:
        ender: creates a detector of additional ends for each choice; see `ChoiceText`.
    """

    def __init__(
        self,
        request: GenerateRequest,
        tokenizer: Tokenizer,
        prompt_text: str | None = None,
        hooks: Sequence[TextHook] = (),
        *,
        ender: Callable[[], Ender | None] | None = None,
    ) -> None:
        self.aborts: list[int] = []
        self.request = request
        self._prompt_text = prompt_text
        params = request.params
        skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        after_text = any(token not in skipped for token in request.tokens)
        self._open = params.n
        self._choices = [
            ChoiceText(index, params, tokenizer, after_text=after_text, ends=ender() if ender else None, hooks=hooks)
            for index in range(params.n)
        ]
        self._num_cached = 0
        self._num_preemptions = 0
        self._times: RequestTimes | None = None
        self._first_token = 0.0
        # The first token of a prompt has none.
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self._tokenizer = tokenizer

    @property
    def finished(self) -> bool:
        return not self._open

    def push(self, delta: TokenDelta) -> RequestOutput | None:
        """Add a delta. Return an item for the user, or None if there is nothing to show now."""
        self.aborts = []
        choice = self._choices[delta.index]
        if choice.finish is not None:
            return None
        self._note(delta)
        if delta.prompt_logprobs is not None:
            self._take_prompt(delta)
            if not delta.tokens and delta.finish is None:
                return None
        choice.push(delta)
        self._open -= choice.finish is not None
        if choice.stopped_by_text and delta.finish is None:
            self.aborts = [choice.index]
        if self.request.params.output_kind is OutputKind.FINAL_ONLY:
            return self._output(self._choices) if self.finished else None
        return self._output([choice]) if choice.has_news else None

    def rest(self) -> RequestOutput:
        """Return the tokens that `push` has not returned, for a request that ends early; for CUMULATIVE all tokens."""
        return self._output(self._choices)

    def _output(self, choices: list[ChoiceText]) -> RequestOutput:
        finished = self.finished
        return RequestOutput(
            request_id=self.request.id,
            prompt=self._prompt_text,
            prompt_token_ids=self.request.tokens,
            outputs=[choice.output(self.request.params.output_kind) for choice in choices],
            finished=finished,
            num_cached_tokens=self._num_cached,
            prompt_logprobs=self._prompt_logprobs,
            times=self._final_times() if finished else None,
            num_preemptions=self._num_preemptions,
        )

    def _take_prompt(self, delta: TokenDelta) -> None:
        """Store the prompt's log-probabilities of the first choice; all choices share the prompt."""
        known = self._prompt_logprobs
        if delta.index or known is None:
            return
        text = self._tokenizer.token_text if self.request.params.detokenize else no_text
        for entry in delta.prompt_logprobs or ():
            known.append(readable(self.request.tokens[len(known)], entry, text))

    def _note(self, delta: TokenDelta) -> None:
        if delta.index == 0:  # the others share its prompt, whether or not that came from the cache
            self._num_cached = max(self._num_cached, delta.num_cached)
        self._num_preemptions += delta.num_preemptions
        if delta.tokens and not self._first_token:
            self._first_token = time.monotonic()
        if delta.times is not None:
            self._times = delta.times if self._times is None else _union(self._times, delta.times)

    def _final_times(self) -> RequestTimes:
        """Return the engine's times, or local ones if a stop string ended the request first."""
        if not any(choice.stopped_by_text for choice in self._choices) and self._times is not None:
            return self._times
        seen = RequestTimes(self.request.arrival, 0.0, self._first_token, time.monotonic())
        return seen if self._times is None else _union(self._times, seen)


def _union(one: RequestTimes, other: RequestTimes) -> RequestTimes:
    """Merge the times of two choices: from the first start to the last end."""
    return RequestTimes(
        arrival=_earliest(one.arrival, other.arrival),
        first_scheduled=_earliest(one.first_scheduled, other.first_scheduled),
        first_token=_earliest(one.first_token, other.first_token),
        finished=max(one.finished, other.finished),
    )


def _earliest(one: float, other: float) -> float:
    return min(one, other) if one and other else one or other
