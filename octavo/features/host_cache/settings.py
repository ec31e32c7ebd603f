"""Settings of the KV cache in the host's memory, or in files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.core import quantities
from octavo.core.errors import ConfigError
from octavo.core.flag import setting
from octavo.features import FeatureSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCacheSettings(FeatureSettings):
    """
    Attributes:
        kv_offloading_size: GiB, of all ranks of an engine together; None or 0 for none.
        kv_offloading_path: folder for files with these blocks; None for the host's memory.
    """

    kv_offloading_size: float | None = setting(
        None,
        "GiB of the host's memory, or of files, for KV blocks that leave the device's, of all ranks together; each "
        "replica of the model has as much of its own",
        read=quantities.gibibytes,
        metavar="GIB",
    )
    kv_offloading_path: str | None = setting(
        None,
        "folder for files with these KV blocks, which outlast the server; without it, they are in the host's memory",
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        if self.kv_offloading_path is not None and not self.kv_offloading_size:
            raise ConfigError(
                f"--kv-offloading-path {self.kv_offloading_path} needs --kv-offloading-size, the GiB that its files "
                "may take. Set it, or leave out both."
            )

    def check_recordable(self) -> None:
        if self.kv_offloading_size:
            raise ConfigError(
                "--record-steps can't be used with --kv-offloading-size: a replay would not know which blocks were "
                "dropped. Leave out one of them."
            )

    @property
    def folder(self) -> Path | None:
        return None if self.kv_offloading_path is None else Path(self.kv_offloading_path).expanduser().absolute()

    @property
    def num_bytes(self) -> int:
        return int((self.kv_offloading_size or 0) * 2**30)


SETTINGS = HostCacheSettings
