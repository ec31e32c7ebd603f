"""The composition root of an engine core: the only file that knows every floor below it."""

from __future__ import annotations

import bisect
import logging
import os
from pathlib import Path
from typing import cast

import msgspec

from octavo.build_worker import build_worker
from octavo.cache.cache import KVCache
from octavo.config import EngineConfig
from octavo.core.cache_groups import blocks_held
from octavo.core.embeds import OPTION as PROMPT_EMBEDS
from octavo.core.errors import ConfigError
from octavo.core.info import ModelInfo
from octavo.core.memory import memory_errors
from octavo.core.params import PROCESSORS, SamplingParams
from octavo.core.pooling import OPTION as POOLING
from octavo.core.pooling import PoolerInfo, Pooling
from octavo.core.profiling import ProfileSettings, from_environment, profile_settings
from octavo.core.request import GenerateRequest
from octavo.core.worker_info import CacheSizes, LoadedFacts, WorkerFacts
from octavo.engine.executor import WorkerBuild
from octavo.engine.loop import EngineLoop
from octavo.engine.phases import OnPhase, PhaseTimer
from octavo.engine.plan_codec import PlanCodec
from octavo.engine.profile import Profiler
from octavo.engine.record import FORM, Header, Recorder
from octavo.features import FeatureContext, build_engine_halves, payload_types
from octavo.hub.files import ModelFiles
from octavo.hub.pooler import is_sentence_transformer, max_sequence_length, pooler_of
from octavo.hub.resolve import eos_token_ids
from octavo.models.encoders.registry import is_encoder
from octavo.models.overrides import check_overrides
from octavo.schedule.limits import Limits
from octavo.schedule.policy import Policy, make_policy
from octavo.schedule.scheduler import Scheduler
from octavo.version import __version__

log = logging.getLogger(__name__)


def build_core(
    config: EngineConfig,
    files: ModelFiles,
    on_phase: OnPhase | None = None,
) -> tuple[EngineLoop, ModelInfo]:
    """An engine core that is ready to run: weights loaded, KV cache allocated, one request computed.

    Raises:
        ConfigError: settings that can't work together or on this machine.
        ModelFileError: the model's files are not what they say they are.
    """
    timer = PhaseTimer(on_phase or (lambda name, seconds: None))
    profile = profile_settings(config.device.profiler_config or from_environment(os.environ))
    check_overrides(files, config.model.config_overrides)
    with memory_errors():
        return _build(config, files, timer, profile)


def _build(
    config: EngineConfig, files: ModelFiles, timer: PhaseTimer, profile: ProfileSettings | None
) -> tuple[EngineLoop, ModelInfo]:
    if is_encoder(files.config):
        _check_encoder_settings(config, files)
    policy = make_policy(config.scheduler.policy)
    timer.begin("setup")
    worker, context = build_worker(config, files)
    try:
        return _with_worker(config, files, timer, profile, policy, worker, context)
    except BaseException:
        worker.abandon()
        raise


def _with_worker(
    config: EngineConfig,
    files: ModelFiles,
    timer: PhaseTimer,
    profile: ProfileSettings | None,
    policy: Policy,
    worker: WorkerBuild,
    context: FeatureContext,
) -> tuple[EngineLoop, ModelInfo]:
    """The rest of it, once what computes is begun."""
    encodes = is_encoder(files.config)
    hooks = build_engine_halves(context)
    features = [hook.name for hook in hooks]
    tasks = _tasks(config, files, worker.facts, features)
    loaded = worker.load(timer)
    num_blocks, limits = (_encoder_sized if encodes else _sized)(config, files, worker.facts, loaded)
    port = worker.allocate(_cache_sizes(num_blocks, limits))
    scheduler = Scheduler(
        _cache(config, loaded, num_blocks, limits, keeps=not encodes),
        limits,
        policy,
        eos_token_ids=[] if encodes else eos_token_ids(files),
        hooks=hooks,
        seed=config.model.seed,
    )
    profiler = Profiler(profile, port.tracer(profile)) if profile else None
    loop = EngineLoop(scheduler, port.executor(), _depth(config, worker.facts), worker=port, profiler=profiler)
    _warm_up(loop, timer, prompt_only="generate" not in tasks)
    if config.device.record_steps is not None:
        loop.record(_recorder(config, config.device.record_steps, worker.facts, _cache_sizes(num_blocks, limits)))
    info = msgspec.structs.replace(
        _info(config, files, worker.facts, loaded, num_blocks, limits),
        eos_token_ids=[] if encodes else list(eos_token_ids(files)),
        phases=timer.seconds,
        kv_form=port.kv_form,
        features=features,
        tasks=tasks,
        pooler=_pooler(config, files, worker.facts, encodes=encodes) if "embed" in tasks else None,
        profile_dir=str(profile.folder) if profile else "",
        pid=os.getpid(),
    )
    return loop, info


