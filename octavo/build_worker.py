"""The composition root of a worker: a model on a device, with the worker halves of the features.

Settings are the only input, so that it also runs in a separate process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec

from octavo.build_ranks import RANK_MODULE, in_processes, rank_arguments, rank_environment
from octavo.build_sizes import steps_ahead
from octavo.config import EngineConfig
from octavo.core.cache_fit import CacheFit
from octavo.core.errors import ConfigError
from octavo.core.log import FORM
from octavo.core.worker_info import CacheSizes, LoadedFacts, RankPlace, WorkerFacts
from octavo.device.select import check_gpus
from octavo.engine.executor import WorkerBuild
from octavo.engine.multiproc import RankBuild
from octavo.engine.node import run_node
from octavo.engine.phases import PhaseTimer
from octavo.engine.plan_codec import PlanCodec
from octavo.engine.rank_group import AnyRank, RankGroup
from octavo.engine.rank_process import EarlyRanks, RankProcess
from octavo.engine.ray_nodes import BACKEND, RayNodes
from octavo.engine.remote_rank import NodeListener
from octavo.engine.ring import RingHandles
from octavo.engine.stage_memory import StageMemory
from octavo.features import FeatureContext, build_worker_halves, other_implementation, payload_types
from octavo.hub.files import ModelFiles
from octavo.hub.resolve import eos_token_ids
from octavo.hub.sentence_transformers import is_sentence_transformer
from octavo.models.encoders.registry import is_encoder
from octavo.models.feed_forwards.spec import experts_in
from octavo.models.hf_config import has_language_head
from octavo.models.implementation import OWN, Implementation
from octavo.models.overrides import blamed
from octavo.models.spec import DecoderSpec
from octavo.parallel.join import LOCAL, MeetingPoint
from octavo.text.sources import model_files, tokenizer_files
from octavo.text.tokenizers.tokenizer import load_tokenizer
from octavo.version import __version__
from octavo.worker.branches import widen
from octavo.worker.division import check_division
from octavo.worker.encoder.worker import EncoderWorker
from octavo.worker.hooks import Hooks, Reserved, WorkerHook
from octavo.worker.own_rows import check_features
from octavo.worker.port import LocalWorker
from octavo.worker.self_check import check_products
from octavo.worker.states import check_drafts
from octavo.worker.worker import Worker

_ALONE = RankPlace()
_EXPERT_ROWS = 1024
"""Target mean number of rows per expert in steps for throughput."""

StartRank = Callable[[int, RingHandles], AnyRank]


def build_worker(config: EngineConfig, files: ModelFiles, early: EarlyRanks) -> tuple[WorkerBuild, FeatureContext]:
    """Start to build a worker, in this process or another as the settings require; also return its features' context.

    Args:
        early: the processes of its ranks, as far as they have been started.

    Raises:
        ConfigError: device, dtype or attention backend can't be used here.
    """
    if config.parallel.enable_expert_parallel:
        check_experts(config, files)
    if in_processes(config):
        return begin_ranks(config, files, early)
    local = build_local(config, files)
    return local, local.context


def build_local(config: EngineConfig, files: ModelFiles) -> DecoderBuild | EncoderBuild:
    """Start to build a worker in this process."""
    return EncoderBuild(config, files) if is_encoder(files.config) else DecoderBuild(config, files)


def build_rank(config: EngineConfig, files: ModelFiles, place: RankPlace) -> DecoderBuild | EncoderBuild:
    """Start to build one rank's worker in this process, its own."""
    return build_local(config, files) if place.size == 1 else DecoderBuild(config, files, place)


def implementation_of(config: EngineConfig, files: ModelFiles) -> Implementation:
    """Return what builds this model.

    Raises:
        ConfigError: the settings ask for an implementation that can't build it.
    """
    return other_implementation(config, files) or OWN


