"""The composition root of an engine core: the only file that knows every floor below it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from octavo.cache.cache import KVCache
from octavo.cache.no_cache import NoCache
from octavo.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.info import ModelInfo
from octavo.core.params import PROCESSORS, SamplingParams
from octavo.core.pooling import OPTION, DenseLayer
from octavo.core.request import GenerateRequest
from octavo.engine.core_server import PhaseTimer
from octavo.engine.loop import EngineLoop
from octavo.features import FeatureContext, build_features
from octavo.hub.files import ModelFiles
from octavo.hub.pooler import dense_layers, is_sentence_transformer, max_sequence_length, pooler_of
from octavo.hub.resolve import eos_token_ids, resolve
from octavo.models.encoders.registry import is_encoder
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.worker.encoder.worker import EncoderWorker
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
    if is_encoder(files.config):
        return _build_encoder(config, files, timer)
    policy = make_policy(config.scheduler.policy)
    timer.begin("setup")
    worker = Worker(config.model, config.device, files, config.cache)
    num_seqs, step_tokens = config.scheduler.limits(*worker.device.default_limits)
    device = str(worker.device.torch_device)
    dense = dense_layers(files, worker.spec.hidden_size)
    features = build_features(
        _context(config, files, worker.spec.vocab_size, device=device, max_num_seqs=num_seqs, dense=dense)
    )
    names = [feature.name for feature in features]
    tasks = _decoder_tasks(config, files, names)
    _check_processors(config, files, names, generates="generate" in tasks)
    timer.begin("kernels")
    worker.prepare_kernels()
    timer.begin("weights")
    worker.load()
    timer.begin("kv cache")
    wanted = config.cache.memory_bytes
    cache_bytes = worker.kv_budget(num_seqs, step_tokens) if wanted is None else wanted
    num_blocks, max_model_len = _fit(config, worker, cache_bytes, num_seqs, step_tokens)
    eos = eos_token_ids(files)
    pooler = pooler_of(files, config.model.pooler_config, size=worker.spec.hidden_size, default="last")
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
    _warm_up(loop, prompt_only="generate" not in tasks)
    timer.end()
    info = ModelInfo(
        name=files.name,
        architecture=_architecture(files),
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
        stream_interval=config.model.stream_interval,
        features=names,
        tasks=tasks,
        pooler=pooler if "embed" in tasks else None,
    )
    return loop, info


def _build_encoder(config: EngineConfig, files: ModelFiles, timer: PhaseTimer) -> tuple[EngineLoop, ModelInfo]:
    """An engine core whose model keeps nothing between steps, and whose requests are over after one."""
    if config.model.runner == "generate":
        raise ConfigError(
            f"--runner generate: {files.name} is an encoder ({_architecture(files)}), which makes vectors and can't "
            "generate text. Leave it out, or serve another model."
        )
    if config.cache.kv_cache_dtype != "auto":
        raise ConfigError(
            f"--kv-cache-dtype {config.cache.kv_cache_dtype}: {files.name} is an encoder ({_architecture(files)}), "
            "which has no KV cache. Leave it out."
        )
    policy = make_policy(config.scheduler.policy)
    timer.begin("setup")
    worker = EncoderWorker(config.model, config.device, files)
    spec = worker.spec
    timer.begin("weights")
    worker.load()
    stated = config.model.max_model_len
    max_model_len = _checked_length(stated, spec.max_position) or min(
        spec.max_position, max_sequence_length(files) or spec.max_position
    )
    device, dense = str(worker.device.torch_device), dense_layers(files, spec.hidden_size)
    features = build_features(_context(config, files, spec.vocab_size, whole_prompts=True, device=device, dense=dense))
    names = [feature.name for feature in features]
    _check_processors(config, files, names, generates=False)
    if OPTION not in names:
        raise ConfigError(f"{files.name} is an encoder, but this build of Octavo lacks the feature {OPTION}.")
    pooler = pooler_of(
        files, config.model.pooler_config, size=spec.hidden_size, default=spec.pooling, labels=spec.num_labels
    )
    runner = worker.make_runner([feature.worker for feature in features])
    depth = worker.device.default_depth if config.scheduler.depth is None else config.scheduler.depth
    num_seqs, step_tokens = config.scheduler.limits(*worker.device.default_limits)
    max_step_tokens = max(step_tokens, max_model_len)
    limits = Limits(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max_step_tokens,
        max_model_len=max_model_len,
        max_ahead=depth + 1,
        whole_prompts=True,
    )
    scheduler = Scheduler(NoCache(), limits, policy, hooks=[feature.engine for feature in features])
    loop = EngineLoop(scheduler, runner, depth)
    timer.begin("warm-up")
    _warm_up(loop, prompt_only=True)
    timer.end()
    info = ModelInfo(
        name=files.name,
        architecture=_architecture(files),
        device=worker.device.name,
        dtype=worker.weight_form,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=[],
        num_blocks=0,
        block_size=config.cache.block_size,
        kv_bytes_per_token=0,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max_step_tokens,
        memory={"weights": worker.weight_bytes},
        phases=timer.seconds,
        weights=worker.weight_form,
        features=names,
        tasks=["embed", "token_embed"] if not spec.num_labels else ["embed", "token_embed", "classify"],
        pooler=pooler,
    )
    return loop, info


def _decoder_tasks(config: EngineConfig, files: ModelFiles, features: list[str]) -> list[str]:
    """What a decoder is there for: text and vectors, or only vectors."""
    asked, embeds = config.model.runner, config.model.convert == "embed"
    bare = _architecture(files).endswith("Model")
    if asked == "generate" and (bare or embeds):
        why = "--convert embed makes vectors of it" if embeds else f"{files.name} has no head that could generate text"
        raise ConfigError(f"--runner generate: {why}. Leave it out.")
    only_vectors = asked == "pooling" or (asked == "auto" and (embeds or bare or is_sentence_transformer(files)))
    vectors = ["embed", "token_embed"] if OPTION in features else []
    if only_vectors and not vectors:
        raise ConfigError(f"--runner pooling: this build of Octavo lacks the feature {OPTION}.")
    return vectors if only_vectors else ["generate", *vectors]


def _check_processors(config: EngineConfig, files: ModelFiles, features: list[str], *, generates: bool) -> None:
    given = config.model.logits_processors
    if given and not generates:
        raise ConfigError(f"--logits-processors {given[0]}: {files.name} makes vectors, not text. Leave it out.")
    if given and PROCESSORS not in features:
        raise ConfigError(f"--logits-processors {given[0]}: this build of Octavo lacks the feature {PROCESSORS}.")


def _context(
    config: EngineConfig,
    files: ModelFiles,
    vocab_size: int,
    *,
    whole_prompts: bool = False,
    device: str,
    dense: tuple[DenseLayer, ...],
    max_num_seqs: int = 0,
) -> FeatureContext:
    return FeatureContext(
        vocab_size=vocab_size,
        eos_token_ids=tuple(eos_token_ids(files)),
        load_tokenizer=lambda: _tokenizer(config, files),
        whole_prompts=whole_prompts,
        device=device,
        model=str(files.path),
        max_num_seqs=max_num_seqs,
        dense=dense,
        logits_processors=config.model.logits_processors,
    )


def _architecture(files: ModelFiles) -> str:
    return str((files.config.get("architectures") or ["unknown"])[0])


def _tokenizer(config: EngineConfig, files: ModelFiles) -> Tokenizer:
    other = config.model.tokenizer
    return load_tokenizer(files if other is None else resolve(other, tokenizer_only=True))


def _fit(config: EngineConfig, worker: Worker, cache_bytes: int, num_seqs: int, step_tokens: int) -> tuple[int, int]:
    """Blocks in the budget (never more than could be used), and the context length that they allow."""
    block_size = config.cache.block_size
    if step_tokens < num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {step_tokens} is less than --max-num-seqs "
            f"{num_seqs}, so not every running sequence could decode in each step. Raise the first or "
            "lower the second."
        )
    longest = worker.spec.max_position
    wanted = _checked_length(config.model.max_model_len, longest)
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


def _warm_up(loop: EngineLoop, *, prompt_only: bool) -> None:
    """Compute one short request, so that nothing is first built or allocated under a user's eyes."""
    params = SamplingParams(max_tokens=2, temperature=0)
    request = GenerateRequest(id="warm-up", tokens=[0] * 8, params=params, prompt_only=prompt_only)
    loop.add(request)
    while loop.busy:
        for delta in loop.step():
            if delta.error:
                raise ConfigError(f"The model failed its first request: {delta.error}")
    loop.forget_past()
