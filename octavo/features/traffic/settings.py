"""Settings of the record of requests."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core import quantities
from octavo.core.errors import ConfigError
from octavo.core.flag import setting
from octavo.features import FeatureSettings

_LIMIT = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSettings(FeatureSettings):
    """
    Attributes:
        record_traffic: path of the file; `%p` in it is replaced by the engine's process id.
    """

    record_traffic: str | None = setting(
        None,
        "write when requests arrive, their lengths, and salted hashes of their prompts to FILE, but no text and no "
        "token ids; octavo simulate and octavo tune read it. %p in the name stands for the engine's process id",
        metavar="FILE",
    )
    record_traffic_limit: int = setting(
        _LIMIT,
        "maximum size of that file; at this size, recording ends and the engine continues",
        read=quantities.size,
        metavar="SIZE",
    )

    def __post_init__(self) -> None:
        if self.record_traffic is None and self.record_traffic_limit != _LIMIT:
            raise ConfigError(
                f"--record-traffic-limit {self.record_traffic_limit} is for --record-traffic. Set that flag, or leave "
                "this one out."
            )


SETTINGS = TrafficSettings
