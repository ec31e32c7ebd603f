"""Prepare and validate requests for vectors."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import cast

import msgspec

from octavo.core.errors import InvalidRequestError, OctavoError, UnsupportedError
from octavo.core.info import ModelInfo
from octavo.core.output import FinishReason, TokenDelta
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.protocol import EngineClient
from octavo.features.pooling.params import (
    Activation,
    Pooled,
    PooledOutput,
    PoolerInfo,
    PoolingSpec,
    Task,
    pooler_info,
)
from octavo.features.pooling.payload import NAME
from octavo.text.prompts.prepare import Preparer, Side, cut, truncation
from octavo.text.prompts.prompt import Prompt, parts_of
from octavo.text.tokenizers.tokenizer import Tokenizer

Pair = tuple[str, str]

_PARAMS = SamplingParams(max_tokens=1)
_WHAT: dict[str, str] = {"classify": "labels", "embed": "embeddings", "token_embed": "embeddings of tokens"}


class PoolingFailedError(OctavoError):
    """The engine could not compute the vector; the text gives the reason (HTTP 500)."""


class PoolingAbortedError(PoolingFailedError):
    """The engine ended the request before its vector was made, as for a pause or a shutdown (HTTP 503)."""


class PoolingPreparer:
    """Tokenizes and checks inputs. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo) -> None:
        self.info = info
        self._tokenizer = tokenizer
        self._checks = Preparer(tokenizer, info)
        self._info = pooler_info(info)

    def params(
        self, task: Task = "embed", *, dimensions: int | None = None, normalize: bool | None = None
    ) -> PoolingSpec:
        """Return a request's parameters, with the model's defaults filled in.

        Args:
            dimensions: elements to keep of each vector.
            normalize: whether to normalize; for "classify", whether to apply the model's activation to the head's
                outputs.

        Raises:
            InvalidRequestError: the model does not support the task, or its vectors can't be cut to that length.
        """
        pooler = self._pooler(task)
        if task == "classify":
            if dimensions is not None:
                raise InvalidRequestError(
                    "dimensions is for embeddings; leave it out.", param="dimensions", value=dimensions
                )
            activation: Activation = "none" if normalize is False else pooler.activation
            return PoolingSpec(task=task, pooling=pooler.pooling, activation=activation)
        self._check_dimensions(pooler, dimensions)
        normalize = pooler.normalize if normalize is None else normalize
        if dimensions is None and task == "embed":
            dimensions = pooler.dimensions
        return PoolingSpec(
            task=task,
            pooling=pooler.pooling,
            activation="normalize" if normalize else "none",
            dimensions=None if dimensions == pooler.size else dimensions,
        )

    def prepare(
        self,
        prompt: Prompt | Pair,
        params: PoolingSpec,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        namespace: str = "",
        add_special_tokens: bool = True,
        truncate: int | None = None,
        side: Side = "right",
        param: str = "input",
        options: Mapping[str, msgspec.Raw] | None = None,
        prompted: bool = True,
    ) -> GenerateRequest:
        """Return a request for one prompt.

        Args:
            prompt: as for generation; or two texts, for a model that reads them as one sequence.
            truncate: most tokens to keep; -1 for the model's maximum; None refuses longer prompts.
            side: end of the prompt at which to cut.
            param: name of the prompt's field, for errors.
            options: other features' options of the request's model.
            prompted: put the model's own prompt in front of a text that is embedded.

        Raises:
            InvalidRequestError: the message names the field, the value and the limit.
        """
        arrival = time.monotonic()
        longest = self.info.max_model_len
        limit = truncation(truncate, longest, keep=longest)
        salt = None
        segment = None
        if isinstance(prompt, tuple):
            tokens, types = self._encode(*prompt, limit, side, add_special_tokens, param)
            segment = types.index(1) if 1 in types else None
        else:
            text, given, salt = parts_of(prompt, param)
            if given is None:
                text = (self._prompt(params) if prompted else "") + (text or "")
                tokens, _ = self._encode(text, None, limit, side, add_special_tokens, param)
            else:
                self._check_ids(given, param)
                tokens = cut(given, limit, side)
        if not tokens:
            raise InvalidRequestError(
                f"The {param} cannot be empty; it needs at least one token.", param=param, value=prompt
            )
        if len(tokens) > self.info.max_model_len:
            error = self._checks.too_long(len(tokens), param)
            error.message += " Or let the server cut it: truncate_prompt_tokens=-1."
            raise InvalidRequestError(error.message, param=error.param, value=error.value)
        asked = msgspec.structs.replace(params, segment=segment)
        return GenerateRequest(
            id=request_id or uuid.uuid4().hex,
            tokens=tokens,
            params=_PARAMS,
            namespace=f"{namespace}\x1f{salt}" if salt else namespace,
            priority=priority,
            tenant=tenant,
            arrival=arrival,
            options={**(options or {}), NAME: msgspec.Raw(msgspec.msgpack.encode(asked))},
            prompt_only=True,
            reads_cache=self.info.num_blocks > 0 and not params.sees_all,
        )

    def _prompt(self, params: PoolingSpec) -> str:
        return self._info.prompt if self._info is not None and params.task != "classify" else ""

    def _encode(
        self,
        text: str,
        pair: str | None,
        limit: int | None,
        side: Side,
        add_special_tokens: bool,
        param: str,
    ) -> tuple[list[int], list[int]]:
        if limit is None:
            for one in (text, pair or ""):
                self._checks.check_chars(one, param)
        found = self._tokenizer.encode_within(text, pair, limit=limit, side=side, add_special_tokens=add_special_tokens)
        self._checks.check_known(found[0], param)
        return found

    def _check_ids(self, tokens: list[int], param: str) -> None:
        try:
            self._checks.check_ids(tokens, param)
        except InvalidRequestError as exc:
            raise InvalidRequestError(
                f"{exc.message} Send text, or ids of this model's own tokenizer (/tokenize gives them; LangChain's "
                "OpenAIEmbeddings sends text with check_embedding_ctx_length=False).",
                param=exc.param,
                value=exc.value,
            ) from None

    def _pooler(self, task: Task) -> PoolerInfo:
        pooler = self._info
        if pooler is not None and task in self.info.tasks:
            return pooler
        if pooler is None:
            raise UnsupportedError(
                f"Unsupported task: {task!r}. This server's model {self.info.name} makes no {_WHAT[task]}. Serve an "
                "embedding model, or this one with --runner pooling."
            )
        raise UnsupportedError(
            f"Unsupported task: {task!r}. This server's model {self.info.name} has no classification head, so it makes "
            f"no {_WHAT[task]}. Use /v1/embeddings or /v1/score, or serve a model for sequence classification."
        )

    def _check_dimensions(self, pooler: PoolerInfo, dimensions: int | None) -> None:
        if dimensions in (None, pooler.size, pooler.dimensions):
            return
        allowed = pooler.matryoshka
        if not 1 <= dimensions <= pooler.size:
            raise InvalidRequestError(
                f"dimensions must be from 1 to {pooler.size}, the size of this model's embeddings, got {dimensions}.",
                param="dimensions",
                value=dimensions,
            )
        if allowed is None:
            raise UnsupportedError(
                f"The model {self.info.name} does not support matryoshka representation: other dimensions would "
                f"lead to poor results. Leave it out, or give {pooler.size}; if the model was trained for it, start "
                "the server with --pooler-config '{\"is_matryoshka\": true}'.",
                param="dimensions",
                value=dimensions,
            )
        if allowed and dimensions not in allowed:
            raise InvalidRequestError(
                f"The model {self.info.name} supports dimensions of {', '.join(map(str, allowed))} and {pooler.size}, "
                f"got {dimensions}.",
                param="dimensions",
                value=dimensions,
            )


