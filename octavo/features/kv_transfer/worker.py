"""`TransferWorker`: the worker half. It keeps pages for other servers, sends them, and fetches theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.device.cgroup import memory
from octavo.features import FeatureContext
from octavo.features.kv_transfer.buffer import PageBuffer
from octavo.features.kv_transfer.fetching import Connections, PausedError
from octavo.features.kv_transfer.listener import Listener
from octavo.features.kv_transfer.offer import NAME, Address
from octavo.features.kv_transfer.settings import KvTransferSettings, TransferConfig
from octavo.models.model import EncoderModel, Model
from octavo.worker.hooks import Site, WorkerHook

log = logging.getLogger(__name__)

_LEAST = 8
"""Fewest pages in the buffer of a rank."""
_SPARE_PART = 16
"""This part of the buffer is left, since pages that are being read keep their places after they are dropped."""
_ALL_INTERFACES = "0.0.0.0", "::"
_THREADS = 8
_ROOM_BYTES, _ROOMS = 16 << 20, 8
"""Of what a load fills at a time, each over a connection of its own."""


class TransferWorker(WorkerHook):
    name = NAME

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="octavo-kv-transfer")
        self._buffer = PageBuffer(0, 0)
        self._listener: Listener | None = None
        self._connections = Connections(0, config.timeout)
        self._sources: dict[bytes, Address] = {}
        """Page -> where it can be fetched."""
        self._rank = 0

    def attach(self, model: Model | EncoderModel, site: Site) -> None:
        page_bytes, config = site.blocks.page_bytes, self._config
        self._rank = site.rank
        self._connections.close()
        self._connections = Connections(page_bytes, config.timeout)
        if not config.sends or self._listener is not None:
            return
        self._buffer = PageBuffer(self._places(site), page_bytes)
        if site.device.resident:  # a GPU fills it faster than the system gives it
            self._threads.submit(self._buffer.populate)
        port = config.kv_port + site.rank if config.kv_port else 0
        self._listener = Listener(config.kv_ip, port, self._buffer)
        host, bound = self._listener.address
        log.info("send KV blocks at %s:%d, up to %d of %d bytes", host, bound, self._buffer.count, page_bytes)

    def _places(self, site: Site) -> int:
        """Return how many pages fit into the buffer of this rank.

        Raises:
            ConfigError: these are too few, or there is not as much memory, or ranks are on other machines.
        """
        page_bytes, config = site.blocks.page_bytes, self._config
        given = f"kv_transfer_config: kv_buffer_size={config.kv_buffer_size!r}"
        if site.neighbours < site.ranks:
            raise ConfigError(
                f"kv_transfer_config: a model of {site.ranks} ranks on several machines can't send its KV blocks. Run "
                "it with kv_role kv_consumer, or on one machine."
            )
        count = config.buffer_bytes // site.ranks // page_bytes
        if count < _LEAST:
            raise ConfigError(
                f"{given} is too small: a KV block has {page_bytes} bytes in each of {site.ranks} ranks. Set at least "
                f"{_LEAST * page_bytes * site.ranks}."
            )
        if count * page_bytes * site.ranks > (there := memory()):
            raise ConfigError(
                f"{given} is more than the {there / 2**30:.1f} GiB of memory that this machine has. Set a smaller size."
            )
        return count

    def detach(self) -> None:
        self._connections.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._sources.clear()

    def call(self, method: str, args: Mapping[str, Any]) -> Any:
        """Return where this rank sends, or how many pages it keeps; take in what it is to expect, to drop, or where
        others' pages are."""
        match method:
            case "address":
                return self._address()
            case "places":
                return self._buffer.count - self._buffer.count // _SPARE_PART
            case "expect":
                return self._buffer.expect(args["pages"])
            case "drop":
                _forget(self._sources, args["pages"])
                return self._buffer.drop(args["pages"])
            case "sources":
                return self._learn(args["pages"], args["ranks"])
            case "forget":
                return _forget(self._sources, args["pages"])
            case _:
                return super().call(method, args)

    def _learn(self, pages: Sequence[bytes], ranks: Sequence[Address]) -> None:
        """Pages can be fetched from these ranks of another server; not if this rank is not among them."""
        if self._rank < len(ranks):
            host, port = ranks[self._rank]
            self._sources.update(dict.fromkeys(pages, (host, port)))

    def _address(self) -> Address | None:
        """Where this rank sends; the host is empty if that is at all interfaces."""
        if self._listener is None:
            return None
        host, port = self._listener.address
        return "" if host in _ALL_INTERFACES else host, port

    def rooms(self, page_bytes: int) -> tuple[int, int]:
        return max(1, _ROOM_BYTES // page_bytes), _ROOMS

    def store(self, names: Sequence[bytes], pages: Tensor) -> Future[Collection[int]]:
        return self._threads.submit(self._buffer.store, names, pages)

    def load(self, names: Sequence[bytes], room: Callable[[], Tensor]) -> Future[Collection[int]]:
        sources = [None if self._buffer.has(name) else self._sources.get(name) for name in names]
        return self._threads.submit(self._load, names, sources, room)

    def _load(
        self, names: Sequence[bytes], sources: Sequence[Address | None], room: Callable[[], Tensor]
    ) -> Collection[int]:
        """Copy own pages, and fetch others, those in a row from one server together."""
        into = room()
        missing: list[int] = []
        first = 0
        while first < len(names):
            end = first + 1
            while end < len(names) and sources[end] == sources[first]:
                end += 1
            lacking = self._fill(sources[first], names[first:end], into[first:end])
            missing += [first + index for index in lacking]
            first = end
        return missing

    def _fill(self, source: Address | None, names: Sequence[bytes], into: Tensor) -> Collection[int]:
        if source is None:
            rows = into.numpy()
            with self._buffer.read(names) as pages:
                for index, page in enumerate(pages):
                    if page is not None:
                        rows[index] = page
                return [index for index, page in enumerate(pages) if page is None]
        try:
            return self._connections.fetch(source, names, into)
        except OSError as error:
            level = logging.DEBUG if isinstance(error, PausedError) else logging.WARNING
            log.log(level, "failed to fetch %d KV blocks from %s:%d: %s", len(names), *source, error)
            return range(len(names))


def _forget(sources: dict[bytes, Address], pages: Sequence[bytes]) -> None:
    for page in pages:
        sources.pop(page, None)


def build_worker(context: FeatureContext) -> TransferWorker | None:
    config = context.settings_of(KvTransferSettings).config()
    return None if config is None else TransferWorker(config)
