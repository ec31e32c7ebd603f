"""`estimate_of`: a model's sizes on GPUs that need not be there, by the arithmetic that a worker does at its start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from octavo.config import EngineConfig
from octavo.core.cache_groups import groups_of
from octavo.core.errors import ConfigError
from octavo.core.estimate import Estimate, Parameters
from octavo.core.gpus import UTILIZATION, Gpu, default_limits
from octavo.core.worker_info import most_results
from octavo.hub.files import ModelFiles
from octavo.hub.text_config import stored_dtype
from octavo.models.decoder import CausalLM
from octavo.models.encoders.registry import is_encoder
from octavo.models.feed_forwards.spec import experts_in
from octavo.models.implementation import OWN
from octavo.models.load import open_checkpoint
from octavo.models.load.weights import HasModules, plain_bytes, wanted_bytes, weight_layers
from octavo.models.spec import DecoderSpec
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.kv_dtype import kv_dtype
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.build import AnyBackend, Build
from octavo.nn.embedding import Embedding
from octavo.nn.experts import ExpertLayer
from octavo.nn.latent.reference import ReferenceLatents
from octavo.nn.linear import Projection
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized
from octavo.nn.state import StateCache
from octavo.nn.weights import fused
from octavo.parallel.mesh import ALONE, Mesh
from octavo.worker import states
from octavo.worker.attention import common_page, kinds_of
from octavo.worker.offload import freed_by, spread
from octavo.worker.schemes import method_name, needed_bytes, online_method
from octavo.worker.workspace import workspace_bytes

_NOWHERE = torch.device("meta")
_BITS = {"fp8": 8.0, "w8a8": 8.0, "w8a16": 8.0, "w4a16": 4.25}
"""Bits of a weight that is quantized when it is loaded, with its share of scales."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_GIB = 1 << 30


