"""One choice of a request, from tokens to text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from octavo.core.output import CompletionOutput, FinishReason, Logprob, TokenDelta, TokenLogprobs
from octavo.core.params import OutputKind, SamplingParams
from octavo.text.detokenize.detokenizer import Detokenizer
from octavo.text.detokenize.stops import StopMatcher
from octavo.text.hooks import TextHook
from octavo.text.tokenizers.tokenizer import Tokenizer

Ender = Callable[[str], bool]


class ChoiceText:
    """Text, tokens and end of one choice.

    Attributes:
        finish: why it ended; None while it is active.
        stop_reason: the stop string or stop token that ended it; the error's text after an error.
        stopped_by_text: a stop string or `ends` found this end, so the engine must abort the choice.

    Args:
        ends: called with all pieces of the text; returns True where the answer ends, whatever `min_tokens` says.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        after_text: bool,
        ends: Ender | None = None,
        hooks: Sequence[TextHook] = (),
    ) -> None:
        self.index = index
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.stopped_by_text = False
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens, after_text=after_text)
            if params.detokenize
            else None
        )
        self._matcher = StopMatcher(params.stop_strings, include=params.include_stop_str_in_output)
        self._ends = ends
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._fresh = False
        self._cumulative_logprob = 0.0
        self._count = 0
        self._told = 0
        self._hooks = hooks
        self._found: Mapping[str, bytes] = {}

    def push(self, delta: TokenDelta) -> None:
        """Add a delta. Anything after the end is dropped: the engine may run a step ahead."""
        for place, token in enumerate(delta.tokens):
            if self.finish is not None:
                return
            ends_here = delta.finish is FinishReason.STOP and not delta.complete and place == len(delta.tokens) - 1
            self._take(token, delta.logprobs[place] if delta.logprobs else None)
            if not ends_here or self._params.include_stop_str_in_output:
                self._add_text(token)
        if delta.finish is not None and self.finish is None:
            self._end(delta)

    def output(self, kind: OutputKind) -> CompletionOutput:
        """Return what is new since the last call (DELTA), or everything so far."""
        text, tokens, logprobs = "".join(self._text), self._tokens, self._logprobs
        self._fresh, self._told = False, self._count
        if kind is OutputKind.DELTA:
            self._text, self._tokens, self._logprobs = [], [], []
        else:
            self._text, self._tokens, self._logprobs = [text], list(tokens), list(logprobs)
        wants_logprobs = self._params.reports
        output = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=tokens,
            cumulative_logprob=self._cumulative_logprob if wants_logprobs else None,
            logprobs=logprobs if wants_logprobs else None,
            finish_reason=None if self.finish is None else self.finish.value,
            stop_reason=self.stop_reason,
        )
        for hook in self._hooks if self._found else ():
            if (data := self._found.get(hook.name)) is not None:
                hook.answer(output, data)
        return output

    @property
    def has_news(self) -> bool:
        """Return whether there is output to send now; with a `stream_interval`, tokens are collected."""
        if self.finish is not None:
            return True
        return self._fresh and (not self._told or self._count - self._told >= (self._params.stream_interval or 1))

    def _take(self, token: int, logprobs: TokenLogprobs | None) -> None:
        self._count += 1
        self._fresh = True
        self._tokens.append(token)
        if logprobs is not None:
            self._cumulative_logprob += logprobs.logprob
            text = self._tokenizer.token_text if self._params.detokenize else no_text
            named = bool(self._params.logprob_token_ids)
            self._logprobs.append(readable(token, logprobs, text, ranked=not named))

    def _add_text(self, token: int) -> None:
        if self._detokenizer is None:
            return
        text = self._detokenizer.push(token)
        if self._count <= self._params.min_tokens:
            self._tell(text)
        else:
            self._match(text)

    def _match(self, text: str) -> None:
        safe, stop = self._matcher.push(text)
        self._tell(safe)
        if stop is not None:
            self.finish, self.stop_reason, self.stopped_by_text = FinishReason.STOP, stop, True

    def _tell(self, text: str) -> None:
        self._text.append(text)
        if self._ends is not None and self._ends(text):
            self.finish, self.stopped_by_text = FinishReason.STOP, True

    def _end(self, delta: TokenDelta) -> None:
        if self._detokenizer is not None:
            self._match(self._detokenizer.flush())
            if self.finish is not None:
                return
            self._text.append(self._matcher.flush())
        self.finish, self._found = delta.finish, delta.found or {}
        self.stop_reason = delta.error if delta.finish is FinishReason.ERROR else delta.stop_reason


def readable(
    token: int, logprobs: TokenLogprobs, text: Callable[[int], str | None], *, ranked: bool = True
) -> dict[int, Logprob]:
    """Return the token first, then the others in order; if `ranked`, the order gives their ranks."""
    shown = {token: Logprob(logprobs.logprob, logprobs.rank, text(token))}
    for rank, (other, value) in enumerate(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True), 1):
        shown.setdefault(other, Logprob(value, rank if ranked else None, text(other)))
    return shown


def no_text(token: int) -> str | None:
    """Return None, for outputs without text."""
    return None
