"""`Planned`: what a worker knows of its model before weights are loaded, for a device that need not be there."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from octavo.config import CacheConfig, EngineConfig
from octavo.core.cache_groups import CacheGroup, groups_of
from octavo.core.errors import ConfigError
from octavo.device.cpu import CpuDevice
from octavo.hub.files import ModelFiles
from octavo.hub.text_config import stored_dtype
from octavo.models.implementation import OWN, Implementation
from octavo.models.load import open_checkpoint
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.weights import HasModules, plain_bytes, wanted_bytes, weight_layers
from octavo.models.model import LayeredModel, ModelSpec
from octavo.models.native import reason_against
from octavo.models.stages import own_groups, take_stage
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.kv_dtype import is_fp8, kv_dtype
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.build import AnyBackend, Build
from octavo.nn.experts import ExpertLayer
from octavo.nn.latent.reference import ReferenceLatents
from octavo.nn.linear import Projection
from octavo.nn.quant.base import Schemes, everywhere
from octavo.nn.quant.blocks import BlockQuantized, RoundedBlocks
from octavo.nn.quant.none import Unquantized
from octavo.nn.row_exchange import RowExchange
from octavo.nn.state import StateCache
from octavo.nn.weights import WeightLayer, fused
from octavo.parallel.mesh import ALONE, Mesh
from octavo.parallel.stage import WHOLE, Stage
from octavo.worker import states
from octavo.worker.attention import common_page, kinds_of
from octavo.worker.companion import companion_groups
from octavo.worker.division import with_experts
from octavo.worker.hooks import Reserved
from octavo.worker.schemes import method_name, needed_bytes, online_method
from octavo.worker.workspace import Limits, rows_of_logits, workspace_bytes

NOWHERE = torch.device("meta")
_BITS = {"fp8": 8.0, "w8a8": 8.0, "w8a16": 8.0, "w4a16": 4.25}
"""Bits of a weight that is quantized when it is loaded, with its share of scales."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SHORT = ("bfloat16", "float16")
_MATRICES = (Projection, ExpertLayer)
_ROUNDED = 1.125
"""Bytes of a weight that is rounded to 8 bits on a CPU, with its share of scales."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a feature takes besides the model.

    Attributes:
        name: of its weights, for display.
        drafts: most tokens after one that a step verifies.
    """

    name: str = ""
    reserved: Reserved = dataclasses.field(default_factory=Reserved)
    drafts: int = 0


