"""`SamplingParams`: how one request's tokens are chosen and when it ends."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.core.keywords import Suggesting, kind_in_words
from octavo.core.structured import StructuredOutputsParams

_EPS = 1e-5
MAX_BAD_WORDS = 1024
MAX_LOGPROB_TOKENS = 128
"""Maximum length of `logprob_token_ids`."""
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""What `logprobs` report: the model's raw logits or the processed ones that the token is drawn from, normalized or
not."""


@dataclass(frozen=True, slots=True)
class Range:
    """The valid range of a number: `low` to `high`, excluding `low` if `above`."""

    low: float
    high: float = math.inf
    above: bool = False

    def holds(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high


RANGES = {
    "n": Range(1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(1e-6, 1e6),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above=True),
    "top_k": Range(-1),
    "min_p": Range(0, 1),
    "max_tokens": Range(1),
    "min_tokens": Range(0),
    "logprobs": Range(-1),
    "prompt_logprobs": Range(-1),
    "length_penalty": Range(-32, 32),
    "stream_interval": Range(1),
}
"""Field of `SamplingParams` -> valid range. Penalties are bounded so that their powers and products stay finite."""
FEATURE_PARAMS = ("beam_width", "structured_outputs", "thinking_token_budget", "extra_args", "feature_args")
"""Fields of `SamplingParams` that only features read; None by default. They are sent in the features' options."""
MAX_PATTERN = 1024
"""Longest pattern, in tokens, that `RepetitionDetection` detects."""
# Fields of other engines that are refused -> what to do instead.
_NOT_HERE = {
    "flat_logprobs": "leave it out and read `logprobs` as a list of dicts",
    "trace_decode_token_ids": "make these tokens part of the prompt and ask for `prompt_logprobs`",
    "watermarking": "leave it out",
}


class OutputKind(enum.IntEnum):
    """Content of each item of a generation stream."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


RequestOutputKind = OutputKind
"""vLLM's name of the same."""


class RepetitionDetection(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """Rule that ends an output which repeats itself.

    Attributes:
        max_pattern_size, min_pattern_size: range of pattern lengths, in tokens.
        min_count: least number of consecutive occurrences of the pattern at the end of the output.
        min_tokens: least number of tokens in these occurrences together.

    Raises:
        InvalidRequestError: a field is out of range.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 3
    min_tokens: int = 0

    def __post_init__(self) -> None:
        fits = 1 <= self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN
        _require(
            fits and self.min_count >= 2 and self.min_tokens >= 0,
            "repetition_detection",
            msgspec.to_builtins(self),
            f"repetition_detection must have 1 <= min_pattern_size <= max_pattern_size <= {MAX_PATTERN} and "
            "min_count >= 2, min_tokens >= 0.",
        )

    @property
    def least(self) -> int:
        """Least number of output tokens that can match."""
        return max(self.min_pattern_size * self.min_count, self.min_tokens)

    def covered(self, size: int) -> int:
        """Return how many tokens at the end of an output must be occurrences of a pattern of `size` tokens."""
        return size * max(self.min_count, -(-self.min_tokens // size))


class SamplingParams(msgspec.Struct, metaclass=Suggesting, kw_only=True, omit_defaults=True):
    """Sampling parameters of a request; names and defaults are those of vLLM. A request uses a validated copy.

    The order of operations on a row of logits is: `allowed_token_ids` and `bad_words`, `logit_bias`, the ban on stop
    tokens under `min_tokens`, penalties (repetition, then frequency and presence), temperature, `min_p`, `top_k`,
    `top_p`, and the draw. `logprobs` are those of the raw logits, before any of these, unless the engine's
    `logprobs_mode` is set otherwise. See docs/sampling.md.

    Attributes:
        n: number of completions of the prompt; they share the prompt's KV cache.
        presence_penalty: in [-2, 2]; subtracted from the logit of every token that occurs in the output.
        frequency_penalty: in [-2, 2]; subtracted from a token's logit once per occurrence in the output.
        repetition_penalty: in [1e-6, 1e6]; divides positive and multiplies negative logits of tokens in prompt or
            output.
        temperature: in [0, 2]; 0 is greedy.
        top_p: in (0, 1]; keep the smallest set of tokens whose probability reaches it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: in [0, 1]; drop tokens less likely than this fraction of the most likely one.
        seed: makes sampling reproducible, independent of the rest of the batch; choice i uses seed + i.
        stop: strings that end the output; not part of it unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the output.
        ignore_eos: continue past the model's end-of-sequence tokens.
        max_tokens: the most tokens to generate; None means the rest of the context.
        min_tokens: no end-of-sequence or stop token before this many.
        logprobs: number of alternatives to report with each token; None reports none, 0 the chosen token only, -1 all.
        logprob_token_ids: report these tokens with each token, in place of the most likely ones; `logprobs` must then
            be None or their number.
        prompt_logprobs: like `logprobs`, for each token of the prompt but the first; the prompt is then recomputed.
        bad_words: texts that the output may not contain, by their tokens at the beginning of a text and after a space.
        bad_token_ids: token sequences that the output may not contain; the text front end sets it from `bad_words`.
        allowed_token_ids: sample no other tokens.
        repetition_detection: end an output that repeats itself, with the finish reason "repetition".
        logit_bias: token id -> value added to its logit, clamped to [-100, 100].
        detokenize: produce text; without it only token ids are returned.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: no effect, since tokenizers decide whether to write such spaces.
        include_stop_str_in_output: keep the stop string that ended the output.
        output_kind: content of each streamed item.
        stream_interval: tokens of a choice in each streamed item; the first and the last are sent at once.
        beam_width: search for the most likely continuations with this many beams and return the `n` best; temperature
            and similar parameters then have no effect, and no output is sent before the end.
        length_penalty: in [-32, 32]; beams are compared by log-probability / length ** length_penalty.
        structured_outputs: the form that the output must have.
        extra_args: JSON values for the engine's logits processors (`vllm_xargs` over HTTP).
        feature_args: feature name -> its arguments, for features without a field here.
        thinking_token_budget: tokens of reasoning after which its end marker is forced; None or -1 for no limit. Only
            a warning for models that do not mark their reasoning.
        skip_reading_prefix_cache: compute the whole prompt, even if the KV cache has part of it.
        flat_logprobs, trace_decode_token_ids, watermarking: parameters of other engines; refused with an error that
            names an alternative.

    Raises:
        InvalidRequestError: a field is out of range; the message names it.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Annotated[list[str] | str | None, "strings"] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    bad_token_ids: list[list[int]] | None = None
    allowed_token_ids: list[int] | None = None
    repetition_detection: RepetitionDetection | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.CUMULATIVE
    beam_width: int | None = None
    length_penalty: float = 1.0
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    extra_args: dict[str, Any] | None = None
    feature_args: dict[str, Any] | None = None
    spaces_between_special_tokens: bool = True
    stream_interval: int | None = None
    skip_reading_prefix_cache: bool | None = None
    flat_logprobs: bool = False
    trace_decode_token_ids: list[int] | None = None
    watermarking: Any = None

    def __post_init__(self) -> None:
        try:
            self._check()
        except (AttributeError, TypeError):
            self._typed()  # raises InvalidRequestError for the value of a wrong type that caused the error
            raise

    def _check(self) -> None:
        self._check_numbers()
        self._check_lengths()
        self._check_stops()
        self._check_bans()
        self._check_reported()
        for name, remedy in _NOT_HERE.items():
            if value := getattr(self, name):
                raise UnsupportedError(f"{name} is not supported; {remedy}.", param=name, value=value)
        if self.greedy and self.n > 1 and self.beam_width is None:
            raise InvalidRequestError(
                f"n must be 1 when using greedy sampling, got {self.n}. Set a temperature above 0 to have choices that "
                "differ.",
                param="n",
                value=self.n,
            )

    @property
    def reports(self) -> bool:
        """Whether log-probabilities are reported with each token."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def greedy(self) -> bool:
        return self.temperature < _EPS

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a validated copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    def clone(self, **changes: Any) -> SamplingParams:
        """Return a copy with some fields changed, with all values and types validated, for parameters made by programs.

        Numbers and arrays of NumPy or torch become Python's own.
        """
        return SamplingParams(**(self._typed() | changes))

    def _typed(self) -> dict[str, Any]:
        """Return field -> value, converted to the field's type. Raise InvalidRequestError if that is impossible."""
        found = {}
        for field in _fields():
            value = getattr(self, field.name)
            try:
                found[field.name] = msgspec.convert(_plain(value, field.type), field.type)
            except msgspec.ValidationError:
                text = f"{field.name} must be {kind_in_words(field.type)}, got {value!r:.80}."
                raise InvalidRequestError(text, param=field.name) from None
        return found

    def _check_numbers(self) -> None:
        self._check_range("n", f"n must be at least 1, got {self.n}.")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check_range(name, f"{name} must be in [-2, 2], got {getattr(self, name)}.")
        value = self.repetition_penalty
        rule = "greater than zero" if not 0 < value < math.inf else "in [1e-06, 1e+06]"
        self._check_range("repetition_penalty", f"repetition_penalty must be {rule}, got {value}.")
        rule = "non-negative" if self.temperature < 0 else "in [0, 2]"
        self._check_range("temperature", f"temperature must be {rule}, got {self.temperature}.")
        self._check_range("top_p", f"top_p must be in (0, 1], got {self.top_p}.")
        self._check_range("top_k", f"top_k must be 0 (disable), or at least 1, got {self.top_k}.")
        self._check_range("min_p", f"min_p must be in [0, 1], got {self.min_p}.")
        for token, bias in (self.logit_bias or {}).items():
            _require(
                math.isfinite(bias),
                "logit_bias",
                bias,
                f"logit_bias of token {token} must be a finite number, got {bias}.",
            )

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            self._check_range("max_tokens", f"max_tokens must be at least 1, got {self.max_tokens}.")
            _require(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}.",
            )
        self._check_range("min_tokens", f"min_tokens must be greater than or equal to 0, got {self.min_tokens}.")
        for name in ("logprobs", "prompt_logprobs"):
            self._check_range(name, f"{name} must be non-negative or -1, got {getattr(self, name)}.")
        self._check_range("stream_interval", f"stream_interval must be at least 1, got {self.stream_interval}.")

    def _check_reported(self) -> None:
        count = len(self.logprob_token_ids or ())
        _require(
            count <= MAX_LOGPROB_TOKENS,
            "logprob_token_ids",
            count,
            f"Requested logprob_token_ids of length {count}, which is greater than max allowed: {MAX_LOGPROB_TOKENS}.",
        )
        _require(
            not count or self.logprobs in (None, count),
            "logprob_token_ids",
            self.logprobs,
            "When both logprobs and logprob_token_ids are set, logprobs must equal len(logprob_token_ids), which is "
            f"{count}; got logprobs={self.logprobs}. Leave logprobs out.",
        )

    def _check_range(self, name: str, message: str) -> None:
        value = getattr(self, name)
        _require(value is None or RANGES[name].holds(value), name, value, message)

    def _check_bans(self) -> None:
        words = self.bad_words or []
        _require(all(words), "bad_words", words, "bad_words cannot contain an empty string.")
        _require(
            len(words) <= MAX_BAD_WORDS,
            "bad_words",
            len(words),
            f"bad_words must have at most {MAX_BAD_WORDS} entries, got {len(words)}.",
        )
        allowed = self.allowed_token_ids
        _require(allowed is None or len(allowed) > 0, "allowed_token_ids", allowed, "allowed_token_ids is empty.")

    def _check_stops(self) -> None:
        stops = self.stop_strings
        _require(all(stops), "stop", self.stop, "stop cannot contain an empty string.")
        _require(
            self.detokenize or not stops,
            "stop",
            self.stop,
            "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
        )


@cache
def _fields() -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(SamplingParams)


def _plain(value: Any, kind: Any) -> Any:
    """Convert numbers and arrays of NumPy or torch to Python's own; `extra_args` is not converted."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, float) and value.is_integer() and kind in (int, int | None):
        return int(value)
    if isinstance(value, list | tuple | set):
        return [_plain(one, None) for one in value]
    if isinstance(value, dict) and kind == dict[int, float] | None:
        return {_plain(key, int): _plain(one, float) for key, one in value.items()}
    return value


def _require(condition: bool, param: str, value: Any, message: str) -> None:
    if not condition:
        raise InvalidRequestError(message, param=param, value=value)
