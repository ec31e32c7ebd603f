"""Settings: one frozen dataclass for each floor. Below `build.py`, a floor gets only its own.

Each field carries its flag (`core/flag.py`). The command line, the config file, the environment variables and the
tables in docs/configuration.md are made from these flags.
"""

from octavo.config.cache import CacheConfig
from octavo.config.device import DeviceConfig
from octavo.config.engine import EngineConfig
from octavo.config.model import DEFAULT_MODEL, ModelConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.scheduler import SchedulerConfig
from octavo.config.server import ServerConfig

__all__ = [
    "DEFAULT_MODEL",
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "ServerConfig",
]
