from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.features.kv_transfer.settings import KvTransferSettings, TransferConfig, is_loopback


def config(**keys: Any) -> TransferConfig:
    found = KvTransferSettings(kv_transfer_config={"kv_role": "kv_both"} | keys).config()
    assert found is not None
    return found


def test_nothing_is_transferred_unless_a_setting_says_so() -> None:
    assert KvTransferSettings().config() is None


def test_prefill_servers_make_a_consumer() -> None:
    found = KvTransferSettings(prefill_servers=("http://10.0.0.5:8000",)).config()
    assert found is not None
    assert (found.fetches, found.sends) == (True, False)


@pytest.mark.parametrize(
    ("role", "sends", "fetches"), [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)]
)
def test_roles(role: str, sends: bool, fetches: bool) -> None:
    found = config(kv_role=role)
    assert (found.sends, found.fetches) == (sends, fetches)


@pytest.mark.parametrize(("size", "expected"), [(1e9, 10**9), ("2G", 2 << 30), (4096, 4096), ("64 MiB", 64 << 20)])
def test_sizes(size: Any, expected: int) -> None:
    assert config(kv_buffer_size=size).buffer_bytes == expected


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"kv_role": "producer"}, "kv_role"),
        ({"kv_port": 70000}, "kv_port=70000 must be a TCP port"),
        ({"kv_buffer_size": 0}, "kv_buffer_size=0 must be a number of bytes"),
        ({"kv_buffer_size": "much"}, "Its keys are kv_role"),
        ({"min_tokens": 0}, "min_tokens=0 must be at least 1"),
        ({"timeout": 0}, "timeout=0.0 must be a number of seconds"),
        ({"kv_ip": ""}, "kv_ip='' must be an address"),
        ({"peers": ["10.0.0.0/99"]}, "peers has '10.0.0.0/99'"),
        ({"kv_rank": 0}, "kv_rank.*Its keys are kv_role"),
        ({"kv_connector": "NixlConnector"}, "kv_connector='NixlConnector'.*leave it out"),
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy"),
    ],
)
def test_wrong_values_are_named(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_transfer_config.*{text}"):
        config(**keys)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kv_transfer_config": {"kv_port": 1}}, "needs kv_role"),
        ({"prefill_api_key": "k"}, "no effect without --prefill-servers"),
        ({"prefill_servers": ("10.0.0.5:8000",)}, "not a URL"),
        (
            {"prefill_servers": ("http://a",), "kv_transfer_config": {"kv_role": "kv_producer"}},
            "needs kv_role kv_consumer",
        ),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        KvTransferSettings(**settings)


def test_steps_are_not_recorded() -> None:
    KvTransferSettings().check_recordable()
    with pytest.raises(ConfigError, match="--record-steps can't be used"):
        KvTransferSettings(kv_transfer_config={"kv_role": "kv_both"}).check_recordable()


@pytest.mark.parametrize(
    ("peers", "host", "allowed"),
    [
        (None, "127.0.0.1", True),
        (None, "127.8.8.8", True),
        (None, "::1", True),
        (None, "10.0.0.1", False),
        (None, "localhost", False),
        (None, "", False),
        (["10.0.0.0/8"], "10.1.2.3", True),
        (["10.0.0.0/8"], "127.0.0.1", False),
        (["10.0.0.5", "prefill-0"], "10.0.0.5", True),
        (["10.0.0.5", "prefill-0"], "prefill-0", True),
        (["10.0.0.5", "prefill-0"], "prefill-1", False),
    ],
)
def test_requests_name_allowed_hosts_only(peers: list[str] | None, host: str, allowed: bool) -> None:
    assert config(**({} if peers is None else {"peers": peers})).allows(host) is allowed


def test_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "a", "")] == [
        *(True, True, True),
        *(False, False, False),
    ]
