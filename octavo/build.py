"""The composition root of an engine core: the only file that knows every floor below it."""

from __future__ import annotations

import logging
import os
from functools import partial

import msgspec

from octavo.cache.cache import KVCache
from octavo.config import EngineConfig
from octavo.core.embeds import OPTION as PROMPT_EMBEDS
from octavo.core.errors import ConfigError
from octavo.core.info import ModelInfo
from octavo.core.memory import memory_errors
from octavo.core.params import PROCESSORS, SamplingParams
from octavo.core.pooling import OPTION as POOLING
from octavo.core.profiling import ProfileSettings, from_environment, profile_settings
from octavo.core.request import GenerateRequest
from octavo.core.structured import StructuredDefaults
from octavo.device.base import Device
from octavo.engine.loop import EngineLoop
from octavo.engine.phases import OnPhase, PhaseTimer
from octavo.engine.profile import Profiler
from octavo.features import Feature, FeatureContext, build_features
from octavo.hub.files import ModelFiles
from octavo.hub.pooler import dense_layers, is_sentence_transformer, max_sequence_length, pooler_of
from octavo.hub.resolve import eos_token_ids
from octavo.models.encoders.registry import is_encoder
from octavo.models.overrides import blamed, check_overrides
from octavo.schedule.limits import Limits
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Scheduler
from octavo.text.sources import tokenizer_files
from octavo.text.tokenizers.tokenizer import load_tokenizer
from octavo.worker.encoder.worker import EncoderWorker
from octavo.worker.sleep import WorkerSleep
from octavo.worker.tracing import TorchTracer
from octavo.worker.weights import WorkerWeights
from octavo.worker.worker import Worker

log = logging.getLogger(__name__)


def build_core(
    config: EngineConfig, files: ModelFiles, on_phase: OnPhase | None = None
) -> tuple[EngineLoop, ModelInfo]:
    """An engine core that is ready to run: weights loaded, KV cache allocated, one request computed.

    Raises:
        ConfigError: settings that can't work together or on this machine.
        ModelFileError: the model's files are not what they say they are.
    """
    timer = PhaseTimer(on_phase or (lambda name, seconds: None))
    profile = profile_settings(config.device.profiler_config or from_environment(os.environ))
    check_overrides(files, config.model.config_overrides)
    build = _build_encoder if is_encoder(files.config) else _build_decoder
    with memory_errors():
        loop, info = build(config, files, timer, profile)
    return loop, msgspec.structs.replace(info, profile_dir=str(profile.folder) if profile else "", pid=os.getpid())


def _build_decoder(
    config: EngineConfig, files: ModelFiles, timer: PhaseTimer, profile: ProfileSettings | None
) -> tuple[EngineLoop, ModelInfo]:
    """An engine core with a KV cache, for text and vectors."""
    policy = make_policy(config.scheduler.policy)
    timer.begin("setup")
    worker = Worker(config.model, config.device, files, config.cache)
    features = _features(config, files, worker)
    names = [feature.name for feature in features]
    tasks = _decoder_tasks(config, files, names)
    _check_processors(config, files, names, generates="generate" in tasks)
    _check_embeds(config, files, names, generates="generate" in tasks)
    timer.begin("kernels")
    worker.prepare_kernels()
    timer.begin("weights")
    with blamed(config.model.config_overrides):
        worker.load()
    timer.begin("kv cache")
    num_blocks, limits = _sized(config, worker)
    pooler = pooler_of(files, config.model.pooler_config, size=worker.spec.hidden_size, default="last")
    make_runner = partial(
        worker.make_runner,
        num_blocks=num_blocks,
        num_slots=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_step_tokens=limits.max_num_batched_tokens,
        hooks=[feature.worker for feature in features],
    )
    scheduler = Scheduler(
        KVCache(num_blocks, config.cache.block_size),
        limits,
        policy,
        eos_token_ids=eos_token_ids(files),
        hooks=[feature.engine for feature in features],
        seed=config.model.seed,
    )
    sleeper = WorkerSleep(worker, make_runner) if config.model.enable_sleep_mode else None
    profiler = _profiler(worker, profile)
    depth = _depth(config, worker.device)
    loop = EngineLoop(scheduler, make_runner(), depth, sleeper, profiler, WorkerWeights(worker), worker)
    _warm_up(loop, timer, prompt_only="generate" not in tasks)
    kv_bytes = worker.kv_bytes_per_token
    info = msgspec.structs.replace(
        _common_info(config, files, worker, limits, timer, names),
        eos_token_ids=list(eos_token_ids(files)),
        num_blocks=num_blocks,
        kv_bytes_per_token=kv_bytes,
        memory={"weights": worker.weight_bytes, "kv_cache": num_blocks * config.cache.block_size * kv_bytes},
        step_parameters=worker.step_parameters,
        step_weight_bytes=worker.step_weight_bytes,
        kv_form=worker.kv_form,
        kernels=worker.kernels,
        advice=worker.advice,
        tasks=tasks,
        pooler=pooler if "embed" in tasks else None,
    )
    return loop, info