def _cache(config: EngineConfig, loaded: LoadedFacts, num_blocks: int, limits: Limits, *, keeps: bool) -> KVCache:
    if not keeps:
        return KVCache(0, 1, groups=())
    in_flight = limits.max_ahead * limits.max_num_batched_tokens
    return KVCache(num_blocks, config.cache.block_size, loaded.groups, in_flight)


def _info(
    config: EngineConfig, files: ModelFiles, facts: WorkerFacts, loaded: LoadedFacts, num_blocks: int, limits: Limits
) -> ModelInfo:
    """What settings and facts say of a core; a model without a KV cache has nothing to add about one."""
    kv_bytes = loaded.kv_bytes_per_token
    cache = {"kv_cache": num_blocks * config.cache.block_size * kv_bytes} if kv_bytes else {}
    return ModelInfo(
        name=files.name,
        architecture=_architecture(files),
        device=facts.device,
        accelerator=facts.accelerator,
        dtype=facts.dtype,
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=[],
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        kv_bytes_per_token=kv_bytes * len(loaded.groups),
        kv_groups=len(loaded.groups),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        memory={"weights": loaded.weight_bytes} | cache,
        phases={},
        weights=loaded.weight_form,
        kernels=loaded.kernels,
        advice=loaded.advice,
        step_parameters=loaded.step_parameters,
        step_weight_bytes=loaded.step_weight_bytes,
        max_logprobs=config.model.max_logprobs,
        stream_interval=config.model.stream_interval,
        scheduling_policy=config.scheduler.policy,
    )


def _pooler(config: EngineConfig, files: ModelFiles, facts: WorkerFacts, *, encodes: bool) -> PoolerInfo:
    """How vectors are made; an encoder knows a way of its own."""
    override, size = config.model.pooler_config, facts.hidden_size
    if not encodes:
        return pooler_of(files, override, size=size, default="last")
    return pooler_of(files, override, size=size, default=cast("Pooling", facts.pooling), labels=facts.num_labels)


def _tasks(config: EngineConfig, files: ModelFiles, facts: WorkerFacts, features: list[str]) -> list[str]:
    """What the model is there for.

    Raises:
        ConfigError: the settings ask for something else, or for a feature that this build lacks.
    """
    if not is_encoder(files.config):
        tasks = _decoder_tasks(config, files, features)
    elif POOLING in features:
        tasks = ["embed", "token_embed", *(["classify"] if facts.num_labels else [])]
    else:
        raise ConfigError(f"{files.name} is an encoder, but this build of Octavo lacks the feature {POOLING}.")
    _check_processors(config, files, features, generates="generate" in tasks)
    _check_embeds(config, files, features, generates="generate" in tasks)
    return tasks


