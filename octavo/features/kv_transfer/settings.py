"""Settings of KV blocks that are sent to other servers, or fetched from them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from octavo.core import parsing, quantities
from octavo.core.errors import ConfigError
from octavo.core.flag import setting
from octavo.features import FeatureSettings

Role = Literal["kv_producer", "kv_consumer", "kv_both"]
_LOOPBACK = ("127.0.0.0/8", "::1/128")
_OF_ANOTHER_PARTY = "kv_connector", "kv_connector_extra_config"


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `--kv-transfer-config`. Those that begin with `kv_` are vLLM's.

    Attributes:
        kv_role: whether the server sends KV blocks, fetches them, or both.
        kv_ip: address at which it sends, which other servers connect to. `0.0.0.0` for all interfaces: then a server
            that asks for a prefill connects to the host of its `--prefill-servers`.
        kv_port: TCP port at which rank 0 sends; rank r has this port + r. 0 for free ports.
        kv_buffer_size: bytes of the host's memory for blocks that wait to be fetched, of all ranks together.
        kv_load_failure_policy: what happens to a prompt whose blocks can't be fetched.
        min_tokens: shorter rests of prompts are not sent to `--prefill-servers`.
        timeout: seconds for a prefill by another server, and then for its blocks; after that the prompt is computed
            here.
        peers: hosts and networks from which requests may have blocks fetched (`kv_transfer_params`).
    """

    kv_role: Role = "kv_both"
    kv_ip: str = "127.0.0.1"
    kv_port: int = 0
    kv_buffer_size: int | float | str = 4 << 30
    kv_load_failure_policy: Literal["recompute"] = "recompute"
    min_tokens: int = 256
    timeout: float = 30.0
    peers: tuple[str, ...] = _LOOPBACK

    @property
    def sends(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def fetches(self) -> bool:
        return self.kv_role != "kv_producer"

    @property
    def buffer_bytes(self) -> int:
        size = self.kv_buffer_size
        return quantities.size(size) if isinstance(size, str) else int(size)

    def allows(self, host: str) -> bool:
        """Whether requests may name this host, an address or a name as in `peers`."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host in self.peers
        return any(address in network for network in map(_network, self.peers) if network is not None)


class TransferInfo(msgspec.Struct, frozen=True):
    """What the text half must know.

    Attributes:
        asks: the URLs of prefill servers.
    """

    config: TransferConfig
    asks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferSettings(FeatureSettings):
    """
    Raises:
        ConfigError: an unknown key, or a value that it can't have.
    """

    kv_transfer_config: dict[str, Any] = setting(
        {},
        'send KV blocks to other servers or fetch them: {"kv_role": "kv_producer"}; all keys are in '
        "docs/disaggregation.md",
    )
    prefill_servers: tuple[str, ...] = setting(
        (),
        "servers of the same model that compute long prompts for this one, each as URL",
        read=parsing.word,
        metavar="URL",
    )
    prefill_api_key: str | None = setting(
        None, "the API key of these servers", metavar="KEY", env="OCTAVO_PREFILL_API_KEY"
    )

    def __post_init__(self) -> None:
        self.config()
        if self.prefill_api_key and not self.prefill_servers:
            raise ConfigError("--prefill-api-key has no effect without --prefill-servers. Set both, or leave it out.")

    def config(self) -> TransferConfig | None:
        """Return the keys, checked; None if there is nothing to send or fetch."""
        if not self.kv_transfer_config:
            return TransferConfig(kv_role="kv_consumer") if self._servers() else None
        given = {name: value for name, value in self.kv_transfer_config.items() if name not in _OF_ANOTHER_PARTY}
        for name in _OF_ANOTHER_PARTY:
            if value := self.kv_transfer_config.get(name):
                raise ConfigError(
                    f"kv_transfer_config: {name}={value!r} is for another server's connector. Octavo has one of its "
                    "own: leave it out."
                )
        known = ", ".join(TransferConfig.__struct_fields__)
        try:
            config = msgspec.convert(given, TransferConfig, strict=False)
            size = config.buffer_bytes
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(f"kv_transfer_config: {error}. Its keys are {known}.") from None
        if "kv_role" not in given:
            raise ConfigError(
                "kv_transfer_config needs kv_role: kv_producer (computes prompts for others), kv_consumer (has them "
                "computed by others) or kv_both."
            )
        _check(config, size)
        if self._servers() and not config.fetches:
            raise ConfigError("--prefill-servers needs kv_role kv_consumer or kv_both, since their blocks are fetched.")
        return config

    def _servers(self) -> tuple[str, ...]:
        for url in self.prefill_servers:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"--prefill-servers: {url!r} is not a URL such as http://10.0.0.5:8000.")
        return self.prefill_servers

    def check_recordable(self) -> None:
        if self.config() is not None:
            raise ConfigError(
                "--record-steps can't be used with KV blocks of other servers, which a replay would not have. Leave "
                "out --record-steps, or --kv-transfer-config and --prefill-servers."
            )


def _check(config: TransferConfig, size: int) -> None:
    """Raise ConfigError if a number or an address is out of range."""
    odd = next(
        (
            f"{name}={value!r} must be {what}"
            for name, value, good, what in (
                ("kv_port", config.kv_port, 0 <= config.kv_port <= 65535, "a TCP port, or 0 for a free one"),
                ("kv_buffer_size", config.kv_buffer_size, size > 0, "a number of bytes, such as 4G"),
                ("min_tokens", config.min_tokens, config.min_tokens >= 1, "at least 1"),
                ("timeout", config.timeout, config.timeout > 0, "a number of seconds above 0"),
                ("kv_ip", config.kv_ip, bool(config.kv_ip), "an address of this machine"),
            )
            if not good
        ),
        None,
    )
    if odd is not None:
        raise ConfigError(f"kv_transfer_config: {odd}.")
    for peer in config.peers:
        if "/" in peer and _network(peer) is None:
            raise ConfigError(f"kv_transfer_config: peers has {peer!r}, which is not a network such as 10.0.0.0/8.")


def is_loopback(host: str) -> bool:
    """Whether only the machine itself reaches this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Return an address or a network as a network; None for a host's name."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


SETTINGS = KvTransferSettings