def _build_encoder(
    config: EngineConfig, files: ModelFiles, timer: PhaseTimer, profile: ProfileSettings | None
) -> tuple[EngineLoop, ModelInfo]:
    """An engine core whose model keeps nothing between steps, and whose requests are over after one."""
    _check_encoder_settings(config, files)
    policy = make_policy(config.scheduler.policy)
    timer.begin("setup")
    worker = EncoderWorker(config.model, config.device, files)
    limits = _encoder_limits(config, files, worker)
    timer.begin("weights")
    with blamed(config.model.config_overrides):
        worker.load()
    spec = worker.spec
    features = _features(config, files, worker, whole_prompts=True)
    names = [feature.name for feature in features]
    _check_processors(config, files, names, generates=False)
    _check_embeds(config, files, names, generates=False)
    if POOLING not in names:
        raise ConfigError(f"{files.name} is an encoder, but this build of Octavo lacks the feature {POOLING}.")
    pooler = pooler_of(
        files, config.model.pooler_config, size=spec.hidden_size, default=spec.pooling, labels=spec.num_labels
    )
    scheduler = Scheduler(KVCache(0, 1, groups=()), limits, policy, hooks=[feature.engine for feature in features])
    runner = worker.make_runner(
        [feature.worker for feature in features],
        num_slots=limits.max_num_seqs,
        max_step_tokens=limits.max_num_batched_tokens,
    )
    profiler = _profiler(worker, profile)
    loop = EngineLoop(scheduler, runner, _depth(config, worker.device), profiler=profiler, worker=worker)
    _warm_up(loop, timer, prompt_only=True)
    info = msgspec.structs.replace(
        _common_info(config, files, worker, limits, timer, names),
        tasks=["embed", "token_embed", *(["classify"] if spec.num_labels else [])],
        pooler=pooler,
    )
    return loop, info


def _profiler(worker: Worker | EncoderWorker, settings: ProfileSettings | None) -> Profiler | None:
    return Profiler(settings, TorchTracer(worker.device.torch_device, settings)) if settings else None


