"""Conversion of a user's prompt to a request for the engine, with all checks that need no engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from octavo.core.errors import InvalidRequestError, UnsupportedError, context_error
from octavo.core.info import ModelInfo
from octavo.core.params import FEATURE_PARAMS, SamplingParams
from octavo.core.request import PLACEHOLDER, GenerateRequest
from octavo.text.answers.reasoning import ReasoningFormat
from octavo.text.hooks import TextContext, TextHook, load_hooks
from octavo.text.prompts.message_parts import MessageParts
from octavo.text.prompts.prompt import Prompt, parts_of
from octavo.text.tokenizers.no_tokenizer import without_text
from octavo.text.tokenizers.tokenizer import Tokenizer

Side = Literal["left", "right"]

# A normalizer may merge characters, and a token may include adjacent spaces: a prompt is refused by its length in
# characters only if it exceeds the limit by this factor.
_SLACK = 4


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request, and the text of its prompt if known."""

    request: GenerateRequest
    prompt_text: str | None


class Preparer:
    """Tokenizes prompts and checks requests against one model. Stateless; may be used from any thread.

    Args:
        reasoning: the model's marks of reasoning; None if it has none.
        max_tokens: upper limit for the `max_tokens` of every request.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: ModelInfo,
        *,
        reasoning: ReasoningFormat | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.info = info
        self.max_tokens = max_tokens
        self.hooks = load_hooks(TextContext(tokenizer, info, reasoning))
        self._claimed = {name: hook.taken_out for hook in self.hooks for name in hook.params}
        self._claimed["feature_args"] = lambda params: {"feature_args": None}

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        namespace: str = "",
        add_special_tokens: bool = True,
        truncate: int | None = None,
        side: Side = "left",
        param: str = "prompt",
        fit: bool = False,
        options: Mapping[str, msgspec.Raw] | None = None,
    ) -> Prepared:
        """Return a fully validated request, with `max_tokens` resolved.

        Args:
            request_id: a new one if None.
            add_special_tokens: False for a prompt rendered by a chat template.
            truncate: maximum number of prompt tokens to keep; -1 for as many as leave room for `max_tokens`; None
                refuses a prompt that is too long.
            side: side at which tokens are removed.
            param: the prompt's field, for errors: "prompt" or "messages".
            fit: reduce `max_tokens` to the rest of the context instead of refusing it.
            options: features' options of the request's model.

        Raises:
            InvalidRequestError: the message names the field, the value and the limit.
        """
        arrival = time.monotonic()
        if "generate" not in self.info.tasks:
            raise not_generating(self.info)
        params = self._limited(params)
        prompt, keys, read = self._read(prompt, params, param, truncated=truncate is not None)
        options = {**(options or {}), **read}
        text, tokens, salt = parts_of(prompt, param)
        if not self.tokenizer.present:
            params = without_text(params, *(name for hook in self.hooks for name in hook.text_params))
        size = self.info.vocab_size + self._added_tokens(params, options)
        room = min(params.max_tokens or 1, self.info.max_model_len - 1)
        limit = truncation(truncate, self.info.max_model_len, keep=self.info.max_model_len - room)
        if tokens is not None:
            self.check_ids(tokens, param, placeholders=bool(keys), size=size)
            tokens = cut(tokens, limit, side)
        else:
            tokens = self._tokenized(text or "", limit, side, param, add_special_tokens=add_special_tokens)
            self.check_known(tokens, param, size)
        if not tokens:
            raise _empty(param, [] if text is None else text)
        self._check_vocabulary(params, size)
        params = self._split_options(self._with_bad_tokens(params, size), text, tokens, options)
        request = GenerateRequest(
            id=request_id or uuid.uuid4().hex,
            tokens=tokens,
            keys=keys,
            params=self._with_max_tokens(params, len(tokens), param, fit=fit),
            namespace=f"{namespace}\x1f{salt}" if salt else namespace,
            priority=priority,
            tenant=tenant,
            arrival=arrival,
            options=options,
            reads_cache=not params.skip_reading_prefix_cache,
        )
        return Prepared(request, None if text is None else str(text))

    def _read(
        self, prompt: Prompt, params: SamplingParams, param: str, *, truncated: bool
    ) -> tuple[Prompt, list[int | bytes], dict[str, msgspec.Raw]]:
        """The prompt as text or token ids, its keys, and the option of the feature in whose form it was."""
        if not isinstance(prompt, Mapping) or (reader := self.reader_of(prompt)) is None:
            return prompt, [], {}
        self.check_chars(prompt.get("prompt") or "", param)
        read = reader.read_prompt(prompt, params, truncated=truncated)
        return read.prompt, read.keys, {reader.name: read.option}

    def _tokenized(
        self, text: str, limit: int | None, side: Side, param: str, *, add_special_tokens: bool
    ) -> list[int]:
        """Tokenize to at most `limit` tokens; without a limit, refuse a text that can't fit."""
        if limit is None:
            self.check_chars(text, param)
        return self.tokenizer.encode_within(text, limit=limit, side=side, add_special_tokens=add_special_tokens)[0]

    def hook(self, name: str) -> TextHook:
        """Return the text half of an existing feature."""
        return next(hook for hook in self.hooks if hook.name == name)

    def reader_of(self, prompt: Mapping[str, Any]) -> TextHook | None:
        """Return the feature whose form a prompt object has; None for text and token ids."""
        return next((h for h in self.hooks for name in h.prompt_fields if prompt.get(name) is not None), None)

    def check_parts(self, parts: MessageParts) -> None:
        """Check the parts of messages before they are rendered.

        Raises:
            InvalidRequestError: this model can't read them; see `TextHook.check_parts`.
        """
        for hook in self.hooks:
            if parts.key in hook.prompt_fields:
                hook.check_parts(parts.given)
                parts.unshown = hook.unshown

    def _split_options(
        self, params: SamplingParams, text: str | None, tokens: list[int], options: dict[str, msgspec.Raw]
    ) -> SamplingParams:
        """Add the features' options; return the parameters without those that only features read.

        Raises:
            UnsupportedError: a parameter needs a feature that is missing.
        """
        for hook in self.hooks:
            if (option := hook.option(params, text, tokens)) is not None:
                options[hook.name] = option
        changes: dict[str, Any] = {}
        odd = next((name for name in params.feature_args or () if name not in options), None)
        if odd is not None:
            raise UnsupportedError(f"This engine has no feature {odd}; leave it out.", param="feature_args", value=odd)
        for name in FEATURE_PARAMS:
            if getattr(params, name) is not None:
                if name not in self._claimed:
                    raise UnsupportedError(f"This build of Octavo has no {name}; leave it out.", param=name)
                changes |= self._claimed[name](params)
        return params.replace(**changes) if changes else params

    def check_chars(self, text: str, param: str) -> None:
        """Refuse a text that can't fit, before tokenizing it."""
        per_token = self.tokenizer.max_token_chars if len(text) > self.info.max_model_len else 0
        if len(text) > _SLACK * per_token * self.info.max_model_len > 0:
            raise self.too_long(f"at least {len(text) // per_token}", param)

    def too_long(self, count: int | str, param: str) -> InvalidRequestError:
        return InvalidRequestError(context_error(self.info.max_model_len, count, field=_field(param)), param=param)

    def _limited(self, params: SamplingParams) -> SamplingParams:
        """Apply the server's limits, regardless of the request."""
        if self.info.stream_interval > (params.stream_interval or 1):
            params = params.replace(stream_interval=self.info.stream_interval)
        most = self.max_tokens
        if most is None or (params.max_tokens is not None and params.max_tokens <= most):
            return params
        return params.replace(max_tokens=most, min_tokens=min(params.min_tokens, most))

    def _with_max_tokens(self, params: SamplingParams, num_prompt: int, param: str, *, fit: bool) -> SamplingParams:
        room = self.info.max_model_len - num_prompt
        if room < 1:
            raise self.too_long(num_prompt, param)
        if params.max_tokens is None or (fit and params.max_tokens > room):
            return params.replace(
                max_tokens=room, min_tokens=min(params.min_tokens, room) if fit else params.min_tokens
            )
        if params.max_tokens > room:
            sentence = context_error(self.info.max_model_len, num_prompt, params.max_tokens, field=_field(param))
            raise InvalidRequestError(sentence, param="max_tokens", value=params.max_tokens)
        return params

    @property
    def num_token_ids(self) -> int:
        """Return how many token ids there are for some request: the model's, and those that features add."""
        return self.info.vocab_size + max((hook.added_tokens for hook in self.hooks), default=0)

    def _added_tokens(self, params: SamplingParams, options: Mapping[str, msgspec.Raw]) -> int:
        """Return how many token ids beyond the vocabulary a request may have at most, by the features that it uses."""
        used = {*options, *(params.feature_args or ())}
        return max((hook.added_tokens for hook in self.hooks if hook.name in used), default=0)

    def check_ids(self, tokens: list[int], param: str, *, placeholders: bool = False, size: int | None = None) -> None:
        """Refuse what is no token id. `size`: of the vocabulary, by default the model's."""
        size = self.info.vocab_size if size is None else size
        for place, token in enumerate(tokens):
            if type(token) is not int:
                raise InvalidRequestError(
                    f"Token ids must be integers; at position {place} there is {token!r}.", param=param, value=token
                )
            if not 0 <= token < size and not (placeholders and token == PLACEHOLDER):
                raise InvalidRequestError(
                    f"Token id {token} at position {place} is out of vocabulary: ids go from 0 to {size - 1}.",
                    param=param,
                    value=token,
                )

    def check_known(self, tokens: list[int], param: str, size: int | None = None) -> None:
        """Refuse text with a token that the tokenizer has and the model lacks. `size`: as in `check_ids`."""
        size = self.info.vocab_size if size is None else size
        if self.tokenizer.vocab_size > size and (odd := max(tokens, default=0)) >= size:
            text = self.tokenizer.token_text(odd)
            raise InvalidRequestError(
                f"This model lacks the token {text!r} ({odd}) in the {_field(param)}: its ids go from 0 to {size - 1}. "
                "Leave it out, or serve the model with its own tokenizer (--tokenizer).",
                param=param,
                value=text,
            )

    def _check_logprobs(self, params: SamplingParams) -> None:
        limit = self.info.max_logprobs
        named = bool(params.logprob_token_ids)  # these have a separate limit
        for name, what in (("prompt_logprobs", "prompt"), *(() if named else (("logprobs", "sample"),))):
            given = getattr(params, name)
            count = self.info.vocab_size if given == -1 else given
            if count is not None and 0 <= limit < count:
                raise InvalidRequestError(
                    f"Requested {what} logprobs of {count}, which is greater than max allowed: {limit}. Ask for fewer, "
                    "or start the server with a larger --max-logprobs.",
                    param=name,
                    value=given,
                )

    def _with_bad_tokens(self, params: SamplingParams, size: int) -> SamplingParams:
        """Convert bad words to tokens: each word as given, and after a space if that gives other tokens. What has a
        token beyond a vocabulary of this size can't be generated."""
        if not params.bad_words:
            return params
        found: list[list[int]] = []
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                tokens = self.tokenizer.encode(text, add_special_tokens=False)
                if tokens and tokens not in found and max(tokens) < size:
                    found.append(tokens)
        return params.replace(bad_token_ids=found)

    def _check_vocabulary(self, params: SamplingParams, size: int) -> None:
        self._check_logprobs(params)
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            for token in getattr(params, name) or ():
                if not 0 <= token < size:
                    raise InvalidRequestError(
                        f"token_id {token} in {name} is an out-of-vocab token id. Vocabulary size: {size}, so ids go "
                        f"from 0 to {size - 1}.",
                        param=name,
                        value=token,
                    )