def begin_ranks(config: EngineConfig, files: ModelFiles, early: EarlyRanks) -> tuple[RankBuild, FeatureContext]:
    """Start to build a worker in separate processes, one for each device.

    Raises:
        ConfigError: the settings can't be used with several processes or devices.
    """
    size, stages = config.parallel.num_ranks, config.parallel.pipeline_parallel_size
    backend = config.device.distributed_executor_backend
    why = f"with distributed_executor_backend={backend!r} the model runs in a separate process"
    for own in config.features.values():
        own.check_sendable(why if size == 1 else f"with {size} devices the model runs in separate processes")
    if size > 1:
        if backend != "ray":
            check_gpus(config.device.device, config.parallel.ranks_per_node, config.parallel.division)
        check_divisible(config, files)
    contexts = config.parallel.prefill_context_parallel_size
    places = (RankPlace(rank, size, stages=stages, contexts=contexts) for rank in range(size))
    answering = next(place.rank for place in places if place.answers)
    with contextlib.ExitStack() as until_started:
        kept = until_started.enter_context(contextlib.ExitStack())
        start = until_started.enter_context(_rank_starter(config, files, kept, early))
        ranks = RankGroup(size, start, config.parallel.rank_timeout_s, kept.pop_all(), answering)
    try:
        build = RankBuild(ranks, PlanCodec(payload_types()), stages)
    except BaseException:
        ranks.kill()
        raise
    return build, feature_context(config, files, build.facts)