def _common_info(
    config: EngineConfig,
    files: ModelFiles,
    worker: Worker | EncoderWorker,
    limits: Limits,
    timer: PhaseTimer,
    features: list[str],
) -> ModelInfo:
    """What every core says of itself; a model without a KV cache has nothing to add about one."""
    return ModelInfo(
        name=files.name,
        architecture=_architecture(files),
        device=worker.device.name,
        accelerator=worker.device.torch_device.type,
        dtype=str(worker.dtype).removeprefix("torch."),
        vocab_size=worker.spec.vocab_size,
        hidden_size=worker.spec.hidden_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=[],
        num_blocks=0,
        block_size=config.cache.block_size,
        kv_bytes_per_token=0,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        memory={"weights": worker.weight_bytes},
        phases=timer.seconds,
        weights=worker.weight_form,
        max_logprobs=config.model.max_logprobs,
        stream_interval=config.model.stream_interval,
        scheduling_policy=config.scheduler.policy,
        features=features,
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


def _encoder_limits(config: EngineConfig, files: ModelFiles, worker: EncoderWorker) -> Limits:
    """A step takes at least one prompt of full length, for prompts are not divided."""
    longest = worker.spec.max_position
    stated = _checked_length(config.model.max_model_len, longest)
    max_model_len = stated or min(longest, max_sequence_length(files) or longest)
    num_seqs, step_tokens = config.scheduler.limits(*worker.device.default_limits)
    return Limits(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(step_tokens, max_model_len),
        max_model_len=max_model_len,
        max_ahead=_depth(config, worker.device) + 1,
        whole_prompts=True,
    )


def _depth(config: EngineConfig, device: Device) -> int:
    """Steps launched ahead of the oldest unread one."""
    return device.default_depth if config.scheduler.depth is None else config.scheduler.depth


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


def _features(
    config: EngineConfig, files: ModelFiles, worker: Worker | EncoderWorker, *, whole_prompts: bool = False
) -> list[Feature]:
    num_seqs, _ = config.scheduler.limits(*worker.device.default_limits)
    return build_features(
        FeatureContext(
            vocab_size=worker.spec.vocab_size,
            eos_token_ids=tuple(eos_token_ids(files)),
            load_tokenizer=lambda: load_tokenizer(tokenizer_files(config.model, files)),
            whole_prompts=whole_prompts,
            device=str(worker.device.torch_device),
            model=str(files.path),
            max_num_seqs=num_seqs,
            dense=dense_layers(files, worker.spec.hidden_size),
            structured_outputs=StructuredDefaults.of(config.model.structured_outputs_config),
            logits_processors=config.model.logits_processors,
            prompt_embeds=config.model.enable_prompt_embeds,
        )
    )


def _architecture(files: ModelFiles) -> str:
    return str((files.config.get("architectures") or ["unknown"])[0])


def _sized(config: EngineConfig, worker: Worker) -> tuple[int, Limits]:
    """The KV cache in blocks, and the limits of a step and a request over it.

    Raises:
        ConfigError: a step has fewer tokens than sequences, or the cache is too small.
    """
    num_seqs, step_tokens = config.scheduler.limits(*worker.device.default_limits)
    if step_tokens < num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {step_tokens} is less than --max-num-seqs "
            f"{num_seqs}, so not every running sequence could decode in each step. Raise the first or "
            "lower the second."
        )
    num_blocks, max_model_len = _fit(config, worker, num_seqs, step_tokens)
    limits = Limits(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=step_tokens,
        max_model_len=max_model_len,
        max_ahead=_depth(config, worker.device) + 1,
        share_prefixes=config.cache.enable_prefix_caching,
        watermark=config.scheduler.watermark,
        paced_tokens=worker.device.balanced_tokens,
    )
    return num_blocks, limits


def _fit(config: EngineConfig, worker: Worker, num_seqs: int, step_tokens: int) -> tuple[int, int]:
    """Blocks (as many as asked for, or else as fit, but no more than could be used) and the context they allow."""
    stated, block_size = config.cache.memory_bytes, config.cache.block_size
    longest = worker.spec.max_position
    wanted = _checked_length(config.model.max_model_len, longest)
    block_bytes = block_size * worker.kv_bytes_per_token
    asked = _asked_blocks(config, block_bytes)
    if asked is not None:
        cache_bytes = asked * block_bytes
    else:
        cache_bytes = worker.kv_budget(num_seqs, step_tokens) if stated is None else stated
    num_blocks = asked or min(cache_bytes // block_bytes, max(2, num_seqs * -(-(wanted or longest) // block_size)))
    tokens = num_blocks * block_size
    if wanted is not None and tokens < wanted:
        need = -(-wanted // block_size) * block_bytes
        raise ConfigError(
            f"One request of --max-model-len {wanted} needs {need} bytes of KV cache, but there are only "
            f"{cache_bytes}. Lower --max-model-len to {max(tokens, 1)}, raise {_to(asked, need, block_bytes)}, or use "
            "--dtype bfloat16 if it runs in float32."
        )
    if tokens < 2 * block_size:
        raise ConfigError(
            f"The KV cache of {cache_bytes} bytes holds {tokens} tokens, which is too few to serve anything; raise "
            f"{_to(asked, 2 * block_bytes, block_bytes)}."
        )
    if wanted is None and tokens < longest:
        log.warning(
            "the context is limited to the %d tokens that the KV cache holds; the model allows %d", tokens, longest
        )
    if stated is not None or asked is not None:
        worker.check_cache(num_blocks * block_bytes, num_seqs, step_tokens)
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
