from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.features.host_cache.settings import HostCacheSettings


def settings(**given: object) -> HostCacheSettings:
    found = EngineConfig.of(**given).features["host_cache"]
    assert isinstance(found, HostCacheSettings)
    return found


def test_a_size_is_in_gib() -> None:
    assert settings().num_bytes == settings(kv_offloading_size=0).num_bytes == 0
    assert settings(kv_offloading_size=2).num_bytes == 2 << 30
    assert settings(kv_offloading_size="0.5").num_bytes == 1 << 29


@pytest.mark.parametrize("size", [-1, "-1", "much", "inf", True])
def test_sizes_that_are_none(size: object) -> None:
    with pytest.raises(ConfigError, match="kv_offloading_size"):
        settings(kv_offloading_size=size)


def test_files_need_a_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert settings(kv_offloading_size=1).folder is None
    assert settings(kv_offloading_size=1, kv_offloading_path="~/kv").folder == tmp_path / "kv"
    assert settings(kv_offloading_size=1, kv_offloading_path="kv").folder == tmp_path / "kv"
    with pytest.raises(ConfigError, match=r"--kv-offloading-path kv needs --kv-offloading-size"):
        settings(kv_offloading_path="kv")
