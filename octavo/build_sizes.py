"""Size an engine core: blocks of KV cache, and limits of steps and requests, from settings and the worker's facts."""

from __future__ import annotations

import bisect
import logging

from octavo.config import EngineConfig
from octavo.core.cache_groups import blocks_held
from octavo.core.errors import ConfigError
from octavo.core.worker_info import LoadedFacts, WorkerFacts
from octavo.hub.files import ModelFiles
from octavo.hub.sentence_transformers import max_sequence_length
from octavo.schedule.limits import Limits

log = logging.getLogger(__name__)


def sizes_of(config: EngineConfig, facts: WorkerFacts, loaded: LoadedFacts) -> tuple[int, Limits]:
    """Return the KV cache's size in blocks, and the limits of steps and requests.

    Raises:
        ConfigError: a step has fewer tokens than sequences, or the cache is too small.
    """
    num_seqs, step_tokens = config.scheduler.limits(*facts.default_limits)
    if step_tokens < num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {step_tokens} is less than --max-num-seqs "
            f"{num_seqs}, so not every running sequence could decode in each step. Raise the first or "
            "lower the second."
        )
    max_ahead = steps_ahead(config, facts) + 1
    num_blocks, max_model_len = _fit(config, facts, loaded, num_seqs, max_ahead * step_tokens)
    limits = Limits(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=step_tokens,
        max_model_len=max_model_len,
        max_ahead=max_ahead,
        share_prefixes=config.cache.enable_prefix_caching,
        watermark=config.scheduler.watermark,
        paced_tokens=facts.balanced_tokens,
        turns=max_ahead if config.parallel.pipeline_parallel_size > 1 else 1,
    )
    return num_blocks, limits


def encoder_limits(config: EngineConfig, files: ModelFiles, facts: WorkerFacts) -> Limits:
    """Return the limits of an encoder: prompts are not divided, so one of full length fits a step.

    Raises:
        ConfigError: `max_model_len` exceeds the model's positions.
    """
    longest = facts.max_position
    stated = _checked_length(config.model.max_model_len, longest)
    max_model_len = stated or min(longest, max_sequence_length(files) or longest)
    num_seqs, step_tokens = config.scheduler.limits(*facts.default_limits)
    return Limits(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(step_tokens, max_model_len),
        max_model_len=max_model_len,
        max_ahead=steps_ahead(config, facts) + 1,
        whole_prompts=True,
    )


def steps_ahead(config: EngineConfig, facts: WorkerFacts) -> int:
    """Return the number of steps launched ahead of the oldest unread one."""
    depth = facts.default_depth if config.scheduler.depth is None else config.scheduler.depth
    return depth + config.parallel.pipeline_parallel_size - 1


def _fit(
    config: EngineConfig, facts: WorkerFacts, loaded: LoadedFacts, num_seqs: int, in_flight: int
) -> tuple[int, int]:
    """Return the number of blocks (as set, or else as fit and could be used) and the context they allow, in tokens.

    Args:
        in_flight: most tokens of one request in launched steps.
    """

    def held(tokens: int) -> int:
        return blocks_held(loaded.groups, tokens, block_size, in_flight)

    stated, block_size = config.cache.memory_bytes, loaded.block_size
    longest = facts.max_position
    wanted = _checked_length(config.model.max_model_len, longest)
    block_bytes = loaded.block_bytes
    asked = _asked_blocks(config, block_bytes)
    if asked is not None:
        cache_bytes: int | None = asked * block_bytes
    else:
        cache_bytes = loaded.kv_budget if stated is None else stated
    assert cache_bytes is not None, "without a stated size the worker measures its budget"
    num_blocks = asked or min(cache_bytes // block_bytes, max(held(2 * block_size), num_seqs * held(wanted or longest)))
    tokens = bisect.bisect_right(range(longest + 1), num_blocks, key=held) - 1
    if wanted is not None and tokens < wanted:
        need = held(wanted) * block_bytes
        raise ConfigError(
            f"One request of --max-model-len {wanted} needs {need} bytes of KV cache, but there are only "
            f"{cache_bytes}. Lower --max-model-len to {max(tokens, 1)}, raise {_to(asked, need, block_bytes)}, or use "
            "--dtype bfloat16 if it runs in float32."
        )
    if tokens < 2 * block_size:
        raise ConfigError(
            f"The KV cache of {cache_bytes} bytes holds {tokens} tokens, which is too few to serve anything; raise "
            f"{_to(asked, held(2 * block_size) * block_bytes, block_bytes)}."
        )
    if wanted is None and tokens < longest:
        log.warning(
            "the context is limited to the %d tokens that the KV cache holds; the model allows %d", tokens, longest
        )
    return num_blocks, wanted or min(longest, tokens)


def _asked_blocks(config: EngineConfig, block_bytes: int) -> int | None:
    """Return the set number of blocks, or None.

    Raises:
        ConfigError: they exceed the set memory.
    """
    asked, stated = config.cache.num_blocks, config.cache.memory_bytes
    if asked is not None and stated is not None and asked * block_bytes > stated:
        raise ConfigError(
            f"--num-gpu-blocks-override {asked} takes {asked * block_bytes} bytes, more than --kv-cache-memory-bytes "
            f"{stated}. Lower the first to {stated // block_bytes}, or leave one of them out."
        )
    return asked


def _to(asked: int | None, num_bytes: int, block_bytes: int) -> str:
    """Return the setting that sized the cache, with a sufficient value."""
    if asked is None:
        return f"--kv-cache-memory-bytes to {num_bytes}"
    return f"--num-gpu-blocks-override to {num_bytes // block_bytes}"


def _checked_length(wanted: int | None, longest: int) -> int | None:
    """Return the set `max_model_len`, or None.

    Raises:
        ConfigError: it exceeds the model's positions.
    """
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the model's own maximum of {longest} positions; use at most that."
        )
    return wanted
