"""`Worker`: the model on one device, from its files to a `Runner`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from octavo.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig
from octavo.core.cache_groups import CacheGroup, groups_of
from octavo.core.errors import ConfigError, UnsupportedError
from octavo.core.worker_info import RankPlace
from octavo.device import host
from octavo.device.base import Device
from octavo.device.select import select_device
from octavo.hub.files import ModelFiles
from octavo.hub.text_config import stored_dtype
from octavo.models.hf_config import Config
from octavo.models.implementation import OWN, Implementation
from octavo.models.load import open_checkpoint
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.quantized.table import has_input_scales
from octavo.models.load.weights import Placed, load_weights, plain_bytes, replace_weights, wanted_bytes
from octavo.models.model import LayeredModel, Model, ModelSpec, compiled
from octavo.models.native import NativeDecoder, reason_against
from octavo.models.spec import DecoderSpec
from octavo.models.stages import own_groups, take_stage
from octavo.native.isa import activation_advice
from octavo.native.needs import needed_libraries
from octavo.nn.attention.base import FusedBackend
from octavo.nn.attention.kv_dtype import is_fp8, kv_dtype, name_of
from octavo.nn.attention.native import NativeBackend
from octavo.nn.build import Build
from octavo.nn.cached import CachedLayer
from octavo.nn.pages import LargePages
from octavo.nn.quant.base import Schemes
from octavo.nn.row_exchange import RowExchange
from octavo.nn.state import StateCache
from octavo.nn.weights import Keep, WeightLayer, fused
from octavo.parallel.join import join
from octavo.parallel.mesh import ALONE, Mesh
from octavo.parallel.stage import Stage
from octavo.worker import states
from octavo.worker.attention import choose_attention, common_page, kinds_of, own_shapes
from octavo.worker.blocks import Blocks
from octavo.worker.branches import branches_of
from octavo.worker.context_parallel import forward_of
from octavo.worker.division import with_experts
from octavo.worker.hooks import Capacity, Hooks, Reserved, Site, WorkerHook
from octavo.worker.host_parts import host_parts
from octavo.worker.invariance import check_layers, check_ranks
from octavo.worker.kv_scales import SCALING_TOKENS, set_scales, stored_scales
from octavo.worker.loaded import LoadedModel
from octavo.worker.micro_batches import check_micro_batches, uses_micro_batches
from octavo.worker.offload import Offload, offload_of, settings_beside
from octavo.worker.own_rows import own_rows_of
from octavo.worker.relay import NO_RELAY, relay_of
from octavo.worker.runner import Runner
from octavo.worker.schemes import least_bytes, needed_bytes, online_of, schemes_of
from octavo.worker.workspace import rows_of_logits, workspace_bytes

if TYPE_CHECKING:
    from octavo.device.ahead import Ahead

log = logging.getLogger(__name__)

_ALONE, _UNDIVIDED = RankPlace(), ParallelConfig()


class Worker:
    """Built in steps: settings first, then the weights, then KV cache and slots. Sizes in bytes.

    Attributes:
        place: among the ranks.
        block_size: tokens of a KV block: as set, or as fits the model.
        cache_groups: groups of layers that share a block table; known once the model is built.
        most_kv: bytes that the KV cache can have at most; known before the weights are loaded.
        reserved: memory that features need besides the model's.
        offload: layers whose weights are in the host's memory; None for none.
        looks_ahead: steps may have `StepInput.ahead`, so kernels for that are compiled, too.
        hooks: the features whose weights are replaced with the model's.
        relay: passes hidden states between stages; known when a runner is made.

    Raises:
        ConfigError: device, dtype or attention backend can't be used here.
        ModelFileError: the weights don't match the configuration.
    """

    _name = "the model"

    def __init__(
        self,
        config: ModelConfig,
        device: DeviceConfig,
        files: ModelFiles,
        cache: CacheConfig,
        implementation: Implementation = OWN,
        place: RankPlace = _ALONE,
        parallel: ParallelConfig = _UNDIVIDED,
    ) -> None:
        self.place = place
        self.device = self._prepared_device(device)
        self.mesh, self.stage = Mesh(place.shard, place.shards), Stage(place.stage, place.stages)
        self.parallel = parallel = settings_beside(cache.cpu_offload_gb, parallel, self.device)
        if device.batch_invariant:
            check_ranks(parallel)
        self.config = config
        self._implementation = implementation
        self.files, self.load_format = files, config.load_format
        self.spec: ModelSpec = self.spec_of(files.config)
        self.dtype = self.device.pick_dtype(config.dtype, stored_dtype(files.config))
        online_of(config, files, self.device)  # raises the errors of its setting
        self.kv_dtype = kv_dtype(cache.kv_cache_dtype, self.dtype)
        if is_fp8(self.kv_dtype) and not self.device.resident:
            raise ConfigError(
                f"--kv-cache-dtype {cache.kv_cache_dtype} needs an NVIDIA GPU (--device cuda): a CPU keeps keys and "
                "values in the model's dtype or in int8. Set --kv-cache-dtype int8 or leave it out."
            )
        if self.kv_dtype == torch.int8 and self.device.resident:
            raise ConfigError(
                f"--kv-cache-dtype {cache.kv_cache_dtype} is for CPUs: a GPU keeps keys and values in the model's "
                "dtype or in FP8. Set --kv-cache-dtype fp8 or leave it out."
            )
        self.kv_form = name_of(self.kv_dtype)
        self._stored_scales: dict[str, Tensor] = {}
        self._exchange: RowExchange | None = None
        layers = ALONE if parallel.divides_requests else self.mesh
        self._layer = implementation.attention(self.spec, layers)
        self.settings = device
        self.block_size = cache.block_size or states.fitting_block_size(
            self.spec, self._layer, self.kv_dtype, layers.size
        )
        self.kv_cache_dtype = cache.kv_cache_dtype
        self._state_bytes = self._page = 0
        self.cache_groups: tuple[CacheGroup, ...] = ()
        self.device.engines = cache.models_on_device or 1
        self._utilization, self._offload_gib = cache.memory_utilization, cache.cpu_offload_gb
        self.model: Model | None = None
        self.offload: Offload | None = None
        self.relay, self.looks_ahead = NO_RELAY, False
        self.hooks: Sequence[WorkerHook] = ()
        self._ahead: Ahead | None = None
        self.weight_bytes = self.most_kv = self._host_free = 0
        self.reserved = Reserved()
        self.step_parameters = 0
        self.files_version = self.weight_version = "default"

    def _prepared_device(self, settings: DeviceConfig) -> Device:
        device = select_device(settings.device)
        device.setup(settings.threads, settings.cpu_bind, *self.place.local)
        return device

    def spec_of(self, config: Config) -> ModelSpec:
        """Return the spec of a checkpoint's configuration under the worker's settings. Raises as
        `Implementation.spec_of`."""
        stated = self._implementation.spec_of(config).within(self.config.max_model_len)
        return stated.without_windows() if self.config.disable_sliding_window else stated

    def _join(self) -> None:
        parallel, isa, limit_s = self.parallel, self.settings.cpu_isa, self.parallel.rank_timeout_s
        sums = {"peers": not parallel.disable_custom_all_reduce, "later": uses_micro_batches(self.spec, parallel)}
        self.mesh, self.stage = join(self.place, self.device.torch_device.type, isa=isa, limit_s=limit_s, **sums)
        if parallel.divides_requests:
            self._exchange = RowExchange(self.mesh, only_chosen=parallel.exchanges_rows)

    def prepare_kernels(self) -> None:
        """Choose the attention backend; on a CPU, compile the kernels if they are not in the cache. Meet the other
        ranks."""
        self._host_free = host.available_memory()  # before the ranks meet: none of them has loaded weights yet
        self._join()
        device = self.device.torch_device
        libraries: Sequence[str] = ()
        if device.type == "cpu":
            libraries = needed_libraries(
                self.files, self.config.dtype, self.load_format, self.kv_cache_dtype, self.config.activation_dtype
            )
        self.attention, self._attention_cache = choose_attention(
            self.settings.attention_backend,
            self._layer,
            device,
            self.dtype,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            isa=self.settings.cpu_isa,
            libraries=libraries,
            invariant=self.settings.batch_invariant,
        )

    def load(self, check: Callable[[], None] = lambda: None) -> None:
        """Build the model and pull its weights; before they are read, when the cache's shape is known, call `check`."""
        device = self.device.torch_device
        checkpoint = self.checkpoint()
        loaded = self.read(checkpoint, device, partial(self._before_weights, checkpoint, check), self._placed)
        if self.offload is not None:
            self.offload.begin()
        self.model, self._stored_scales, self.weight_version = loaded.model, loaded.scales, self.files_version
        self.weight_bytes = loaded.report.nbytes
        tied = (self.spec.tied and self.stage.last) * self.spec.vocab_size * self.spec.hidden_size
        self.step_parameters = loaded.linear_parameters + tied
        if isinstance(self.model, NativeDecoder):
            self.weight_bytes = self.model.nbytes
            # torch does only small operations then, and its threads would compete with the program's for the cores.
            torch.set_num_threads(1)
        if self.config.activation_dtype != "int16" and not self._multiplies_integers:
            raise ConfigError(
                f"--activation-dtype {self.config.activation_dtype} is for weights that stay integers (a quantized "
                f"GGUF file on a CPU, without --dtype); these are {self.weight_form}. Leave it out."
            )

    def read(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        before: Callable[[LayeredModel, Sequence[CachedLayer]], None] = lambda model, layers: None,
        placed: Placed = lambda layer: None,
    ) -> LoadedModel:
        """Build another model of the worker's spec with a checkpoint's weights. May be called from any thread.

        Args:
            device: device of the weights.
            before: called before the weights are loaded, with the model, and with the layers of the whole model that
                keep something between steps, if this one has only those of a stage.
            placed: see `load_weights`.
        """
        keep = LargePages().keep if self._takes_native else fused
        build = self._build(self._schemes(keep), device, keep)
        model = self._implementation.build(build, self.spec)
        whole = model.cached_layers
        elsewhere = take_stage(model, self.stage, self.parallel.pipeline_layers) if self.stage.count > 1 else ()
        before(model, whole)
        named = self._implementation.named(checkpoint, self.spec)
        report = load_weights(model, named, unneeded=elsewhere, placed=placed)
        scales = stored_scales(model.attention_layers, named) if is_fp8(self.kv_dtype) else {}
        sends, activations = self.parallel.sends_rows, self.config.activation_dtype
        form = compiled(model, self.attention, activations, self.mesh, self._name, exchanges_rows=sends)
        return LoadedModel(form, model, report, scales)

    def _build(self, schemes: Schemes, device: torch.device, keep: Keep = fused) -> Build:
        build = Build(self.dtype, device, self.attention, schemes, keep=keep, mesh=self.mesh)
        return with_experts(build, self.parallel, self._exchange)

    def _before_weights(
        self, checkpoint: Checkpoint, check: Callable[[], None], model: LayeredModel, layers: Sequence[CachedLayer]
    ) -> None:
        self._page = common_page(layers, self.attention, self.block_size)
        groups = self._groups_of(layers)
        self.cache_groups = groups if self.stage.count == 1 else own_groups(groups, layers, model.cached_layers)
        if all(isinstance(layer, StateCache) for layer in layers):
            self._state_bytes = states.largest(layers)
        states.check(layers, self.block_size, self._block_bytes)
        if self.settings.batch_invariant:
            check_layers(model, resident=self.device.resident)
        check_micro_batches(None if self._takes_native else model, self.parallel)
        whole, wanted = partial(plain_bytes, checkpoint, self.dtype), wanted_bytes(model)
        most = needed_bytes(wanted, whole, self.config, self.files, resident=self.device.resident)
        freed = self._begin_offload(model, most / max(wanted, 1))
        self.device.check_fits(most - freed, self.files.weight_bytes, self._utilization)
        least = max(least_bytes(wanted, self.config, self.files) - freed, 0)
        self.most_kv = self.device.most_kv(self._utilization, least)
        check()
        self._compile_ahead(model)

    def _begin_offload(self, model: LayeredModel, share: float) -> int:
        """Choose layers to offload; return the bytes of the device's memory that this frees.

        Args:
            share: bytes that weights will take for each byte that they take unquantized.
        """
        if not self._offload_gib:
            return 0

        def size_of(layer: nn.Module) -> int:
            return int(wanted_bytes(layer) * share)

        neighbours = self.place.local[1]
        self.offload = offload_of(model, size_of, self._offload_gib, self.device, self._host_free, neighbours)
        return self.offload.freed

    def _placed(self, layer: WeightLayer) -> None:
        if self.offload is not None:
            self.offload.put_away(layer)

    def _groups_of(self, layers: Sequence[CachedLayer]) -> tuple[CacheGroup, ...]:
        return groups_of(kinds_of(layers, self.attention, self.block_size, self._page))

    def adopt(self, loaded: LoadedModel, *, rescale: bool) -> None:
        """Replace the model's weights. No step may be running.

        Args:
            loaded: the result of `read`.
            rescale: set the FP8 scales of these weights; the KV cache must hold nothing that is still needed.
        """
        model = self.model
        assert model is not None, "the weights are asleep"
        if isinstance(model, NativeDecoder) and isinstance(loaded.model, NativeDecoder):
            model.adopt(loaded.model)
            return
        assert isinstance(model, nn.Module)
        replace_weights(model, loaded.source, in_place=self.device.resident)
        self._stored_scales = loaded.scales
        if rescale and is_fp8(self.kv_dtype) and model.attention_layers[0].cache.numel():
            kept = [layer.scales for layer in model.attention_layers]
            self._set_scales(model)
            for layer, scales in zip(model.attention_layers, kept, strict=True):
                if scales is not None and layer.scales is not None:
                    layer.scales = scales.copy_(layer.scales)  # keep the address that recorded graphs read

    def _set_scales(self, model: Model) -> None:
        assert isinstance(self.attention, FusedBackend)
        origin = set_scales(model, self.dtype, self.attention, self.block_size, self._stored_scales, self.relay)
        self.kv_form = f"{name_of(self.kv_dtype)}, {origin}"

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that each step reads: all but an embedding table that is not also the output head."""
        table = 0 if self.spec.tied else self.spec.vocab_size * self.spec.hidden_size
        whole = self.step_parameters + table
        return self.weight_bytes * self.step_parameters // whole if whole else 0

    @property
    def _multiplies_integers(self) -> bool:
        return isinstance(self.model, NativeDecoder) and self.model.has_integers

    @property
    def _takes_native(self) -> bool:
        """Whether the model will run as a native program."""
        reason = reason_against(self.spec, self.mesh, exchanges_rows=self.parallel.sends_rows)
        return isinstance(self.attention, NativeBackend) and reason is None

    def _schemes(self, keep: Keep = fused) -> Schemes:
        return schemes_of(
            self.config,
            self.files,
            self.device,
            self.dtype,
            keep,
            native=self._takes_native,
            invariant=self.settings.batch_invariant,
        )

    @property
    def weight_form(self) -> str:
        """Storage format of the weights, for display."""
        return self.form_of(self.model)

    def form_of(self, model: Model | None) -> str:
        """Return the storage format of a model of the worker's spec, for display."""
        return model.weight_form if isinstance(model, NativeDecoder) else str(self.dtype).removeprefix("torch.")

    @property
    def kernels(self) -> str:
        """Names of the kernels, for display."""
        name = self._implementation.name
        if not isinstance(self.attention, NativeBackend):
            return f"{self.attention.name}; all but attention in {name}" if name else self.attention.name
        form = f"{self.attention.name}, {self.attention.pool.level}"
        if name:
            return f"{form}; all but attention in {name}"
        return form if isinstance(self.model, NativeDecoder) else f"{form}; all but attention in torch"

    @property
    def advice(self) -> str:
        """A setting that would suit this machine, for display; usually empty."""
        if not isinstance(self.attention, NativeBackend) or not self._multiplies_integers:
            return ""
        return activation_advice(self.attention.pool.level, self.config.activation_dtype)

    @property
    def _block_bytes(self) -> int:
        """Bytes that a block has for one layer."""
        return math.prod(self._cache_shape(1)) * self.kv_dtype.itemsize

    def _cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of the memory of one layer of each group; without attention, a block is a state."""
        if self._page or self._state_bytes:
            return num_blocks, self._page or states.cells(self._state_bytes, self.block_size) // self.kv_dtype.itemsize
        return self._attention_cache(num_blocks, self.block_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers of one cache group, with their scales."""
        return max(group.num_tensors for group in self.cache_groups) * self._block_bytes // self.block_size

    def kv_budget(self, num_seqs: int, step_tokens: int, max_drafts: int = 0) -> int:
        """Return the bytes left for the KV cache after the weights and the workspace of the largest step."""
        workspace = self.workspace_bytes(num_seqs, step_tokens, max_drafts) + self.reserved.workspace
        return self.device.kv_budget(self._utilization, self.weight_bytes + self.reserved.weights, workspace)

    def check_cache(self, size: int, num_seqs: int, step_tokens: int, max_drafts: int = 0) -> None:
        """Raise ConfigError if a KV cache of `size` bytes and the workspace of the largest step do not fit."""
        workspace = self.workspace_bytes(num_seqs, step_tokens, max_drafts) + self.reserved.workspace
        self.device.check_cache(size, workspace)

    def make_runner(
        self,
        *,
        num_blocks: int,
        num_slots: int,
        max_model_len: int,
        max_step_tokens: int,
        max_drafts: int = 0,
        hooks: Sequence[WorkerHook] = (),
    ) -> Runner:
        """Allocate KV cache and slots; on a GPU also record graphs and run a warm-up, so that all memory is
        allocated."""
        model, device = self.model, self.device
        assert model is not None, "the weights must be loaded before the KV cache is allocated"
        shape, groups = self._cache_shape(num_blocks), self.cache_groups
        states.check_drafts(groups, max_drafts, self.stage, resident=device.resident)
        self.relay = relay_of(model, self.stage, max(max_step_tokens, SCALING_TOKENS))
        shapes = own_shapes(model.cached_layers, self.attention, num_blocks, self.block_size) if self._page else ()
        blocks = Blocks(model.cached_layers, groups, shape, self.block_size, self.kv_dtype, device, shapes)
        if is_fp8(self.kv_dtype) and isinstance(self.attention, FusedBackend):
            self._set_scales(model)
        room = Capacity(num_slots, max_model_len, max_step_tokens, max_drafts)
        together = Hooks(hooks)
        own = own_rows_of(model, self.attention, self.block_size, self._exchange, num_blocks, num_slots, together)
        if not device.resident:
            together.attach(model, self._site(blocks, room), num_slots, max_step_tokens)
            mode, sizes = self.config.logprobs_mode, (self.block_size, self.spec.vocab_size)
            branches = branches_of(together.tree, self.attention, blocks)
            host = host_parts(model, self.attention, room, *sizes, groups, mode, together, branches)
            forward = forward_of(model, self.attention, self.block_size, self.parallel, self.mesh)
            return Runner(model, self.attention, device, blocks, *host, together, self.relay, forward, own)
        # They need triton, which machines without a GPU may lack.
        from octavo.worker.resident.assembly import assemble
        from octavo.worker.resident.warm_up import most_rows

        together.attach(model, self._site(blocks, room), most_rows(own, num_slots, max_step_tokens), max_step_tokens)
        return assemble(self, model, blocks, room, together, own)

    def _site(self, blocks: Blocks, room: Capacity) -> Site:
        """Return the context of the model for hooks."""
        build, place = self._build(self._schemes(), self.device.torch_device), self.place
        return Site(build, self._reopen, self.device, blocks, room, place.rank, place.size, place.local[1])

    def _reopen(self) -> Checkpoint:
        if self.weight_version != self.files_version:
            raise UnsupportedError("The weights were received as tensors and are in no file. Load them from a folder.")
        return self.checkpoint()

    def checkpoint(self) -> Checkpoint:
        """Open the files of the weights."""
        return open_checkpoint(self.files, self.load_format, self.config.seed, self.device.torch_device.type)

    def named_checkpoint(self) -> Checkpoint:
        """Open the files of the weights, with the model's names."""
        return self._implementation.named(self.checkpoint(), self.spec)

    def _compile_ahead(self, model: LayeredModel) -> None:
        """Start to compile the kernels of steps while the weights are loaded."""
        if self.device.torch_device.type == "cuda" and isinstance(self.spec, DecoderSpec):
            self._begin_compiling(model, self.spec)

    def _begin_compiling(self, model: LayeredModel, spec: DecoderSpec) -> None:
        from octavo.models.products import launch_packed, launch_plain
        from octavo.worker.resident.ahead import ModelShare, compile_ahead

        self._ahead = compile_ahead(
            spec,
            self.dtype,
            self.kv_dtype,
            model.residual_dtype,
            self.attention,
            self.device.torch_device,
            block_size=self.block_size,
            max_model_len=self.config.max_model_len or spec.max_position,
            groups=self.cache_groups,
            share=ModelShare.of(model, self.mesh, self.parallel, self.place),
            static=self.config.dtype == "auto" and has_input_scales(self.files.config),
            looks_ahead=self.looks_ahead,
        )
        with self._ahead.collecting():
            launch_plain(model)
            if self.config.quantization is not None:
                launch_packed(model)

    def await_kernels(self) -> None:
        """Wait until the kernels whose compilation began before the weights were loaded are there."""
        if self._ahead is not None:
            began = time.perf_counter()
            count = self._ahead.wait()
            log.info("compiled or loaded %d kernels; waited %.1f s", count, time.perf_counter() - began)

    def workspace_bytes(self, num_seqs: int, step_tokens: int, max_drafts: int) -> int:
        """See `workspace.workspace_bytes`."""
        spec, limits = self.spec, (num_seqs, step_tokens)
        recorded = self.device.resident and not self.settings.enforce_eager
        rows = rows_of_logits(spec.vocab_size, self.parallel, limits, max_drafts, recorded=recorded)
        widths = {"token_elements": self._layer.token_elements, "groups": len(self.cache_groups)}
        return workspace_bytes(spec, self.dtype, self.mesh, logits=rows, limits=limits, **widths)
