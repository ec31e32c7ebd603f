"""`Residency`: brings adapters into the host's memory and into blocks of the device, and takes them out again.

Disk -> host: the worker half reads files in threads of its own, from the moment on at which a request's adapter is
known. It may report an adapter as read as soon as it can be loaded, and copy it to the host's memory later (`host.py`).
Host -> device: blocks are taken, and filled on a copy stream while steps run. If that takes nothing from others, it
begins as soon as the adapter was read or a request of it comes, else once the planner asks. Both are left least
recently used first: the host when it holds `max_host` adapters, the device when requests or other adapters lack blocks,
or when `max_device` adapters are there.

Requests that the planner does not ask about (`EngineHook.admit`) keep no room on the host from those that it does ask
about: after a failed step it asks about one suspect only, and would wait for the others in vain.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import msgspec

from octavo.core.errors import EngineStateError, ModelFileError, OctavoError
from octavo.features.lora.payload import Reading, ReadResult, page_names
from octavo.features.lora.weights import AdapterWeights, State
from octavo.schedule.hooks import NO_ROOM
from octavo.schedule.pages import Pages
from octavo.schedule.request import Request

log = logging.getLogger(__name__)

_MOST_FAILURES = 3
"""Loads into blocks that may fail in a row before the requests that wait end with an error."""
_PATIENCE_S = 1.0
"""Seconds after which an adapter that lacks one of `max_device` places has another one closed."""


class Residency:
    """Where all adapters are.

    Attributes:
        reads, loads, evictions: counters: from disk to host, from host to device, and out of the device.
        read_s, load_s: seconds of the reads and loads that succeeded.
        in_steps: the adapters of the last plan.

    Args:
        max_device, max_host: most adapters there.
        clock: seconds.
    """

    def __init__(
        self, pages: Pages, max_device: int, max_host: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.reads = self.loads = self.evictions = 0
        self.read_s = self.load_s = 0.0
        self.in_steps: Collection[AdapterWeights] = ()
        self._pages = pages
        self._max_host = max_host
        self._clock = clock
        self._free = list(range(max_device - 1, -1, -1))
        self._all: dict[int, AdapterWeights] = {}
        """Uid -> what is not only on disk, or is on its way."""
        self._reading: list[AdapterWeights] = []
        self._unsent: list[tuple[str, int]] = []
        """Methods of the worker half that are to be called with these uids after a sleep, in order."""
        self._uses = self._turns = 0
        self._roomless: list[AdapterWeights] = []
        """Adapters that requests wait for and the host has no room for, longest first."""
        self._placeless: dict[AdapterWeights, float] = {}
        """Since when adapters lack a place on the device."""
        self._any_closed = False
        self._last_asked = 0
        """Number of the last plan that asked about a request that waits."""

    @property
    def num_on_host(self) -> int:
        return sum(one.on_host for one in self._all.values())

    @property
    def reads_any(self) -> bool:
        """Whether adapters are being read."""
        return bool(self._reading)

    @property
    def num_blocks(self) -> int:
        """Blocks that adapters hold."""
        return sum(one.num_blocks for one in self._all.values() if one.lease is not None)

    @property
    def everything(self) -> list[AdapterWeights]:
        """The adapters that are not only on disk."""
        return list(self._all.values())

    @property
    def resident(self) -> list[AdapterWeights]:
        """The adapters on the device."""
        return [one for one in self._all.values() if one.state is State.DEVICE]

    def touch(self, weights: AdapterWeights) -> None:
        """Note a use."""
        self._uses += 1
        weights.used = self._uses

    def poll(self) -> None:
        """Take in what was read since the last call; called once before each plan."""
        self._turns += 1
        self._send_unsent()
        ended = [one for one in self._reading if one.reading is not None and one.reading.done()]
        for weights in ended:
            self._reading.remove(weights)
            self._read(weights)
            self.load_ahead(weights)
        if self._placeless or self._any_closed:
            self._close()

    def prefetch(self, weights: AdapterWeights) -> None:
        """Begin to read the files, if they are not on the host and there is room."""
        if not self._pages.awake or weights.state is not State.DISK or not self._may_read(weights, asked=False):
            return
        self._begin_to_read(weights)

    def load_ahead(self, weights: AdapterWeights) -> None:
        """Begin to load an adapter before the planner asks about a request of it, or before one comes, if it is on the
        host and takes nothing from others: no place for which one waits, and no blocks but free ones."""
        if not self._pages.awake or weights.state is not State.HOST or weights.closed or weights.retired:
            return
        if self._free and not self._placeless and self._pages.missing(weights.num_blocks) <= 0:
            self._load(weights, None)

    def _begin_to_read(self, weights: AdapterWeights) -> None:
        self._send_unsent()
        weights.error = None
        reading = Reading(weights.uid, weights.sources, weights.manifest)
        weights.reading = self._pages.call("read", msgspec.to_builtins(reading))
        weights.state, weights.began = State.READING, self._clock()
        self._all[weights.uid] = weights
        self._reading.append(weights)

    def bring(self, weights: AdapterWeights, request: Request | None) -> int:
        """Take the next step to the device for a request that waits; return what `EngineHook.admit` is to return."""
        weights.asked = self._last_asked = self._turns
        if weights.closed or not self._pages.awake:
            return 0
        if weights.state is State.DISK and self._may_read(weights, asked=True):
            self._begin_to_read(weights)
        if weights.state is State.HOST:
            return self._load(weights, request)
        return NO_ROOM if weights.hasty and weights.state is State.LOADING else 0

    def reclaim(self, num_blocks: int, keep: AdapterWeights | None) -> None:
        """Free up to about `num_blocks` blocks of adapters that no step reads, other than `keep`."""
        for one in self._quiet(keep):
            if num_blocks <= 0:
                return
            num_blocks -= one.num_blocks
            self.evict(one)

    def evict(self, weights: AdapterWeights) -> None:
        """Take an adapter that no step reads out of the device."""
        self._leave(weights)
        self.evictions += 1
        weights.hasty = bool(weights.requests)

    def forget_host(self, weights: AdapterWeights) -> None:
        """Drop the copy in the host's memory, if there is one and no load reads it."""
        if weights.on_host and weights.state is not State.LOADING:
            weights.on_host = False
            if weights.state is State.DEVICE:
                self._notify("drop", weights.uid)
        if weights.state is State.HOST:
            weights.state = State.DISK
        self._tidy(weights)

    def remove(self, weights: AdapterWeights) -> bool:
        """Free all that an adapter without requests has; False if it is being read or loaded, and must wait for it."""
        if weights.state in (State.READING, State.LOADING):
            return False
        if weights.state is State.DEVICE:
            self._leave(weights)
        self.forget_host(weights)
        return True

    def park(self) -> None:
        """Leave the device with all adapters: the blocks lose their contents."""
        for one in self.resident:
            self._leave(one)

    def weights_replaced(self) -> None:
        """Have the worker half compute later gains with the new weights."""
        self._pages.call("replaced", {})

    def outdate(self, weights: AdapterWeights) -> None:
        """Read an adapter anew, as soon as no step reads it: it was made for other weights of the model."""
        if weights.state is State.DEVICE and not weights.read_by_steps:
            self._leave(weights)
        weights.stale = weights.state in (State.DEVICE, State.READING)
        self.forget_host(weights)

    def renounce(self) -> None:
        """The worker may not know what is on the device."""
        for one in self._all.values():
            one.announced = False

    # Host

    def _may_read(self, weights: AdapterWeights, *, asked: bool) -> bool:
        """Return whether there is room on the host; those that lacked it before come first.

        Args:
            asked: the planner asks about a request of the adapter, so that only those of the same kind come first, and
                the copies of others can go.
        """
        self._roomless = [one for one in self._roomless if one.requests and one.state is State.DISK]
        first = next((one for one in self._roomless if not asked or self._asked_about(one)), weights)
        if first is weights and self._make_host_room(asked=asked):
            return True
        if weights not in self._roomless:
            self._roomless.append(weights)
        return False

    def _asked_about(self, weights: AdapterWeights) -> bool:
        """Whether this plan or the last one asked about a request of the adapter."""
        return self._turns - weights.asked <= 1

    def _make_host_room(self, *, asked: bool) -> bool:
        held = [one for one in self._all.values() if one.on_host or one.state is State.READING]
        if len(held) < self._max_host:
            return True
        there = [one for one in held if one.state in (State.HOST, State.DEVICE)]
        free = [one for one in there if self._unneeded_on_host(one)]
        if not free and asked:
            free = [one for one in there if not self._asked_about(one)]
        if not free:
            return False
        self.forget_host(min(free, key=lambda one: (one.state is State.HOST, one.used)))
        return True

    def _unneeded_on_host(self, weights: AdapterWeights) -> bool:
        return weights.state is State.DEVICE or not weights.requests

    def _read(self, weights: AdapterWeights) -> None:
        assert weights.reading is not None
        reading, weights.reading = weights.reading, None
        error = reading.exception()
        if error is None and (error := self._versions_read(weights, reading.result())) is None:
            weights.state, weights.on_host = State.HOST, True
            self.reads += 1
            self.read_s += self._clock() - weights.began
            self.touch(weights)
            if weights.stale:
                weights.stale = False
                self.forget_host(weights)
            return
        weights.state = State.DISK
        if not isinstance(error, OctavoError):
            log.error("failed to read the adapter %s", weights.label, exc_info=error)
            error = EngineStateError(f"The adapter {weights.label} could not be read: {error}")
        self._fail(weights, error)

    def _versions_read(self, weights: AdapterWeights, results: list[Any]) -> OctavoError | None:
        """Note which files the ranks have read; return an error if those of one machine have read different ones."""
        ranks = {msgspec.convert(one, ReadResult) for one in results}
        weights.version = ", ".join(sorted(f"{one.machine} {one.version}" for one in ranks))
        if len(ranks) == len({one.machine for one in ranks}):
            return None
        return ModelFileError(f"The files of the adapter {weights.label} changed while they were read. Ask again.")

    def _fail(self, weights: AdapterWeights, error: OctavoError) -> None:
        """End the requests that wait; later ones try again."""
        weights.error = error
        weights.refused |= dict.fromkeys(weights.requests, error)
        weights.failures = 0
        self._tidy(weights)

    # Device

    def _load(self, weights: AdapterWeights, request: Request | None) -> int:
        if not self._free and not self._make_place(weights):
            self._placeless.setdefault(weights, self._clock())
            return NO_ROOM if self._waits_long(weights) and not self._place_comes else 0
        missing = self._pages.missing(weights.num_blocks, request)
        if missing > 0:
            if sum(one.num_blocks for one in self._quiet(weights)) < missing:
                return NO_ROOM
            self.reclaim(missing, weights)
        lease = self._pages.take(weights.num_blocks)
        if lease is None:
            return NO_ROOM
        try:
            names = page_names(weights.uid, weights.num_blocks)
            self._pages.load(names, list(lease.held), partial(self._loaded, weights))
        except Exception:
            lease.release()
            raise
        self._placeless.pop(weights, None)
        weights.lease, weights.index, weights.state = lease, self._free.pop(), State.LOADING
        weights.began = self._clock()
        return NO_ROOM if weights.hasty else 0

    def _make_place(self, weights: AdapterWeights) -> bool:
        quiet = self._quiet(weights)
        if quiet:
            self.evict(quiet[0])
        return bool(quiet)

    def _waits_long(self, weights: AdapterWeights) -> bool:
        """Whether an adapter has lacked a place for long."""
        since = self._placeless.get(weights)
        return since is not None and self._clock() - since > _PATIENCE_S

    def _close(self) -> None:
        """Close as many adapters as others have lacked a place for long; open the rest.

        Otherwise busy adapters would keep their places for ever. Requests of the base model and of other adapters pass.
        """
        self._placeless = {one: since for one, since in self._placeless.items() if one.requests}
        # While all slots are taken, the planner asks about no request, and nothing changes.
        waiting = sum(self._waits_long(one) and self._last_asked - one.asked <= 1 for one in self._placeless)
        closed = [one for one in self.resident if one.closed]
        for one in closed[waiting:]:
            one.closed = False
        busy = [one for one in self.resident if one.read_by_steps and not one.closed]
        busy.sort(key=lambda one: (one.pinned, sum(request.slot >= 0 for request in one.requests), one.used))
        for one in busy[: max(0, waiting - len(closed))]:
            one.closed = True
        self._any_closed = waiting > 0

    @property
    def _place_comes(self) -> bool:
        """Whether steps compute a closed adapter's last requests. After a failure they may leave them out."""
        return any(one.closed for one in self.in_steps)

    def _quiet(self, keep: AdapterWeights | None) -> list[AdapterWeights]:
        """Return the adapters on the device that no step reads, in the order in which they leave it."""
        found = [one for one in self.resident if one is not keep and not one.read_by_steps]
        return sorted(found, key=lambda one: (one.pinned, bool(one.requests), one.used))

    def _loaded(self, weights: AdapterWeights, whole: bool) -> None:
        if whole:
            weights.state, weights.failures = State.DEVICE, 0
            self.loads += 1
            self.load_s += self._clock() - weights.began
            self.touch(weights)
            return
        self._leave(weights)
        self.forget_host(weights)
        weights.failures += 1
        log.warning("the adapter %s did not reach the device (%d)", weights.label, weights.failures)
        if weights.failures >= _MOST_FAILURES:
            self._fail(weights, EngineStateError(f"The adapter {weights.label} could not be loaded onto the device."))

    def _leave(self, weights: AdapterWeights) -> None:
        """Take it out of the device. The blocks go last: should that fail, nothing reads blocks that may be free."""
        lease, index = weights.lease, weights.index
        assert lease is not None
        weights.lease, weights.index, weights.announced, weights.stale = None, -1, False, False
        weights.closed = False
        weights.state = State.HOST if weights.on_host else State.DISK
        self._free.append(index)
        self._tidy(weights)
        lease.release()

    def _tidy(self, weights: AdapterWeights) -> None:
        """Forget an adapter that is only on disk."""
        if weights.state is State.DISK and not weights.on_host:
            self._placeless.pop(weights, None)
            if self._all.pop(weights.uid, None) is not None:
                self._notify("forget", weights.uid)

    def _notify(self, method: str, uid: int) -> None:
        """Tell the worker half that something of an adapter is no longer needed, after the sleep if there is one."""
        self._unsent.append((method, uid))
        self._send_unsent()

    def _send_unsent(self) -> None:
        if not self._pages.awake:
            return
        unsent, self._unsent = self._unsent, []
        for method, uid in unsent:
            self._pages.call(method, {"uid": uid})