@contextlib.contextmanager
def _rank_starter(
    config: EngineConfig, files: ModelFiles, kept: contextlib.ExitStack, early: EarlyRanks
) -> Iterator[StartRank]:
    """Yield the function that starts a rank, or admits one of another machine.

    Args:
        kept: receives what the ranks need until they end.
    """
    parallel, on_ray = config.parallel, config.device.distributed_executor_backend == "ray"
    size, stages = parallel.num_ranks, parallel.pipeline_parallel_size
    meeting = kept.enter_context(MeetingPoint()) if size > 1 else None
    host, first, listener = LOCAL, size, None
    if on_ray:
        nodes = kept.enter_context(contextlib.closing(RayNodes(size, parallel.nnodes, config.device.device)))
        parallel = dataclasses.replace(parallel, nnodes=nodes.count, node_key=secrets.token_hex(16))
        config = dataclasses.replace(config, parallel=parallel)
        listener = NodeListener(0, settings_digest(config, files), check=nodes.check)
        host, first = nodes.address, 0
        nodes.start([_ray_task(config, number, (host, listener.port)) for number in range(nodes.count)])
    elif parallel.nnodes > 1:
        listener = NodeListener(parallel.master_port, settings_digest(config, files))
        host, first = parallel.master_addr, parallel.ranks_per_node
    each = parallel.ranks_per_node

    def start(number: int, ring: RingHandles) -> AnyRank:
        place = RankPlace()
        if meeting is not None:
            contexts = parallel.prefill_context_parallel_size
            place = RankPlace(number, size, host, meeting.port, stages, each, contexts=contexts)
        if listener is None or number < first:
            return rank_process(config, files, memory, place, ring, early)
        return listener.admit(number, place, number // each, ring)

    with StageMemory() as memory, contextlib.closing(listener) if listener else contextlib.nullcontext():
        yield start


def _ray_task(config: EngineConfig, number: int, address: tuple[str, int]) -> Callable[[], int]:
    """Return what runs on a machine that Ray has reserved: the ranks of one node."""
    host, port = address
    parallel = dataclasses.replace(config.parallel, node_rank=number, master_addr=host, master_port=port)
    device = dataclasses.replace(config.device, distributed_executor_backend="mp")
    own = dataclasses.replace(config, parallel=parallel, device=device)
    return partial(serve_node, own, logging.getLogger().getEffectiveLevel())


def rank_process(
    config: EngineConfig,
    files: ModelFiles,
    memory: StageMemory,
    place: RankPlace,
    ring: RingHandles,
    early: EarlyRanks | None = None,
) -> RankProcess:
    """Start the process of a rank on this machine."""
    place = memory.give(place)
    payload = (config, files, logging.getLogger().getEffectiveLevel(), place)
    return RankProcess(
        RANK_MODULE,
        payload,
        ring,
        number=place.rank,
        prefix=f"[rank {place.rank}] ",
        environment=rank_environment(config, *place.local),
        arguments=rank_arguments(config),
        memory=place.memory,
        early=early,
    )


def serve_node(config: EngineConfig, level: int) -> int:
    """`serve_ranks` of the model that the settings name, in a process without a log of its own."""
    logging.basicConfig(level=level, format=FORM)
    return serve_ranks(config, model_files(config.model, weights=config.needs_weights))


def serve_ranks(config: EngineConfig, files: ModelFiles) -> int:
    """Run the ranks of this machine, which is not that of the engine, until the engine ends; return the exit code.

    Raises:
        ConfigError: the engine's machine can't be reached, or has other settings.
    """
    parallel = config.parallel
    if config.device.distributed_executor_backend == "ray":
        raise ConfigError(f"--node-rank {parallel.node_rank}: with {BACKEND}, Ray starts the nodes. Leave it out.")
    parallel.check()
    each = parallel.ranks_per_node
    own = range(parallel.node_rank * each, (parallel.node_rank + 1) * each)
    address = parallel.master_addr, parallel.master_port
    with StageMemory() as memory:
        return run_node(own, address, settings_digest(config, files), partial(rank_process, config, files, memory))


_SAME_ON_ALL = ("attention_backend", "enforce_eager", "disable_cascade_attn", "batch_invariant")
"""Settings of devices that ranks must share."""


def settings_digest(config: EngineConfig, files: ModelFiles) -> str:
    """Return a digest of what is equal on all machines of a model: Octavo, the model, the settings, the key.

    Paths are left out, since files may be elsewhere on each machine, and so are settings of its processors.
    """
    alike = dataclasses.replace(config.parallel, node_rank=0, master_addr="", master_port=0)
    model = dataclasses.replace(config.model, model="")
    device = [getattr(config.device, name) for name in _SAME_ON_ALL]
    features = {name: own for name, own in config.features.items() if own != type(own)()}
    data = msgspec.json.encode(
        [__version__, files.config, alike, model, device, config.cache, config.scheduler, _without_places(features)],
        order="sorted",
    )
    return blake2b(data, digest_size=16).hexdigest()


def _without_places(settings: Any) -> Any:
    """Return settings as plain values, with each string cut at its first slash."""
    plain = msgspec.to_builtins(settings, enc_hook=str)
    if isinstance(plain, dict):
        return {key: _without_places(value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_without_places(value) for value in plain]
    return plain.partition("/")[0] if isinstance(plain, str) else plain


def check_divisible(config: EngineConfig, files: ModelFiles) -> None:
    """Raise ConfigError for what runs on one device only, and for layers that the ranks can't divide."""
    if is_encoder(files.config):
        raise ConfigError(
            f"{config.parallel.division}: {files.name} is an encoder, which runs on one device. Leave it out."
        )
    spec = implementation_of(config, files).spec_of(files.config)
    if isinstance(spec, DecoderSpec):  # models of transformers are refused by the ranks
        check_division(spec, config.parallel)


def check_experts(config: EngineConfig, files: ModelFiles) -> None:
    """Raise ConfigError if there are no experts to divide, or no ranks to divide them over."""
    if config.parallel.tensor_parallel_size == 1 and not config.parallel.divides_requests:
        raise ConfigError(
            "--enable-expert-parallel divides experts over the ranks of --tensor-parallel-size, which is 1. Raise it, "
            "or --data-parallel-size, or leave the flag out."
        )
    if not any(experts_in(one) for one in getattr(OWN.spec_of(files.config), "mlps", ())):
        raise ConfigError(f"--enable-expert-parallel: {files.name} has no experts. Leave it out.")


def feature_context(config: EngineConfig, files: ModelFiles, facts: WorkerFacts) -> FeatureContext:
    """Return the context that both halves of features are built from, in any process."""
    num_seqs, _ = config.scheduler.limits(*facts.default_limits)
    return FeatureContext(
        vocab_size=facts.vocab_size,
        eos_token_ids=tuple(eos_token_ids(files)),
        load_tokenizer=lambda: load_tokenizer(tokenizer_files(config.model, files)),
        generates=not is_encoder(files.config) and generates_text(config, files),
        whole_prompts=is_encoder(files.config),
        shares_prefixes=config.cache.enable_prefix_caching,
        device=facts.torch_device,
        model=str(files.path),
        files=files,
        hidden_size=facts.hidden_size,
        num_labels=facts.num_labels,
        summary=facts.summary,
        max_num_seqs=num_seqs,
        download_dir=config.model.download_dir,
        settings=config.features,
    )


def generates_text(config: EngineConfig, files: ModelFiles) -> bool:
    """Return whether a decoder generates text, or only vectors.

    Raises:
        ConfigError: the settings require text, but the model has no language-model head.
    """
    asked, embeds = config.model.runner, config.model.convert == "embed"
    bare = not has_language_head(str((files.config.get("architectures") or ["unknown"])[0]))
    if asked == "generate" and (bare or embeds):
        why = (
            "--convert embed turns it into an embedding model"
            if embeds
            else f"{files.name} has no head that could generate text"
        )
        raise ConfigError(f"--runner generate: {why}. Leave it out.")
    if asked != "auto":
        return asked == "generate"
    return not (embeds or bare or is_sentence_transformer(files))


def offline_tokens(worker: Worker | EncoderWorker) -> int:
    """Return the default tokens of a step when only throughput matters.

    Mixtures of experts take larger steps: each step reads the weights of all experts, so more rows per expert use them
    better.
    """
    tokens = worker.device.default_limits[1]
    mixtures = [found for one in getattr(worker.spec, "mlps", ()) if (found := experts_in(one))]
    filling = max((_EXPERT_ROWS * one.num_experts // one.routing.top_k for one in mixtures), default=0)
    return min(worker.device.largest_step, max(tokens, filling // tokens * tokens))


def _facts(worker: Worker | EncoderWorker) -> WorkerFacts:
    device, spec = worker.device, worker.spec
    return WorkerFacts(
        device=device.name,
        accelerator=device.torch_device.type,
        torch_device=str(device.torch_device),
        default_depth=device.default_depth,
        default_limits=(*device.default_limits, offline_tokens(worker)),
        balanced_tokens=device.balanced_tokens,
        dtype=str(worker.dtype).removeprefix("torch."),
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        max_position=spec.max_position,
        num_labels=getattr(spec, "num_labels", 0),
        summary=getattr(spec, "summary", "last"),
    )


class DecoderBuild:
    """A `WorkerBuild` of a model with a KV cache."""

    def __init__(self, config: EngineConfig, files: ModelFiles, place: RankPlace = _ALONE) -> None:
        self._config = config
        implementation = implementation_of(config, files)
        settings = config.model, config.device, files, config.cache
        self._worker = Worker(*settings, implementation, place, config.parallel)
        self.facts = _facts(self._worker)
        self.context = feature_context(config, files, self.facts)
        self._hooks: list[WorkerHook] = []

    def load(self, timer: PhaseTimer, max_drafts: int = 0) -> LoadedFacts:
        worker, config = self._worker, self._config
        halves = build_worker_halves(self.context)
        if config.parallel.divides_requests:
            check_features(Hooks(halves))
        timer.begin("kernels")
        worker.prepare_kernels()
        widen(worker.attention, Hooks(halves).tree)
        worker.looks_ahead = Hooks(halves).looks_ahead
        timer.begin("weights")
        with blamed(config.model.config_overrides):
            worker.load(partial(self._check_cache, max_drafts))
        if not worker.device.resident:
            self._check_products()
        self._hooks = worker.hooks = [hook for hook in halves if worker.stage.last or not hook.last_stage_only]
        limits = config.step_limits(self.facts.default_limits)
        worker.reserved = sum((hook.prepare(worker, limits) for hook in self._hooks), Reserved())
        timer.begin("kv cache")
        stated = config.cache.memory_bytes is not None or config.cache.num_blocks is not None
        return LoadedFacts(
            weight_bytes=worker.weight_bytes + worker.reserved.weights,
            weight_form=worker.weight_form,
            kernels=worker.kernels,
            advice=worker.advice,
            step_parameters=worker.step_parameters,
            step_weight_bytes=worker.step_weight_bytes,
            kv_bytes_per_token=worker.kv_bytes_per_token,
            block_bytes_besides=worker.reserved.block,
            block_size=worker.block_size,
            groups=worker.cache_groups,
            kv_budget=None if stated else worker.kv_budget(*limits, max_drafts),
        )

    def _check_cache(self, max_drafts: int) -> None:
        """Raise ConfigError before the weights are loaded if the KV cache can't take back drafts, or will not hold one
        request of the set length. What features add to blocks is not known yet."""
        worker, wanted, cache = self._worker, self._config.model.max_model_len, self._config.cache
        check_drafts(worker.cache_groups, max_drafts, worker.stage, resident=worker.device.resident)
        if wanted is None:
            return
        _, step_tokens = self._config.scheduler.limits(*self.facts.default_limits)
        in_flight = (steps_ahead(self._config, self.facts) + 1) * step_tokens
        size, block = worker.block_size, worker.block_size * worker.kv_bytes_per_token
        room = worker.most_kv if cache.memory_bytes is None else cache.memory_bytes
        if cache.num_blocks is not None:
            room = cache.num_blocks * block
        CacheFit(worker.cache_groups, size, block, in_flight, room, cache.num_blocks).check(wanted)

    def allocate(self, sizes: CacheSizes) -> LocalWorker:
        worker, cache = self._worker, self._config.cache
        if cache.memory_bytes is not None or cache.num_blocks is not None:
            block_bytes = worker.block_size * worker.kv_bytes_per_token + worker.reserved.block
            size = sizes.num_blocks * block_bytes
            worker.check_cache(size, sizes.num_slots, sizes.max_step_tokens, sizes.max_drafts)
        make_runner = partial(
            worker.make_runner,
            num_blocks=sizes.num_blocks,
            num_slots=sizes.num_slots,
            max_model_len=sizes.max_model_len,
            max_step_tokens=sizes.max_step_tokens,
            max_drafts=sizes.max_drafts,
            hooks=self._hooks,
        )
        takes_turns = cache.models_on_device is not None
        can_sleep = self._config.model.enable_sleep_mode or takes_turns
        local = LocalWorker(worker, make_runner, can_sleep=can_sleep, keeps_copies=takes_turns)
        if worker.device.resident:  # its kernels are compiled by now
            self._check_products()
        return local

    def _check_products(self) -> None:
        """Raise SelfCheckError if products with packed weights are wrong."""
        settings, worker = self._config.model, self._worker
        if settings.self_check is not False and worker.model is not None and worker.load_format != "dummy":
            check_products(worker.model, worker.named_checkpoint(), everything=settings.self_check is True)

    def abandon(self) -> None:
        """Do nothing: there is no process to end."""


class EncoderBuild:
    """A `WorkerBuild` of a model that keeps nothing between steps."""

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        self._config = config
        if config.cache.cpu_offload_gb:
            raise ConfigError(
                f"--cpu-offload-gb {config.cache.cpu_offload_gb:g}: {files.name} is an encoder, whose weights stay on "
                "its device. Leave it out."
            )
        if config.device.batch_invariant:
            raise ConfigError(
                f"--batch-invariant: {files.name} is an encoder, which computes several inputs as one. Leave it out."
            )
        implementation_of(config, files)  # there is one, so this only raises for settings that ask for another
        self._worker = EncoderWorker(config.model, config.device, files)
        self.facts = _facts(self._worker)
        self.context = feature_context(config, files, self.facts)

    def load(self, timer: PhaseTimer, max_drafts: int = 0) -> LoadedFacts:
        timer.begin("weights")
        with blamed(self._config.model.config_overrides):
            self._worker.load()
        return LoadedFacts(weight_bytes=self._worker.weight_bytes, weight_form=self._worker.weight_form)

    def allocate(self, sizes: CacheSizes) -> LocalWorker:
        make_runner = partial(
            self._worker.make_runner,
            build_worker_halves(self.context),
            num_slots=sizes.num_slots,
            max_step_tokens=sizes.max_step_tokens,
        )
        return LocalWorker(self._worker, make_runner)

    def abandon(self) -> None:
        """Do nothing: there is no process to end."""