class Planned:
    """The model of one rank, built without memory for its weights. Sizes in bytes.

    Attributes:
        on_cpu: the device is the host, else a GPU.
        native: it will be a native program of a CPU.
        model: its layers; of a stage of a pipeline only its own.
        block_size, cache_groups: as those of a worker.
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        *,
        on_cpu: bool = False,
        stage: Stage = WHOLE,
        implementation: Implementation = OWN,
    ) -> None:
        """
        Raises:
            ConfigError: a setting or an architecture that is not supported, or the weights' sizes are not known before
                they are downloaded.
            ModelFileError: the configuration lacks something.
        """
        self.config, self.files, self.on_cpu, self.stage = config, files, on_cpu, stage
        self._implementation = implementation
        parallel = config.parallel
        self.mesh = Mesh(0, parallel.tensor_parallel_size * parallel.cache_ranks)
        self.spec: ModelSpec = implementation.spec_of(files.config).within(config.model.max_model_len)
        self.dtype = self._pick_dtype()
        self.kv_dtype = self._pick_kv_dtype()
        layers = ALONE if parallel.divides_requests else self.mesh
        self._layer = implementation.attention(self.spec, layers)
        int8 = self.kv_dtype == torch.int8
        attends = isinstance(self._layer, AttentionSpec)
        self._backend: AnyBackend = ReferenceAttention(int8=int8) if attends else ReferenceLatents()
        self.native = on_cpu and not parallel.sends_rows and reason_against(self.spec) is None
        self.block_size = config.cache.block_size or states.fitting_block_size(
            self.spec, self._layer, self.kv_dtype, layers.size
        )
        self.model = self.built(self.mesh)
        whole = self.model.cached_layers
        if stage.count > 1:
            take_stage(self.model, stage, parallel.pipeline_layers)
        self._page = common_page(whole, self._backend, self.block_size)
        self._kinds = kinds_of(whole, self._backend, self.block_size, self._page)
        groups = groups_of(self._kinds)
        own = self.model.cached_layers
        self.cache_groups = groups if stage.count == 1 else own_groups(groups, whole, own)
        kinds = dict(zip(map(id, whole), self._kinds, strict=True))
        self._kinds = [kinds[id(layer)] for layer in own]
        self._states = states.largest(whole) if all(isinstance(layer, StateCache) for layer in whole) else 0

    def _pick_dtype(self) -> torch.dtype:
        """Return the dtype that the device takes."""
        stored, named = stored_dtype(self.files.config), self.config.model.dtype
        if self.on_cpu:
            return CpuDevice().pick_dtype(named, stored)
        return _DTYPES.get(str(stored) if named == "auto" else named, torch.bfloat16)

    def _pick_kv_dtype(self) -> torch.dtype:
        named = self.config.cache.kv_cache_dtype
        found = kv_dtype(named, self.dtype)
        if found == torch.int8 and not self.on_cpu:
            raise ConfigError(f"--kv-cache-dtype {named} is for CPUs. Set fp8 or leave it out.")
        if is_fp8(found) and self.on_cpu:
            raise ConfigError(f"--kv-cache-dtype {named} is for GPUs. Set int8 or leave it out.")
        return found

    def built(self, mesh: Mesh) -> LayeredModel:
        """Build the whole model, as a rank of this group has it."""
        parallel = self.config.parallel
        exchange = RowExchange(mesh) if parallel.divides_requests and mesh.size > 1 else None
        build = Build(self.dtype, NOWHERE, self._backend, self._schemes, mesh=mesh)
        return self._implementation.build(with_experts(build, parallel, exchange), self.spec)

    @property
    def _schemes(self) -> Schemes:
        keeps = self.native and self.config.model.dtype == "auto"
        return everywhere(BlockQuantized if keeps else Unquantized, self.dtype, NOWHERE, fused)

    def checkpoint(self) -> Checkpoint:
        """Return the headers of the weights; a checkpoint without names if they are not here."""
        return open_checkpoint(self.files, "auto" if self.files.weights else "dummy")

    @cached_property
    def _share(self) -> float:
        """The bytes that weights take for each byte that they take unquantized."""
        files, model = self.files, self.config.model
        wanted, method = wanted_bytes(self.model), method_name(files)
        online = online_method(model, files, resident=not self.on_cpu)
        if online is not None:
            rounded = sum(map(wanted_bytes, (one for one in weight_layers(self.model) if isinstance(one, _MATRICES))))
            return 1 - rounded / wanted * (1 - _BITS[online] / 8 / self.dtype.itemsize)
        if method is not None and not files.weight_bytes:
            raise ConfigError(
                f"The weights of {files.name} are quantized ({method}), and their sizes are known once they are here: "
                "download them with octavo pull, and name the folder."
            )

        def whole() -> int:
            return plain_bytes(open_checkpoint(files, "auto", 0, "cpu"), self.dtype)

        keeps = self.native if self.on_cpu else True
        return needed_bytes(wanted, whole, model, files, resident=keeps) / wanted if wanted else 1.0

    def nbytes(self, part: HasModules) -> int:
        """Return about the bytes that a part of the model takes, at most."""
        if method_name(self.files) is None and self._narrow:
            return sum(map(self._narrow_bytes, weight_layers(part)))
        return int(wanted_bytes(part) * self._share)

    @property
    def _narrow(self) -> bool:
        """Whether a CPU computes in float32 with weights that stay in 16 bits."""
        return self.on_cpu and self.dtype == torch.float32 and str(stored_dtype(self.files.config)) in _SHORT

    @staticmethod
    def _narrow_bytes(layer: WeightLayer) -> int:
        size, wants = wanted_bytes(layer), [want for want in layer.wanted() if not want.optional]
        return size // 2 if any(want.spec.may_be_narrow for want in wants) else size

    @property
    def has_integers(self) -> bool:
        """Whether some of the weights stay integers on a CPU."""
        return self.native and self.config.model.dtype == "auto" and method_name(self.files) is not None

    @property
    def weight_bytes(self) -> int:
        return self.nbytes(self.model)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token over all layers of one cache group."""
        return max(group.num_tensors for group in self.cache_groups) * self._layer_bytes

    @property
    def _layer_bytes(self) -> int:
        if self._states:
            return states.cells(self._states, self.block_size) // self.block_size
        # mypy does not know that the backend and the layer are of one kind.
        elements = self._page or math.prod(self._backend.cache_shape(self._layer, 1, self.block_size))  # type: ignore[arg-type]
        return elements * self.kv_dtype.itemsize // self.block_size

    def kept(self) -> list[tuple[CacheGroup, int]]:
        """Return what each layer with a cache keeps, and its bytes for each token, or of its state."""
        each, size = zip(self.model.cached_layers, self._kinds, strict=True), self._layer_bytes
        return [(kind, one.nbytes if isinstance(one, StateCache) else size // kind.together) for one, kind in each]

    def workspace_bytes(self, limits: Limits, max_drafts: int = 0) -> int:
        """Return the memory of the largest step; see `workspace.workspace_bytes`."""
        parallel, spec = self.config.parallel, self.spec
        rows = rows_of_logits(spec.vocab_size, parallel, limits, max_drafts, recorded=not self.on_cpu)
        widths = {"token_elements": self._layer.token_elements, "groups": len(self.cache_groups)}
        return workspace_bytes(spec, self.dtype, self.mesh, logits=rows, limits=limits, **widths)

    def companion(
        self,
        files: ModelFiles,
        implementation: Implementation = OWN,
        dtype: Literal["auto"] | None = None,
        *,
        rounded: bool = False,
    ) -> PlannedCompanion:
        """Return another model beside this one; see `Companion`."""
        return PlannedCompanion(self, files, implementation, dtype, rounded=rounded)


class PlannedCompanion(Planned):
    """A `Companion` that need not be there."""

    def __init__(
        self,
        beside: Planned,
        files: ModelFiles,
        implementation: Implementation,
        dtype: Literal["auto"] | None,
        *,
        rounded: bool,
    ) -> None:
        self._is_rounded = rounded
        config = beside.config
        model = dataclasses.replace(
            config.model,
            hf_overrides={},
            rope_scaling={},
            rope_theta=None,
            dtype=config.model.dtype if dtype is None else dtype,
        )
        cache = CacheConfig(block_size=beside.block_size, kv_cache_dtype=config.cache.kv_cache_dtype)
        super().__init__(
            dataclasses.replace(config, model=model, cache=cache),
            files,
            on_cpu=beside.on_cpu,
            implementation=implementation,
        )
        self.cache_groups = companion_groups(files.name, self._kinds)

    @property
    def _schemes(self) -> Schemes:
        if self._is_rounded and self.native:
            return everywhere(RoundedBlocks, self.dtype, NOWHERE, fused)
        return super()._schemes

    def nbytes(self, part: HasModules) -> int:
        if not (self._is_rounded and self.native):
            return super().nbytes(part)
        size = wanted_bytes(part)
        matrices = sum(map(wanted_bytes, (one for one in weight_layers(part) if isinstance(one, _MATRICES))))
        return size - matrices + int(matrices / self.dtype.itemsize * _ROUNDED)

    def reserved_for(self, limits: Limits) -> Reserved:
        """Return its memory; see `Companion.reserved_for`."""
        return Reserved(self.weight_bytes, self.workspace_bytes(limits), self.token_bytes * self.block_size)
