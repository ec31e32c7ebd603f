"""`estimate_of`: a model's sizes on devices that need not be there, by the arithmetic of a worker that starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

from torch import nn

from octavo.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.estimate import Estimate, Load, Parameters
from octavo.core.gpus import UTILIZATION, Gpu, default_limits
from octavo.device.cpu import CpuDevice
from octavo.hub.files import ModelFiles
from octavo.models.decoder import CausalLM
from octavo.models.encoders.registry import is_encoder
from octavo.models.feed_forwards.spec import experts_in
from octavo.models.load.weights import HasModules, wanted_bytes, weight_layers
from octavo.models.spec import DecoderSpec
from octavo.nn.embedding import Embedding
from octavo.nn.experts import ExpertLayer
from octavo.parallel.mesh import ALONE
from octavo.parallel.stage import Stage
from octavo.worker.hooks import Reserved
from octavo.worker.offload import freed_by, spread
from octavo.worker.planned import Needs, Planned
from octavo.worker.states import check_drafts
from octavo.worker.workspace import Limits

_GIB = 1 << 30

NeedsOf = Callable[[Planned, Limits], Sequence[Needs]]
"""A rank's model, and the limits of its steps -> what features take besides."""


def estimate_of(
    config: EngineConfig,
    files: ModelFiles,
    device: Gpu | CpuDevice,
    needs_of: NeedsOf = lambda planned, limits: (),
    host_free: int | None = None,
) -> Estimate:
    """Return the estimate of a model on GPUs of a kind, or on the CPUs of this machine, with these settings.

    Args:
        host_free: see `Estimate`.

    Raises:
        ConfigError: the architecture or a setting is not supported, or the weights' sizes are not known before they
            are downloaded.
        ModelFileError: the configuration lacks something.
    """
    if is_encoder(files.config):
        raise ConfigError(f"octavo plan is for models that generate text, and {files.name} is an encoder.")
    parallel = config.parallel
    on_cpu = isinstance(device, CpuDevice)
    if on_cpu and config.cache.cpu_offload_gb:
        raise ConfigError(
            f"--cpu-offload-gb {config.cache.cpu_offload_gb:g} frees memory of GPUs; on a CPU, all weights are in the "
            "host's memory. Leave it out."
        )
    stages = [Stage(number, parallel.pipeline_parallel_size) for number in range(parallel.pipeline_parallel_size)]
    planned = [Planned(config, files, on_cpu=on_cpu, stage=stage) for stage in stages]
    return Estimate(
        stages=[_load(one, device, needs_of) for one in planned],
        max_position=planned[0].spec.max_position,
        asked=config.model.max_model_len,
        contexts=parallel.prefill_context_parallel_size,
        replicas=parallel.replicas,
        neighbours=parallel.ranks_per_node * parallel.replicas,
        host_free=host_free,
    )


def _load(planned: Planned, device: Gpu | CpuDevice, needs_of: NeedsOf) -> Load:
    config, cache = planned.config, planned.config.cache
    parallel = config.parallel
    if isinstance(device, CpuDevice):
        default, neighbours = device.default_limits, parallel.ranks_per_node * parallel.replicas
        gpu = Gpu(device.name, device.available // neighbours)
        room, most = device.room(cache.memory_utilization) // neighbours, device.most_cache(cache.memory_utilization)
    else:
        gpu, default, most = device, default_limits(device.memory), None
        room = int(gpu.memory * (cache.memory_utilization or UTILIZATION))
    limits = config.scheduler.limits(*default, default[1])
    needs = needs_of(planned, limits)
    drafts = max((one.drafts for one in needs), default=0)
    check_drafts(planned.cache_groups, drafts, planned.stage, resident=not planned.on_cpu)
    reserved = sum((one.reserved for one in needs), Reserved())
    model = cast("CausalLM", planned.model)
    freed, copied = _offload(cache.cpu_offload_gb, list(map(planned.nbytes, model.layers)))
    return Load(
        gpu=gpu,
        on_cpu=planned.on_cpu,
        most_cache=most,
        ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size * parallel.cache_ranks,
        cache_ranks=parallel.cache_ranks,
        parameters=_parameters(planned, model),
        besides={one.name: one.reserved.weights for one in needs if one.reserved.weights},
        block_besides=reserved.block,
        freed=freed,
        copied=copied,
        room=room,
        workspace=planned.workspace_bytes(limits, drafts) + reserved.workspace,
        limits=limits,
        ahead=(not planned.on_cpu) + parallel.pipeline_parallel_size,
        groups=planned.cache_groups,
        block_size=planned.block_size,
        token_bytes=planned.token_bytes,
        kept=planned.kept(),
    )


def _parameters(planned: Planned, model: CausalLM) -> Parameters:
    spec, undivided = cast("DecoderSpec", planned.spec), planned.mesh.size == 1 and model.is_whole
    whole = model if undivided else cast("CausalLM", planned.built(ALONE))
    parts = {name: sum(map(planned.nbytes, some)) for name, some in _parts(model)}
    experts = parts.get("experts", 0)
    table = 0 if spec.tied else parts["embeddings"]
    counts = {name: sum(map(wanted_bytes, some)) // planned.dtype.itemsize for name, some in _parts(whole)}
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
    head: list[nn.Module] = [model.head] if model.is_last else []
    others = mixers.union(map(id, [*tables, *experts, *head]))
    yield "embeddings", tables
    yield "attention and other mixers", [one for one in weight_layers(model) if id(one) in mixers]
    yield "feed-forwards and norms", [one for one in weight_layers(model) if id(one) not in others]
    yield "experts", experts
    yield "head", head


def _offload(gib: float, sizes: list[int]) -> tuple[int, int]:
    """Return the bytes that weights in the host's memory free, and those that each step copies."""
    if not gib:
        return 0, 0
    chosen = [sizes[i] for i in spread(sizes, int(gib * _GIB))]
    if not chosen:
        raise ConfigError(
            f"--cpu-offload-gb {gib:g}: all layers free {max(freed_by(sizes), 0) / _GIB:.2f} GiB. Lower it."
        )
    return freed_by(chosen), sum(chosen)
