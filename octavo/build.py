"""The composition root of an engine core: the only module that imports every layer below it.

Layers with torch are imported by functions, once the processes of ranks have started: these import torch, too, which
takes seconds.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from octavo.build_ranks import RANK_MODULE, in_processes, rank_arguments, rank_environments
from octavo.build_sizes import encoder_limits, sizes_of, steps_ahead
from octavo.cache.cache import KVCache
from octavo.config import EngineConfig, ParallelConfig
from octavo.core.cache_fit import check_positions
from octavo.core.cache_groups import GroupKind, blocks_held
from octavo.core.errors import ConfigError
from octavo.core.info import ModelInfo
from octavo.core.memory import memory_errors
from octavo.core.params import SamplingParams
from octavo.core.profiling import ProfileSettings, from_environment, profile_settings
from octavo.core.request import GenerateRequest
from octavo.core.worker_info import CacheSizes, LoadedFacts, WorkerFacts
from octavo.device.early import begin_context, is_cpu, without_collection
from octavo.engine.executor import WorkerBuild, WorkerPort
from octavo.engine.loop import EngineLoop
from octavo.engine.phases import OnPhase, PhaseTimer
from octavo.engine.plan_codec import PlanCodec
from octavo.engine.profile import Profiler
from octavo.engine.rank_process import EarlyRanks
from octavo.engine.record import FORM, Header, PlanRecorder
from octavo.features import FeatureContext, build_engine_halves, payload_types
from octavo.hub.files import ModelFiles
from octavo.hub.resolve import eos_token_ids
from octavo.hub.sampled import sampled_digest
from octavo.schedule.hooks import EngineHook, most_drafts
from octavo.schedule.limits import Limits
from octavo.schedule.policy import Policy, make_policy
from octavo.schedule.scheduler import Scheduler
from octavo.version import __version__

log = logging.getLogger(__name__)

OnFacts = Callable[[WorkerFacts, LoadedFacts], None]


def build_core(
    config: EngineConfig,
    files: ModelFiles,
    on_phase: OnPhase | None = None,
    on_facts: OnFacts | None = None,
) -> tuple[EngineLoop, ModelInfo]:
    """Build an engine core that is ready to run: weights loaded, KV cache allocated, one request computed.

    Args:
        on_facts: gets the worker's facts, from which the sizes of the engine follow (`sizes_of`).

    Raises:
        ConfigError: settings that can't work together or on this machine.
        ModelFileError: the model's files are damaged or contradict each other.
    """
    if (replicas := config.parallel.replicas) > 1:
        raise ConfigError(
            f"--data-parallel-size {replicas}: replicas are for octavo serve and AsyncLLM, which run engines in "
            "processes of their own. Leave it out."
        )
    config.check()
    for notice in _without_effect(config):
        log.warning("%s", notice)
    if config.parallel.node_rank:
        raise ConfigError(
            f"--node-rank {config.parallel.node_rank}: the engine runs on node 0. Start others with octavo serve."
        )
    timer = PhaseTimer(on_phase or (lambda name, seconds: None))
    profile = profile_settings(config.device.profiler_config or from_environment(os.environ))
    with memory_errors(), EarlyRanks(RANK_MODULE, rank_arguments(config), rank_environments(config)) as early:
        return _build(config, files, timer, profile, early, on_facts)


def _without_effect(config: EngineConfig) -> Iterator[str]:
    """Yield a notice for each setting that is for another device or for several."""
    device, parallel = config.device, config.parallel
    if is_cpu(device.device):
        if device.enforce_eager:
            yield "--enforce-eager has no effect on a CPU: no graphs are recorded there."
    elif device.cpu_isa != "auto":
        yield f"--cpu-isa {device.cpu_isa} has no effect on a GPU."
    if not in_processes(config) and parallel.rank_timeout_s != ParallelConfig().rank_timeout_s:
        yield f"--rank-timeout {parallel.rank_timeout_s:g} has no effect: the model is in the engine's process."


def _build(
    config: EngineConfig,
    files: ModelFiles,
    timer: PhaseTimer,
    profile: ProfileSettings | None,
    early: EarlyRanks,
    on_facts: OnFacts | None,
) -> tuple[EngineLoop, ModelInfo]:
    timer.begin("imports")
    if not in_processes(config):
        begin_context(config.device.device)
    with without_collection():
        from octavo.build_worker import build_worker, implementation_of
        from octavo.models.encoders.registry import is_encoder
        from octavo.models.overrides import check_overrides

    if config.model.config_overrides:
        check_overrides(files, config.model.config_overrides, implementation_of(config, files))
    if is_encoder(files.config):
        _check_encoder_settings(config, files)
    policy = make_policy(config.scheduler.policy, config.scheduler.tenant_weights)
    timer.begin("setup")
    worker, context = build_worker(config, files, early)
    try:
        encodes = is_encoder(files.config)
        return _with_worker(config, files, timer, profile, policy, worker, context, on_facts, encodes=encodes)
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
    on_facts: OnFacts | None,
    *,
    encodes: bool,
) -> tuple[EngineLoop, ModelInfo]:
    """Build the scheduler and the loop around a worker."""
    check_positions(config.model.max_model_len, worker.facts.max_position)
    hooks = build_engine_halves(context)
    tasks = _tasks(files, hooks, generates=context.generates)
    loaded = worker.load(timer, most_drafts(hooks))
    if on_facts is not None:
        on_facts(worker.facts, loaded)
    if encodes:
        num_blocks, limits = 0, encoder_limits(config, files, worker.facts)
    else:
        num_blocks, limits = sizes_of(config, worker.facts, loaded)
    sizes = _cache_sizes(num_blocks, limits, hooks, config.parallel.cache_ranks)
    port = worker.allocate(sizes)
    num_blocks *= config.parallel.cache_ranks
    scheduler = Scheduler(
        _cache(config, loaded, num_blocks, limits, keeps=not encodes),
        limits,
        policy,
        eos_token_ids=[] if encodes else eos_token_ids(files),
        hooks=hooks,
        seed=config.model.seed,
    )
    profiler = Profiler(profile, port.tracer(profile)) if profile else None
    executor = port.executor()
    scheduler.attach(port.call_hook)
    content = _content(config, files, worker.facts, loaded, port) if any(hook.tier for hook in hooks) else ""
    depth = steps_ahead(config, worker.facts)
    loop = EngineLoop(scheduler, executor, depth, worker=port, profiler=profiler, content=content)
    _warm_up(loop, timer, prompt_only="generate" not in tasks)
    if config.device.record_steps is not None:
        loop.record(_recorder(config, config.device.record_steps, worker.facts, sizes))
    info = msgspec.structs.replace(
        _info(config, files, worker.facts, loaded, num_blocks, limits),
        eos_token_ids=[] if encodes else list(eos_token_ids(files)),
        phases=timer.seconds,
        kv_form=port.kv_form,
        features=[hook.name for hook in hooks],
        feature_info={hook.name: hook.info for hook in hooks if hook.info is not None},
        tasks=tasks,
        profile_dir=str(profile.folder) if profile else "",
        pid=os.getpid(),
    )
    return loop, info


def _cache(config: EngineConfig, loaded: LoadedFacts, num_blocks: int, limits: Limits, *, keeps: bool) -> KVCache:
    if not keeps:
        return KVCache(0, 1, groups=())
    in_flight = limits.max_ahead * limits.max_num_batched_tokens
    return KVCache(num_blocks, loaded.block_size, loaded.groups, in_flight, config.parallel.cache_ranks)


def _content(config: EngineConfig, files: ModelFiles, facts: WorkerFacts, loaded: LoadedFacts, port: WorkerPort) -> str:
    """Return a digest of what KV pages depend on besides tokens: the model's files, the form of its cache, and which
    part of it each rank has. Copies of the files on other machines have the same."""
    dummy = config.model.load_format == "dummy"
    weights = "" if dummy else sampled_digest(files.weights)
    seed = config.model.seed if dummy else None
    form = [facts.dtype, port.kv_form, loaded.weight_form, loaded.kernels, loaded.kv_bytes_per_token, loaded.groups]
    form += [config.parallel.division, config.parallel.pipeline_layers]
    data = msgspec.json.encode(
        [files.config, weights, config.model.load_format, seed, facts.device, form], order="sorted"
    )
    return blake2b(data, digest_size=32).hexdigest()


def _info(
    config: EngineConfig, files: ModelFiles, facts: WorkerFacts, loaded: LoadedFacts, num_blocks: int, limits: Limits
) -> ModelInfo:
    """Describe the core from settings and facts; the fields that depend on its hooks are filled in later."""
    kv_bytes = loaded.kv_bytes_per_token
    cache = {"kv_cache": num_blocks * loaded.block_bytes} if kv_bytes else {}
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
        block_size=loaded.block_size,
        **_kv_facts(loaded, limits),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens * config.parallel.cache_ranks,
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


def _kv_facts(loaded: LoadedFacts, limits: Limits) -> dict[str, Any]:
    """Return the fields of `ModelInfo` that depend on the layers' caches."""
    groups, size = loaded.groups, loaded.kv_bytes_per_token
    facts = {"kv_bytes_per_token": size * sum(group.grows for group in groups), "kv_groups": len(groups)}
    if all(group.kind is GroupKind.FULL for group in groups):
        return facts
    in_flight = limits.max_ahead * limits.max_num_batched_tokens
    layer = size // max(len(group.layers) for group in groups)
    reads: Counter[int] = Counter()
    for group in groups:
        if group.grows:
            reads[group.window] += len(group.layers) * layer
    longest = blocks_held(groups, limits.max_model_len, loaded.block_size, in_flight)
    return facts | {"kv_longest": longest, "kv_reads": sorted(reads.items())}


