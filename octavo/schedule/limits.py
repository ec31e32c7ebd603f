"""`Limits`: what bounds a step and a request, and the check of a request against them."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.cache.cache import KVCache
from octavo.core.errors import InvalidRequestError, context_error
from octavo.core.request import GenerateRequest
from octavo.schedule.hooks import Lockstep


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a step and a request.

    Attributes:
        max_ahead: steps in flight that may hold a row of one request: the loop's depth + 1.
        num_drafts: draft tokens that the worker proposes whenever it samples. 0 for all workers there are; the toy
            device of the tests (`engine/toy.py`) drafts.
        share_prefixes: whether requests may find each other's blocks.
        watermark: part of the KV cache that stays free when a request is admitted beside running ones.
        paced_tokens: tokens of a step beyond which prompts that can wait do so, under a policy that spreads them; 0 if
            prompts never wait.
        whole_prompts: a prompt is computed in one step, as where each token sees those after it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_ahead: int = 1
    num_drafts: int = 0
    share_prefixes: bool = True
    watermark: float = 0.0
    paced_tokens: int = 0
    whole_prompts: bool = False


def checked_max_tokens(spec: GenerateRequest, cache: KVCache, limits: Limits, lockstep: Lockstep | None = None) -> int:
    """The request's `max_tokens`, resolved; refused at the door if it could never be computed to the end.

    Raises:
        InvalidRequestError: with the numbers and what to change.
    """
    if not spec.tokens:
        raise InvalidRequestError("The prompt has no tokens; send at least one.", param="prompt", value=[])
    room = limits.max_model_len - len(spec.tokens)
    if spec.prompt_only:
        return _checked_prompt(spec, room, cache, limits)
    max_tokens = room if spec.params.max_tokens is None else spec.params.max_tokens
    if max_tokens > room or room < 1:
        raise InvalidRequestError(
            context_error(limits.max_model_len, len(spec.tokens), max(max_tokens, 1)),
            param="max_tokens",
            value=spec.params.max_tokens,
        )
    need = cache.blocks_for(len(spec.tokens) + max_tokens + limits.num_drafts)
    if lockstep is not None:
        need += _checked_width(lockstep, limits) * (cache.blocks_for(max_tokens) + 1)
    if need > cache.num_blocks:
        raise InvalidRequestError(
            f"{len(spec.tokens)} prompt tokens and max_tokens={max_tokens} need {need} KV blocks, but the whole "
            f"cache has {cache.num_blocks} ({cache.num_blocks * cache.block_size} tokens). "
            "Lower max_tokens, shorten the prompt, or start the server with a larger --kv-cache-memory-bytes.",
            param="max_tokens",
            value=max_tokens,
        )
    return max_tokens


def _checked_width(lockstep: Lockstep, limits: Limits) -> int:
    """How many sequences run beside the first; all share the prompt's full blocks at least."""
    width = lockstep.width
    if width > limits.max_num_seqs:
        raise InvalidRequestError(
            f"{lockstep.param} must be at most {limits.max_num_seqs}, the sequences that run at once (--max-num-seqs), "
            f"got {width}.",
            param=lockstep.param,
            value=width,
        )
    return width - 1


def _checked_prompt(spec: GenerateRequest, room: int, cache: KVCache, limits: Limits) -> int:
    """0 tokens, for a request whose prompt fits."""
    if room < 0:
        sentence = context_error(limits.max_model_len, len(spec.tokens), field="input")
        raise InvalidRequestError(sentence, param="input")
    need = cache.blocks_for(len(spec.tokens))
    if need > cache.num_blocks:
        raise InvalidRequestError(
            f"{len(spec.tokens)} tokens need {need} KV blocks, but the whole cache has {cache.num_blocks} "
            f"({cache.num_blocks * cache.block_size} tokens). Shorten the input, or start the server with a larger "
            "--kv-cache-memory-bytes.",
            param="input",
            value=len(spec.tokens),
        )
    return 0
