"""`Limits`: the bounds of a step and of a request, and the check of a request against them."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.cache.cache import KVCache
from octavo.core.errors import InvalidRequestError, context_error
from octavo.core.request import GenerateRequest
from octavo.schedule.hooks import Lockstep


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a step and of a request.

    Attributes:
        max_num_batched_tokens: tokens of a step; of each rank, if ranks have requests of their own (`KVCache.ranks`).
        max_ahead: steps in flight that may hold a row of one request: the loop's depth + 1.
        share_prefixes: whether requests may reuse each other's blocks.
        watermark: fraction of the KV cache (0 to 1) kept free when a request is admitted while others run.
        paced_tokens: under a policy that spreads prompts, prompts that can wait are not added to a step beyond this
            many tokens; 0 if prompts never wait.
        whole_prompts: compute each prompt in one step, as bidirectional attention requires.
        turns: steps that the running requests are divided over. With more than one, a request is not planned while a
            token of it is being sampled, so that several steps, each of other requests, can be computed at once.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_ahead: int = 1
    share_prefixes: bool = True
    watermark: float = 0.0
    paced_tokens: int = 0
    whole_prompts: bool = False
    turns: int = 1


def checked_max_tokens(
    spec: GenerateRequest, cache: KVCache, limits: Limits, lockstep: Lockstep | None = None, held: int = 0
) -> int:
    """Return the request's `max_tokens`, resolved to a number. `held`: blocks that features hold while it runs.

    Raises:
        InvalidRequestError: the request can never be computed to its end; the text has the numbers and the remedy.
    """
    if not spec.tokens:
        raise InvalidRequestError("The prompt has no tokens; send at least one.", param="prompt", value=[])
    _check_unbroken(spec, limits)
    room = limits.max_model_len - len(spec.tokens)
    if spec.prompt_only:
        return _checked_prompt(spec, room, cache, limits, held)
    max_tokens = room if spec.params.max_tokens is None else spec.params.max_tokens
    if max_tokens > room or room < 1:
        raise InvalidRequestError(
            context_error(limits.max_model_len, len(spec.tokens), max(max_tokens, 1)),
            param="max_tokens",
            value=spec.params.max_tokens,
        )
    need = cache.blocks_for(len(spec.tokens) + max_tokens)
    if lockstep is not None:
        need += _checked_width(lockstep, limits) * (cache.blocks_for(max_tokens) + 1)
    if need + held > cache.num_usable:
        raise InvalidRequestError(
            f"{len(spec.tokens)} prompt tokens and max_tokens={max_tokens} need {_blocks(need, held)}, but "
            f"{_room(cache, limits)}. Lower max_tokens, shorten the prompt, or start the server with a larger "
            "--kv-cache-memory-bytes.",
            param="max_tokens",
            value=max_tokens,
        )
    return max_tokens


def _check_unbroken(spec: GenerateRequest, limits: Limits) -> None:
    longest = max((end - start for start, end in spec.unbroken), default=0)
    if longest > limits.max_num_batched_tokens:
        raise InvalidRequestError(
            f"The prompt has {longest} tokens that must be computed in one step, such as those of an image, and a step "
            f"has at most {limits.max_num_batched_tokens}. Start the server with --max-num-batched-tokens {longest} or "
            "more.",
            param="prompt",
            value=longest,
        )


def _checked_width(lockstep: Lockstep, limits: Limits) -> int:
    """Return the number of sequences after the first. All share at least the prompt's full blocks."""
    width = lockstep.width
    if width > limits.max_num_seqs:
        raise InvalidRequestError(
            f"{lockstep.param} must be at most {limits.max_num_seqs}, the sequences that run at once (--max-num-seqs), "
            f"got {width}.",
            param=lockstep.param,
            value=width,
        )
    return width - 1


def _blocks(need: int, held: int) -> str:
    return f"{need} KV blocks" + (f" and {held} for what its features load" if held else "")


def _room(cache: KVCache, limits: Limits) -> str:
    whole = "the whole cache" if cache.ranks == 1 else "the cache of a rank"
    return f"{whole} has {cache.num_usable} ({cache.longest(limits.max_model_len)} tokens)"


def _checked_prompt(spec: GenerateRequest, room: int, cache: KVCache, limits: Limits, held: int) -> int:
    """Check that the prompt fits; return 0, the tokens to sample."""
    if room < 0:
        sentence = context_error(limits.max_model_len, len(spec.tokens), field="input")
        raise InvalidRequestError(sentence, param="input")
    need = cache.blocks_for(len(spec.tokens))
    if need + held > cache.num_usable:
        raise InvalidRequestError(
            f"{len(spec.tokens)} tokens need {_blocks(need, held)}, but {_room(cache, limits)}. Shorten the input, or "
            "start the server with a larger --kv-cache-memory-bytes.",
            param="input",
            value=len(spec.tokens),
        )
    return 0