def truncation(given: int | None, longest: int, *, keep: int) -> int | None:
    """Return the maximum number of prompt tokens; None for no limit. `keep` is the value of -1.

    Raises:
        InvalidRequestError: `given` is neither -1 nor from 1 to `longest`.
    """
    if given is None:
        return None
    if given == -1:
        return keep
    if not 1 <= given <= longest:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 (as many as the model takes), or from 1 to {longest}, got {given}. "
            "Please request a smaller truncation size.",
            param="truncate_prompt_tokens",
            value=given,
        )
    return given


def cut(tokens: list[int], limit: int | None, side: Side) -> list[int]:
    """Return the tokens, truncated to the limit at one side; all of them without a limit."""
    if limit is None or len(tokens) <= limit:
        return tokens
    return tokens[:limit] if side == "right" else tokens[-limit:]


def not_generating(info: ModelInfo) -> UnsupportedError:
    """Return the error for a request to generate text with an embedding model."""
    return UnsupportedError(
        f"This server's model {info.name} makes embeddings and does not generate text. Use POST /v1/embeddings, "
        "/v1/score or /v1/rerank, or serve a model that generates (without --runner pooling)."
    )


def _empty(param: str, value: Any) -> InvalidRequestError:
    return InvalidRequestError(f"The {param} cannot be empty; it needs at least one token.", param=param, value=value)


def _field(param: str) -> str:
    return param if param in ("messages", "input") else "prompt"
