"""The composition root of `octavo plan`: a model's sizes, with those of its features."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from octavo.build_worker import check_divisible, check_experts, feature_context
from octavo.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.estimate import Estimate
from octavo.core.gpus import Gpu, default_limits
from octavo.core.worker_info import WorkerFacts
from octavo.device.cpu import CpuDevice
from octavo.features import parts
from octavo.hub.files import ModelFiles
from octavo.worker.estimate import estimate_of
from octavo.worker.planned import Needs, Planned

if TYPE_CHECKING:
    from octavo.features import FeatureContext


def plan_of(config: EngineConfig, files: ModelFiles, device: Gpu | CpuDevice, host_free: int | None = None) -> Estimate:
    """Return the estimate of a model with its features; see `estimate_of`, also for what is raised."""
    parallel = config.parallel
    parallel.check()
    if parallel.enable_expert_parallel:
        check_experts(config, files)
    if parallel.num_ranks > 1:
        check_divisible(config, files)
    return estimate_of(config, files, device, partial(_needs, device), host_free)


def _needs(device: Gpu | CpuDevice, planned: Planned, limits: tuple[int, int]) -> Sequence[Needs]:
    context = _context(device, planned)
    found = [module.estimate(context, planned, limits) for _, module in parts("estimate")]
    needs = [one for one in found if one is not None]
    if planned.config.parallel.divides_requests and any(one.reserved.weights for one in needs):
        names = ", ".join(one.name for one in needs if one.reserved.weights)
        raise ConfigError(
            f"--data-parallel-size with --enable-expert-parallel: {names} can't be used with data-parallel attention. "
            "Leave --enable-expert-parallel out for whole replicas, or use --tensor-parallel-size instead."
        )
    return needs


def _context(device: Gpu | CpuDevice, planned: Planned) -> FeatureContext:
    limits = device.default_limits if isinstance(device, CpuDevice) else default_limits(device.memory)
    spec = planned.spec
    facts = WorkerFacts(
        device=device.name,
        accelerator="cpu" if planned.on_cpu else "cuda",
        torch_device="cpu" if planned.on_cpu else "cuda:0",
        default_depth=0,
        default_limits=(*limits, limits[1]),
        balanced_tokens=0,
        dtype=str(planned.dtype).removeprefix("torch."),
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        max_position=spec.max_position,
    )
    return feature_context(planned.config, planned.files, facts)
