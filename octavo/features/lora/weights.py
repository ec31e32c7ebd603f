"""`AdapterWeights`: the weights behind one uid, and where they are."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from octavo.cache.lease import Lease
from octavo.core.errors import OctavoError
from octavo.features.lora.layout import Manifest
from octavo.features.lora.payload import Source
from octavo.schedule.request import Request


class State(enum.StrEnum):
    """Where the weights are. READING ends in HOST, LOADING in DEVICE; failures end in DISK."""

    DISK = "disk"
    READING = "reading"
    HOST = "host"
    LOADING = "loading"
    DEVICE = "device"


@dataclass(slots=True, eq=False)
class AdapterWeights:
    """The weights of an adapter, or of a sum of several.

    Attributes:
        names: of its adapters.
        label: the same, for display.
        parts: uids of the adapters that a sum is made of; empty for a single one.
        num_blocks: blocks that it takes.
        general: see `Manifest.general`.
        experts: it changes experts.
        changes_keys: see `Manifest.changes_keys`.
        gains: it has gains (DoRA), which depend on the model's weights, too.
        added_tokens: how many tokens it adds to the vocabulary.
        on_host: there is a copy in the host's memory.
        version: of the files as they were read the last time, on all ranks; "" if they were not.
        began: time at which the last read or load began, in seconds.
        index: its row of the worker's tables, in LOADING and DEVICE.
        announced: the worker was told of the index.
        requests: those that use it and are not released.
        refused: requests that waited when it failed, each with the error that it ends with.
        error: why it failed the last time.
        pinned: evicted only if nothing else can be.
        retired: no name leads to it any more; it is freed after its last request.
        stale: made for earlier weights of the model; evicted as soon as no step reads it.
        hasty: it was evicted while a request waited for it; while it is loaded again, no other request passes.
        closed: no further request of it is admitted until it has left the device: another adapter needs its place.
        used: a number that grows with its last use.
        asked: number of the last plan that asked about a request that waits for it.
    """

    uid: int
    names: tuple[str, ...]
    label: str
    sources: tuple[Source, ...]
    manifest: Manifest
    num_blocks: int
    general: bool
    experts: bool
    changes_keys: bool
    gains: bool
    added_tokens: int = 0
    parts: tuple[int, ...] = ()
    state: State = State.DISK
    on_host: bool = False
    reading: Future[list[Any]] | None = None
    version: str = ""
    lease: Lease | None = None
    began: float = 0.0
    index: int = -1
    announced: bool = False
    requests: set[Request] = field(default_factory=set)
    refused: dict[Request, OctavoError] = field(default_factory=dict)
    error: OctavoError | None = None
    failures: int = 0
    pinned: bool = False
    retired: bool = False
    stale: bool = False
    hasty: bool = False
    closed: bool = False
    used: int = 0
    asked: int = -2

    @property
    def read_by_steps(self) -> bool:
        """Whether a launched step may read its blocks."""
        return any(request.slot >= 0 for request in self.requests)