def estimate_of(config: EngineConfig, files: ModelFiles, gpu: Gpu) -> Estimate:
    """Return the estimate of a model on GPUs of a kind, with these settings.

    Raises:
        ConfigError: the architecture or a setting is not supported, or the weights' sizes are not known before they
            are downloaded.
        ModelFileError: the configuration lacks something.
    """
    if is_encoder(files.config):
        raise ConfigError(f"octavo plan is for models that generate text, and {files.name} is an encoder.")
    ranks = _ranks(config)
    spec = OWN.spec_of(files.config).within(config.model.max_model_len)
    dtype, mesh = _dtype(config, files), Mesh(0, ranks)
    layer = OWN.attention(spec, mesh)
    backend: AnyBackend = ReferenceAttention() if isinstance(layer, AttentionSpec) else ReferenceLatents()
    model = _built(spec, dtype, backend, mesh)
    share = _stored_share(config, files, model, dtype)
    kv = kv_dtype(config.cache.kv_cache_dtype, dtype)
    if kv == torch.int8:
        raise ConfigError(f"--kv-cache-dtype {config.cache.kv_cache_dtype} is for CPUs. Set fp8 or leave it out.")
    size = config.cache.block_size or states.fitting_block_size(spec, layer, kv, ranks)
    page = common_page(model.cached_layers, backend, size)
    kinds = kinds_of(model.cached_layers, backend, size, page)
    groups = groups_of(kinds)
    elements = page or math.prod(backend.cache_shape(layer, 1, size))  # type: ignore[arg-type]
    token = elements * kv.itemsize // size
    if all(isinstance(one, StateCache) for one in model.cached_layers):
        token = states.cells(states.largest(model.cached_layers), size) // size
    each = zip(model.cached_layers, kinds, strict=True)
    kept = [one.nbytes if isinstance(one, StateCache) else token // kind.together for one, kind in each]
    default = default_limits(gpu.memory)
    limits = config.scheduler.limits(*default, default[1])
    freed, copied = _offload(config, [int(wanted_bytes(one) * share) for one in model.layers])
    return Estimate(
        gpu=gpu,
        ranks=ranks,
        parameters=_parameters(model, spec, share, dtype, backend, ranks),
        freed=freed,
        copied=copied,
        room=int(gpu.memory * (config.cache.memory_utilization or UTILIZATION)),
        workspace=workspace_bytes(
            spec,
            dtype,
            mesh,
            token_elements=layer.token_elements,
            groups=len(groups),
            logits=most_results(*limits, 0),
            limits=limits,
        ),
        limits=limits,
        groups=groups,
        block_size=size,
        token_bytes=max(group.num_tensors for group in groups) * token,
        kept=list(zip(kinds, kept, strict=True)),
        max_position=spec.max_position,
        asked=config.model.max_model_len,
    )


def _ranks(config: EngineConfig) -> int:
    parallel = config.parallel
    if parallel.pipeline_parallel_size > 1 or parallel.enable_expert_parallel or parallel.cache_ranks > 1:
        raise ConfigError(
            "octavo plan divides a model by --tensor-parallel-size only. Leave out the other flags that divide it."
        )
    return parallel.tensor_parallel_size


def _dtype(config: EngineConfig, files: ModelFiles) -> torch.dtype:
    """Return the dtype that a GPU takes."""
    stored = stored_dtype(files.config)
    named = config.model.dtype
    return _DTYPES.get(str(stored) if named == "auto" else named, torch.bfloat16)


def _built(spec: DecoderSpec, dtype: torch.dtype, backend: AnyBackend, mesh: Mesh) -> CausalLM:
    schemes = everywhere(Unquantized, dtype, _NOWHERE, fused)
    return CausalLM(Build(dtype, _NOWHERE, backend, schemes, mesh=mesh), spec)


def _stored_share(config: EngineConfig, files: ModelFiles, model: CausalLM, dtype: torch.dtype) -> float:
    """Return the bytes that weights take for each byte that they take unquantized."""
    wanted, method = wanted_bytes(model), method_name(files)
    online = online_method(config.model, files, resident=True)
    if online is not None:
        rounded = sum(wanted_bytes(one) for one in weight_layers(model) if isinstance(one, Projection | ExpertLayer))
        return 1 - rounded / wanted * (1 - _BITS[online] / 8 / dtype.itemsize)
    if method is not None and not files.weight_bytes:
        raise ConfigError(
            f"The weights of {files.name} are quantized ({method}), and their sizes are known once they are here: "
            "download them with octavo pull, and name the folder."
        )

    def whole() -> int:
        checkpoint = open_checkpoint(files, "auto", 0, "cpu")
        return plain_bytes(checkpoint, dtype)

    needed = needed_bytes(wanted, whole, config.model, files, resident=True)
    return needed / wanted


def _parameters(
    model: CausalLM, spec: DecoderSpec, share: float, dtype: torch.dtype, backend: AnyBackend, ranks: int
) -> Parameters:
    parts = {name: int(sum(map(wanted_bytes, some)) * share) for name, some in _parts(model)}
    experts = parts.get("experts", 0)
    table = 0 if spec.tied else parts["embeddings"]
    whole = model if ranks == 1 else _built(spec, dtype, backend, ALONE)
    counts = {name: sum(map(wanted_bytes, some)) // dtype.itemsize for name, some in _parts(whole)}
    mixture = next((found for one in spec.mlps if (found := experts_in(one))), None)
    chosen, choices = (mixture.routing.top_k, mixture.num_experts) if mixture else (0, 0)
    active = sum(counts.values()) - (0 if spec.tied else counts["embeddings"])
    if mixture is not None:
        active -= counts["experts"] * (choices - chosen) // choices
    return Parameters(
        count=sum(counts.values()),
        active=active,
        parts={name: size for name, size in parts.items() if size},
        always=sum(parts.values()) - experts - table,
        experts=experts,
        chosen=chosen,
        choices=choices,
    )


def _parts(model: CausalLM) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield what each part of the model consists of, by its name."""
    mixed = [cast("HasModules", layer.mixer) for layer in model.layers if layer.mixer is not None]
    mixers = {id(one) for mixer in mixed for one in weight_layers(mixer)}
    tables: list[nn.Module] = [one for one in weight_layers(model) if isinstance(one, Embedding)]
    experts: list[nn.Module] = [one for one in weight_layers(model) if isinstance(one, ExpertLayer)]
    others = mixers.union(map(id, [*tables, *experts, model.head]))
    yield "embeddings", tables
    yield "attention and other mixers", [one for one in weight_layers(model) if id(one) in mixers]
    yield "feed-forwards and norms", [one for one in weight_layers(model) if id(one) not in others]
    yield "experts", experts
    yield "head", [model.head]


def _offload(config: EngineConfig, sizes: list[int]) -> tuple[int, int]:
    """Return the bytes that weights in the host's memory free, and those that each step copies."""
    gib = config.cache.cpu_offload_gb
    if not gib:
        return 0, 0
    chosen = [sizes[i] for i in spread(sizes, int(gib * _GIB))]
    if not chosen:
        raise ConfigError(f"--cpu-offload-gb {gib:g}: all layers free {freed_by(sizes) / _GIB:.2f} GiB. Lower it.")
    return freed_by(chosen), sum(chosen)
