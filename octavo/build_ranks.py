"""How the processes of ranks are started, from settings. No torch."""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.device.visible import environment_of

RANK_MODULE = "octavo.rank_main"


def in_processes(config: EngineConfig) -> bool:
    """Return whether the worker runs in processes of its own."""
    return config.parallel.num_ranks > 1 or config.device.distributed_executor_backend != "uni"


def rank_arguments(config: EngineConfig) -> list[str]:
    return [config.device.device]


def rank_environment(config: EngineConfig, number: int, count: int) -> dict[str, str]:
    """Return the variables of a rank, by its number among those of its machine, that differ from the engine's."""
    return environment_of(number, count) if config.device.device != "cpu" else {}


def rank_environments(config: EngineConfig) -> list[dict[str, str]]:
    """Return those of all ranks that the engine starts itself."""
    if not in_processes(config) or config.device.distributed_executor_backend == "ray":
        return []
    count = config.parallel.ranks_per_node
    return [rank_environment(config, number, count) for number in range(count)]