def _tasks(files: ModelFiles, hooks: Sequence[EngineHook], *, generates: bool) -> list[str]:
    """Return the tasks that requests may use.

    Raises:
        ConfigError: the model has no task, because the feature that would give it one is missing.
    """
    tasks = [*(["generate"] if generates else []), *(task for hook in hooks for task in hook.tasks)]
    if not tasks:
        raise ConfigError(f"{files.name} is to compute vectors, and this build of Octavo lacks the feature for that.")
    return tasks


def _recorder(config: EngineConfig, path: str, facts: WorkerFacts, sizes: CacheSizes) -> PlanRecorder:
    """Return the recorder of steps; raise ConfigError if settings hold objects that can't be written to a file."""
    for own in config.features.values():
        own.check_sendable("objects can't be recorded with record_steps")
        own.check_recordable()
    header = Header(FORM, __version__, msgspec.to_builtins(config), facts, sizes)
    return PlanRecorder(Path(path).expanduser(), config.device.record_steps_limit, header, PlanCodec(payload_types()))


def _cache_sizes(num_blocks: int, limits: Limits, hooks: Sequence[EngineHook], ranks: int) -> CacheSizes:
    return CacheSizes(
        num_blocks=num_blocks,
        num_slots=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_step_tokens=limits.max_num_batched_tokens * ranks,
        max_drafts=most_drafts(hooks),
    )


