"""Conversion of a request body to `SamplingParams`: the model's defaults, overridden by the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.core.params import OutputKind, RepetitionDetection, SamplingParams
from octavo.server.body import require
from octavo.server.context import ServerContext
from octavo.server.openai.feature_fields import FEATURE_FIELDS
from octavo.server.openai.protocol import ChatBody, CompletionBody, GenerationBody
from octavo.text.prompts.defaults import with_defaults
from octavo.text.tokenizers.no_tokenizer import needs_tokenizer, without_text

_DIRECT = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "prompt_logprobs",
    "logprob_token_ids",
    "stream_interval",
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
COMPLETION_MAX_TOKENS = 16


def chat_params(ctx: ServerContext, body: ChatBody) -> SamplingParams:
    """Return the sampling parameters of a chat request. By default, the answer may fill the context.

    Raises:
        InvalidRequestError: a value is out of range; `param` is the field's name in the request.
    """
    limit = body.max_tokens
    if body.max_completion_tokens is not None:
        limit = body.max_completion_tokens
        require(limit >= 1, "max_completion_tokens", limit, f"max_completion_tokens must be at least 1, got {limit}.")
    info = ctx.frontend.info
    _check_named(body, told=body.logprobs is True)
    logprobs = None if body.logprob_token_ids else _chat_logprobs(body, info.max_logprobs, info.vocab_size)
    return _params(ctx, body, limit, logprobs)


def completion_params(
    ctx: ServerContext, body: CompletionBody, *, defaults: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Return the sampling parameters of a text completion request.

    Args:
        defaults: for missing fields; None for the model's.

    Raises:
        InvalidRequestError: a value is out of range; `param` is the field's name in the request.
    """
    limit = body.max_tokens if "max_tokens" in body.model_fields_set else COMPLETION_MAX_TOKENS
    limit = 1 if body.only_echo else limit
    _check_best_of(body)
    _check_named(body, told=body.logprobs is not None)
    params = _params(ctx, body, limit, None if body.logprob_token_ids else body.logprobs, defaults)
    if body.detokenize and not ctx.frontend.tokenizer.present:
        raise needs_tokenizer("detokenize", value=True)
    if body.detokenize is False:
        require(not body.echo, "detokenize", False, "echo is text and can't be combined with detokenize: false.")
        params = params.replace(detokenize=False) if ctx.frontend.tokenizer.present else without_text(params)
    if body.choices > body.answered and not params.reports:
        params = params.replace(logprobs=0)  # needed to rank the choices
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = params.replace(prompt_logprobs=body.logprobs)
    return params


def _check_best_of(body: CompletionBody) -> None:
    best_of = body.best_of
    if best_of is None:
        return
    n = body.answered
    require(best_of >= n, "best_of", best_of, f"best_of must be at least n, which is {n}, got {best_of}.")
    plain = best_of == n or not body.streamed
    require(plain, "best_of", best_of, "best_of can't be streamed: the best is known only at the end.")


def _check_named(body: GenerationBody, *, told: bool) -> None:
    """Check the tokens whose log-probabilities are requested by id."""
    require(
        told or body.logprob_token_ids is None,
        "logprob_token_ids",
        body.logprob_token_ids,
        "when using `logprob_token_ids`, `logprobs` must be set; set it (in a chat to true) or leave these out.",
    )


def _chat_logprobs(body: ChatBody, most: int, vocab_size: int) -> int | None:
    top = body.top_logprobs
    if top is not None:
        limit = most if most >= 0 else vocab_size
        in_range = 0 <= (vocab_size if top == -1 else top) <= limit
        require(in_range, "top_logprobs", top, f"top_logprobs must be in [0, {limit}], got {top}.")
        require(
            top == 0 or body.logprobs is True,
            "top_logprobs",
            top,
            "top_logprobs needs logprobs to be true; set it or leave top_logprobs out.",
        )
    return (top or 0) if body.logprobs else None


def _params(
    ctx: ServerContext,
    body: GenerationBody,
    max_tokens: int | None,
    logprobs: int | None,
    defaults: Mapping[str, Any] | None = None,
) -> SamplingParams:
    _check_limits(ctx, body)
    given: dict[str, Any] = {name: value for name in _DIRECT if (value := getattr(body, name)) is not None}
    given["output_kind"] = OutputKind.DELTA if body.streamed else OutputKind.FINAL_ONLY
    try:
        given |= feature_params(ctx, body)
        if body.repetition_detection is not None:
            given["repetition_detection"] = RepetitionDetection(**body.repetition_detection.model_dump())
        elif "repetition_detection" in body.model_fields_set:
            given["repetition_detection"] = None  # turns off the model's default
        defaults = ctx.frontend.default_sampling if defaults is None else defaults
        limit = defaults.get("max_tokens") if max_tokens is None else max_tokens
        given |= {"n": body.choices, "max_tokens": limit, "logprobs": logprobs}
        return with_defaults(defaults, given)
    except OverflowError:
        raise InvalidRequestError("A number in the request is too large.") from None


def feature_params(ctx: ServerContext, body: GenerationBody) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that features read from the body.

    Raises:
        InvalidRequestError: a field is invalid.
        UnsupportedError: a field is for a feature that this build lacks.
    """
    hooks = ctx.frontend.preparer.hooks
    claimed = {name for hook in hooks for name in hook.body_fields}
    for name in FEATURE_FIELDS & body.model_fields_set - claimed:
        value = getattr(body, name)
        if value and getattr(value, "type", None) != "text":  # as in response_format
            raise UnsupportedError(f"This build of Octavo has no {name}; leave it out.", param=name, value=value)
    found: dict[str, Any] = {}
    args: dict[str, Any] = {}
    for hook in hooks:
        made = hook.params_of(body, max_bytes=ctx.config.max_schema_bytes)
        if made and hook.name in ctx.options:
            field = next(name for name in hook.body_fields if getattr(body, name, None) is not None)
            text = f"{field} can't be combined with the model `{ctx.model}`; leave it out or name another model."
            raise InvalidRequestError(text, param=field, value=getattr(body, field))
        args |= made.pop("feature_args", {})
        found |= made
    return found | ({"feature_args": args} if args else {})


def _check_limits(ctx: ServerContext, body: GenerationBody) -> None:
    config = ctx.config
    n, stops, most = body.choices, body.stop or [], ctx.frontend.info.vocab_size
    name = "n" if n == body.n else "best_of"
    require(
        n <= config.max_n,
        name,
        n,
        f"{name} must be at most {config.max_n}, got {n}. Ask several times, or start the server with a larger "
        "--max-n.",
    )
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):  # before each of them is looked at
        size = len(getattr(body, name) or ())
        require(size <= most, name, size, f"{name} must have at most {most} entries, a token each, got {size}.")
    require(
        len(stops) <= config.max_stop_strings,
        "stop",
        stops,
        f"stop must have at most {config.max_stop_strings} strings, got {len(stops)}. Send fewer, or start the server "
        "with a larger --max-stop-strings.",
    )
    if body.prompt_logprobs is not None and body.streamed:
        raise InvalidRequestError(
            "prompt_logprobs are not available when stream is true; ask for one of the two.",
            param="prompt_logprobs",
            value=body.prompt_logprobs,
        )
    if body.stream_options is not None and not body.streamed:
        raise InvalidRequestError(
            "stream_options is only allowed when stream is true; set stream or leave stream_options out.",
            param="stream_options",
            value=body.stream_options.model_dump(exclude_none=True),
        )
