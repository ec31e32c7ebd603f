"""Size an engine core: blocks of KV cache, and limits of steps and requests, from settings and the worker's facts."""

from __future__ import annotations

import logging

from octavo.config import EngineConfig
from octavo.core.cache_fit import CacheFit
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
    """Return the limits of an encoder: prompts are not divided, so one of full length fits a step."""
    longest = facts.max_position
    max_model_len = config.model.max_model_len or min(longest, max_sequence_length(files) or longest)
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
    stated, block_size, block_bytes = config.cache.memory_bytes, loaded.block_size, loaded.block_bytes
    longest, wanted = facts.max_position, config.model.max_model_len
    asked = _asked_blocks(config, block_bytes)
    if asked is not None:
        cache_bytes: int | None = asked * block_bytes
    else:
        cache_bytes = loaded.kv_budget if stated is None else stated
    assert cache_bytes is not None, "without a stated size the worker measures its budget"
    fit = CacheFit(loaded.groups, block_size, block_bytes, in_flight, cache_bytes, asked)
    if wanted is not None:
        fit.check(wanted)
    least = min(2 * block_size, longest)
    num_blocks = asked or min(fit.most_blocks, max(fit.held(least), num_seqs * fit.held(wanted or longest)))
    tokens = fit.longest(num_blocks, longest)
    if tokens < least:
        raise ConfigError(
            f"The KV cache of {cache_bytes} bytes holds {tokens} tokens, which is too few to serve anything; raise "
            f"{fit.setting_for(fit.held(least))}."
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