def _check_encoder_settings(config: EngineConfig, files: ModelFiles) -> None:
    """Raise ConfigError for settings that apply only to models that generate text."""
    model, cache = config.model, config.cache
    no_cache = "which has no KV cache"
    refused = (
        (model.runner == "generate", "--runner generate", "which computes embeddings and can't generate text"),
        (cache.kv_cache_dtype != "auto", f"--kv-cache-dtype {cache.kv_cache_dtype}", no_cache),
        (cache.num_blocks is not None, f"--num-gpu-blocks-override {cache.num_blocks}", no_cache),
        (model.disable_sliding_window, "--disable-sliding-window", "and the setting is for models that generate text"),
        (model.enable_sleep_mode, "--enable-sleep-mode", "which keeps its memory while it runs"),
        (model.head_dtype != "auto", f"--head-dtype {model.head_dtype}", "which has no output head"),
        (
            model.activation_dtype != "int16",
            f"--activation-dtype {model.activation_dtype}",
            "which computes with unquantized weights",
        ),
    )
    for given, setting, why in refused:
        if given:
            raise ConfigError(
                f"{setting}: {files.name} is an encoder ({_architecture(files)}), {why}. Leave it out, or serve "
                "another model."
            )


def _architecture(files: ModelFiles) -> str:
    return str((files.config.get("architectures") or ["unknown"])[0])


def _warm_up(loop: EngineLoop, timer: PhaseTimer, *, prompt_only: bool) -> None:
    """Compute one short request, so that the first user does not wait for compilation and allocation."""
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
