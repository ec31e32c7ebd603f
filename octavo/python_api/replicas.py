"""Processes of an engine's replicas. No torch."""

from __future__ import annotations

import os

from octavo.config import EngineConfig
from octavo.core.log import LogSettings
from octavo.device.binding import NODES, divided
from octavo.device.early import is_cpu
from octavo.device.visible import check_enough, environment_of
from octavo.engine.process import CoreProcess
from octavo.hub.files import ModelFiles


def replica_process(number: int, count: int, config: EngineConfig, files: ModelFiles, log: LogSettings) -> CoreProcess:
    """Start the core of one replica, on its share of the GPUs, or of the cores if the model runs on a CPU.

    Args:
        number, count: the replica's number, and the number of replicas.
    """
    own = environment_of(number, count, config.parallel.num_ranks)
    process = CoreProcess("octavo.engine_main", (config, files, log), own)
    device = config.device
    if count > 1 and is_cpu(device.device) and device.cpu_bind == "auto" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process.pid, divided(os.sched_getaffinity(0), NODES, number, count))
    return process


def check_replicas(config: EngineConfig) -> None:
    """Raise ConfigError if this machine has fewer GPUs than the replicas need together."""
    count = config.parallel.replicas
    if count > 1 and not is_cpu(config.device.device) and config.device.distributed_executor_backend != "ray":
        settings = f"--data-parallel-size {count} {config.parallel.division}".rstrip()
        check_enough(count * config.parallel.num_ranks, settings)