def _recorder(config: EngineConfig, path: str, facts: WorkerFacts, sizes: CacheSizes) -> Recorder:
    """Raises ConfigError if the settings hold what can't be in a file."""
    odd = next((one for one in config.model.logits_processors if not isinstance(one, str)), None)
    if odd is not None:
        raise ConfigError(f"logits_processors={odd!r} can't be recorded with record_steps; name it as 'module:Class'.")
    header = Header(FORM, __version__, msgspec.to_builtins(config), facts, sizes)
    return Recorder(Path(path).expanduser(), config.device.record_steps_limit, header, PlanCodec(payload_types()))


def _cache_sizes(num_blocks: int, limits: Limits) -> CacheSizes:
    return CacheSizes(
        num_blocks=num_blocks,
        num_slots=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_step_tokens=limits.max_num_batched_tokens,
    )


def _check_encoder_settings(config: EngineConfig, files: ModelFiles) -> None:
    """Refuses what only a model that generates text could follow."""
    model, cache = config.model, config.cache
    no_cache = "which has no KV cache"
    refused = (
        (model.runner == "generate", "--runner generate", "which computes embeddings and can't generate text"),
        (cache.kv_cache_dtype != "auto", f"--kv-cache-dtype {cache.kv_cache_dtype}", no_cache),
        (cache.num_blocks is not None, f"--num-gpu-blocks-override {cache.num_blocks}", no_cache),
        (model.disable_sliding_window, "--disable-sliding-window", "and the setting is for models that generate text"),
        (model.enable_sleep_mode, "--enable-sleep-mode", "which keeps its memory while it runs"),
    )
    for given, setting, why in refused:
        if given:
            raise ConfigError(
                f"{setting}: {files.name} is an encoder ({_architecture(files)}), {why}. Leave it out, or serve "
                "another model."
            )


def _encoder_sized(
    config: EngineConfig, files: ModelFiles, facts: WorkerFacts, loaded: LoadedFacts
) -> tuple[int, Limits]:
    """No blocks, and limits by which a step takes at least one prompt of full length: prompts are not divided."""
    longest = facts.max_position
    stated = _checked_length(config.model.max_model_len, longest)
    max_model_len = stated or min(longest, max_sequence_length(files) or longest)
    num_seqs, step_tokens = config.scheduler.limits(*facts.default_limits)
    limits = Limits(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(step_tokens, max_model_len),
        max_model_len=max_model_len,
        max_ahead=_depth(config, facts) + 1,
        whole_prompts=True,
    )
    return 0, limits


def _depth(config: EngineConfig, facts: WorkerFacts) -> int:
    """Steps launched ahead of the oldest unread one."""
    return facts.default_depth if config.scheduler.depth is None else config.scheduler.depth


def _decoder_tasks(config: EngineConfig, files: ModelFiles, features: list[str]) -> list[str]:
    """What a decoder is there for: text and vectors, or only vectors."""
    asked, embeds = config.model.runner, config.model.convert == "embed"
    bare = _architecture(files).endswith("Model")
    if asked == "generate" and (bare or embeds):
        why = (
            "--convert embed turns it into an embedding model"
            if embeds
            else f"{files.name} has no head that could generate text"
        )
        raise ConfigError(f"--runner generate: {why}. Leave it out.")
    only_vectors = asked == "pooling" or (asked == "auto" and (embeds or bare or is_sentence_transformer(files)))
    vectors = ["embed", "token_embed"] if POOLING in features else []
    if only_vectors and not vectors:
        raise ConfigError(f"--runner pooling: this build of Octavo lacks the feature {POOLING}.")
    return vectors if only_vectors else ["generate", *vectors]


def _check_processors(config: EngineConfig, files: ModelFiles, features: list[str], *, generates: bool) -> None:
    given = config.model.logits_processors
    if given and not generates:
        raise ConfigError(f"--logits-processors {given[0]}: {files.name} computes embeddings, not text. Leave it out.")
    if given and PROCESSORS not in features:
        raise ConfigError(f"--logits-processors {given[0]}: this build of Octavo lacks the feature {PROCESSORS}.")