async def pool(engine: EngineClient, request: GenerateRequest) -> PooledOutput:
    """Compute a prepared request. Cancelling the waiting task aborts the request.

    Raises:
        InvalidRequestError: the engine can't serve it.
        PoolingFailedError: the engine failed it.
        PoolingAbortedError: the engine ended it, as for a pause or because the server shuts down.
        EngineDeadError: the engine has stopped.
    """
    stream = cast("AsyncGenerator[TokenDelta, None]", engine.generate(request))
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            if delta.finish is not None:
                return pooled_output(delta)
    raise AssertionError(f"the engine never ended request {request.id}")


def pooled_output(delta: TokenDelta) -> PooledOutput:
    """Return the result in the last update of a request.

    Raises:
        InvalidRequestError, PoolingFailedError, PoolingAbortedError: as `pool`.
    """
    if delta.finish is FinishReason.ABORT:
        raise PoolingAbortedError("The request was ended before its vector was made; send it again.")
    if delta.refused is not None:
        raise InvalidRequestError(delta.error or "The request was refused.", param=delta.refused or None)
    data = (delta.found or {}).get(NAME)
    if delta.finish is not FinishReason.STOP or data is None:
        raise PoolingFailedError(delta.error or "The engine ended the request without its vector.")
    pooled = msgspec.msgpack.decode(data, type=Pooled)
    return PooledOutput(delta.id, pooled, delta.num_cached, delta.times, delta.num_preemptions)


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors; 0 if either is zero."""
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    norms = sum(x * x for x in a) * sum(y * y for y in b)
    return dot / norms**0.5 if norms else 0.0
