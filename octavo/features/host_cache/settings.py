"""Settings of the KV cache in the host's memory."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core import quantities
from octavo.core.errors import ConfigError
from octavo.core.flag import setting
from octavo.features import FeatureSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCacheSettings(FeatureSettings):
    """Settings of the KV cache in the host's memory.

    Attributes:
        kv_offloading_size: GiB, of all ranks of an engine together; None or 0 for none.
    """

    kv_offloading_size: float | None = setting(
        None,
        "GiB of the host's memory for KV blocks that leave the device's, of all ranks together; each replica of the "
        "model has as much of its own",
        read=quantities.gibibytes,
        metavar="GIB",
    )

    def check_recordable(self) -> None:
        if self.kv_offloading_size:
            raise ConfigError(
                "--record-steps can't be used with --kv-offloading-size: a replay would not know which blocks were "
                "dropped. Leave out one of them."
            )

    @property
    def num_bytes(self) -> int:
        return int((self.kv_offloading_size or 0) * 2**30)


SETTINGS = HostCacheSettings