def _check_embeds(config: EngineConfig, files: ModelFiles, features: list[str], *, generates: bool) -> None:
    if config.model.enable_prompt_embeds and not generates:
        raise ConfigError(f"--enable-prompt-embeds: {files.name} takes texts to compute embeddings. Leave it out.")
    if config.model.enable_prompt_embeds and PROMPT_EMBEDS not in features:
        raise ConfigError(f"--enable-prompt-embeds: this build of Octavo lacks the feature {PROMPT_EMBEDS}.")


def _architecture(files: ModelFiles) -> str:
    return str((files.config.get("architectures") or ["unknown"])[0])


def _sized(config: EngineConfig, files: ModelFiles, facts: WorkerFacts, loaded: LoadedFacts) -> tuple[int, Limits]:
    """The KV cache in blocks, and the limits of a step and a request over it.

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
    in_flight = (_depth(config, facts) + 1) * step_tokens
    num_blocks, max_model_len = _fit(config, facts, loaded, num_seqs, in_flight)
    limits = Limits(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=step_tokens,
        max_model_len=max_model_len,
        max_ahead=_depth(config, facts) + 1,
        share_prefixes=config.cache.enable_prefix_caching,
        watermark=config.scheduler.watermark,
        paced_tokens=facts.balanced_tokens,
    )
    return num_blocks, limits


def _fit(
    config: EngineConfig, facts: WorkerFacts, loaded: LoadedFacts, num_seqs: int, in_flight: int
) -> tuple[int, int]:
    """Blocks (as many as asked for, or else as fit, but no more than could be used) and the context they allow.

    Args:
        in_flight: tokens of one request that launched steps compute at most.
    """

    def held(tokens: int) -> int:
        return blocks_held(loaded.groups, tokens, block_size, in_flight)

    stated, block_size = config.cache.memory_bytes, config.cache.block_size
    longest = facts.max_position
    wanted = _checked_length(config.model.max_model_len, longest)
    block_bytes = block_size * loaded.kv_bytes_per_token
    asked = _asked_blocks(config, block_bytes)
    if asked is not None:
        cache_bytes = asked * block_bytes
    else:
        cache_bytes = loaded.kv_budget if stated is None else stated
        assert cache_bytes is not None, "a worker whose cache has no stated size says what there is room for"
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
    """The KV cache's blocks, where somebody asked for a number of them.

    Raises:
        ConfigError: they are more than the memory that was asked for as well.
    """
    asked, stated = config.cache.num_blocks, config.cache.memory_bytes
    if asked is not None and stated is not None and asked * block_bytes > stated:
        raise ConfigError(
            f"--num-gpu-blocks-override {asked} takes {asked * block_bytes} bytes, more than --kv-cache-memory-bytes "
            f"{stated}. Lower the first to {stated // block_bytes}, or leave one of them out."
        )
    return asked


def _to(asked: int | None, num_bytes: int, block_bytes: int) -> str:
    """The setting that the cache's size came from, with what would do."""
    if asked is None:
        return f"--kv-cache-memory-bytes to {num_bytes}"
    return f"--num-gpu-blocks-override to {num_bytes // block_bytes}"


def _checked_length(wanted: int | None, longest: int) -> int | None:
    """`max_model_len` as it was asked for.

    Raises:
        ConfigError: it is more than the model has positions.
    """
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the model's own maximum of {longest} positions; use at most that."
        )
    return wanted


def _warm_up(loop: EngineLoop, timer: PhaseTimer, *, prompt_only: bool) -> None:
    """Compute one short request, so that nothing is first built or allocated under a user's eyes."""
    timer.begin("warm-up")
    params = SamplingParams(max_tokens=2, temperature=0)
    request = GenerateRequest(id="warm-up", tokens=[0] * 8, params=params, prompt_only=prompt_only)
    loop.add(request)
    while loop.busy:
        for delta in loop.step():
            if delta.error:
                raise ConfigError(f"The model failed its first request: {delta.error}")
    loop.forget_past()
    timer.end()
