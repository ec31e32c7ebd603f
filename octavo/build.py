"""The composition root of an engine core: the only file that knows every floor below it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from octavo.cache.cache import KVCache
from octavo.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.info import ModelInfo
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.core_server import PhaseTimer
from octavo.engine.loop import EngineLoop
from octavo.features import FeatureContext, build_features
from octavo.hub.files import ModelFiles
from octavo.hub.resolve import eos_token_ids, resolve
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.worker.worker import Worker

log = logging.getLogger(__name__)

OnPhase = Callable[[str, float | None], None]


def build_core(
    config: EngineConfig, files: ModelFiles, on_phase: OnPhase | None = None
) -> tuple[EngineLoop, ModelInfo]:
    """An engine core that is ready to run: weights loaded, KV cache allocated, one request computed.

    Raises:
        ConfigError: settings that can't work together or on this machine.
        ModelFileError: the model's files are not what they say they are.
    """
    timer = PhaseTimer(on_phase or (lambda name, seconds: None))
    policy = make_policy(config.scheduler.policy)
    timer.begin("setup")
    worker = Worker(config.model, config.device, files, config.cache)
    timer.begin("kernels")
    worker.prepare_kernels()
    timer.begin("weights")
    worker.load()
    timer.begin("kv cache")
    config = replace(config, scheduler=config.scheduler.settled(*worker.device.default_limits))
    num_seqs, step_tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    assert num_seqs is not None
    assert step_tokens is not None
    wanted = config.cache.memory_bytes
    cache_bytes = worker.kv_budget(num_seqs, step_tokens) if wanted is None else wanted
    num_blocks, max_model_len = _fit(config, worker, cache_bytes)
    eos = eos_token_ids(files)
    features = build_features(
        FeatureContext(
            vocab_size=worker.spec.vocab_size,
            eos_token_ids=tuple(eos),
            load_tokenizer=lambda: _tokenizer(config, files),
        )
    )
    runner = worker.make_runner(
        num_blocks=num_blocks,
        num_slots=num_seqs,
        max_model_len=max_model_len,
        max_step_tokens=step_tokens,
        hooks=[feature.worker for feature in features],
    )
    depth = worker.device.default_depth if config.scheduler.depth is None else config.scheduler.depth
    limits = Limits(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=step_tokens,
        max_model_len=max_model_len,
        max_ahead=depth + 1,
        share_prefixes=config.cache.enable_prefix_caching,
    )
    scheduler = Scheduler(
        KVCache(num_blocks, config.cache.block_size),
        limits,
        policy,
        eos_token_ids=eos,
        hooks=[feature.engine for feature in features],
        seed=config.model.seed,
    )
    loop = EngineLoop(scheduler, runner, depth)
    timer.begin("warm-up")
    _warm_up(loop)
    timer.end()
    info = ModelInfo(
        name=files.name,
        architecture=str((files.config.get("architectures") or ["unknown"])[0]),
        device=worker.device.name,
        dtype=str(worker.dtype).removeprefix("torch."),
        vocab_size=worker.spec.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=list(eos),
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        kv_bytes_per_token=worker.kv_bytes_per_token,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=step_tokens,
        memory={
            "weights": worker.weight_bytes,
            "kv_cache": num_blocks * config.cache.block_size * worker.kv_bytes_per_token,
        },
        phases=timer.seconds,
        weights=worker.weight_form,
        step_parameters=worker.step_parameters,
        step_weight_bytes=worker.step_weight_bytes,
        accelerator=worker.device.torch_device.type,
        kv_form=worker.kv_form,
        max_logprobs=config.model.max_logprobs,
        features=[feature.name for feature in features],
    )
    return loop, info


def _tokenizer(config: EngineConfig, files: ModelFiles) -> Tokenizer:
    other = config.model.tokenizer
    return load_tokenizer(files if other is None else resolve(other, tokenizer_only=True))


def _fit(config: EngineConfig, worker: Worker, cache_bytes: int) -> tuple[int, int]:
    """Blocks in the budget (never more than could be used), and the context length that they allow."""
    scheduler, block_size = config.scheduler, config.cache.block_size
    num_seqs, step_tokens = scheduler.max_num_seqs or 1, scheduler.max_num_batched_tokens or 1
    if step_tokens < num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {step_tokens} is less than --max-num-seqs "
            f"{num_seqs}, so not every running sequence could decode in each step. Raise the first or "
            "lower the second."
        )
    longest = worker.spec.max_position
    wanted = config.model.max_model_len
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the model's own maximum of {longest} positions; use at most that."
        )
    block_bytes = block_size * worker.kv_bytes_per_token
    useful = num_seqs * -(-(wanted or longest) // block_size)
    num_blocks = min(cache_bytes // block_bytes, useful)
    tokens = num_blocks * block_size
    if wanted is not None and tokens < wanted:
        need = -(-wanted // block_size) * block_bytes
        raise ConfigError(
            f"One request of --max-model-len {wanted} needs {need} bytes of KV cache, but there are {cache_bytes}. "
            f"Lower --max-model-len to {max(tokens, 1)}, raise --kv-cache-memory-bytes to {need}, or use --dtype "
            "bfloat16 if it runs in float32."
        )
    if tokens < 2 * block_size:
        raise ConfigError(
            f"The KV cache of {cache_bytes} bytes holds {tokens} tokens, which is too little to serve anything; raise "
            f"--kv-cache-memory-bytes to at least {2 * block_bytes}."
        )
    if wanted is None and tokens < longest:
        log.warning(
            "the context is limited to the %d tokens that the KV cache holds; the model allows %d", tokens, longest
        )
    return num_blocks, wanted or min(longest, tokens)


def _warm_up(loop: EngineLoop) -> None:
    """Compute one short request, so that nothing is first built or allocated under a user's eyes."""
    request = GenerateRequest(id="warm-up", tokens=[0] * 8, params=SamplingParams(max_tokens=2, temperature=0))
    loop.add(request)
    while loop.busy:
        for delta in loop.step():
            if delta.error:
                raise ConfigError(f"The model failed its first request: {delta.error}")
    loop.forget_past()
