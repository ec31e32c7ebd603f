"""`RayNodes`: machines of a Ray cluster that run a model's ranks (`--distributed-executor-backend ray`).

Ray reserves the devices and starts a process on each machine, which does what `octavo serve --node-rank N` does. Plans
and tokens do not pass through Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.core.errors import ConfigError

log = logging.getLogger(__name__)

BACKEND = "--distributed-executor-backend ray"
_ADDRESS = "RAY_ADDRESS"
_NOTICE_S = 5.0
_END_S = 10.0


def fewest_machines(devices: Sequence[float], num_ranks: int, kind: str) -> int:
    """Return the least number of machines that have the same number of devices for the ranks.

    Args:
        devices: of each machine.
        kind: "GPU" or "CPU", Ray's name of the devices.

    Raises:
        ConfigError: no number of machines has enough.
    """
    for count in range(1, num_ranks + 1):
        if num_ranks % count == 0 and sum(have >= num_ranks // count for have in devices) >= count:
            return count
    having = ", ".join(f"{have:g}" for have in sorted(devices, reverse=True)) or "none"
    raise ConfigError(
        f"{BACKEND}: {num_ranks} ranks need as many {kind}s, the same number on each machine. The machines of the Ray "
        f"cluster have {having}. Lower --tensor-parallel-size or --pipeline-parallel-size, or add machines "
        "(ray start --address=HEAD:PORT)."
    )


class RayNodes:
    """Reserved machines of a Ray cluster, one bundle of a placement group each.

    Attributes:
        address: of this machine, where the others reach it.
        count: number of machines.
    """

    def __init__(self, num_ranks: int, nodes: int, device: str, patience_s: float = 600.0) -> None:
        """Connect to the cluster at `RAY_ADDRESS`, or to that of this machine, and reserve a device for each rank.

        Args:
            nodes: number of machines; 1 for as few as have enough devices.
            device: "cpu" for ranks on CPUs, "cuda" on GPUs, "auto" on GPUs if the cluster has any.
            patience_s: how long to wait for devices that others use.

        Raises:
            ConfigError: Ray is not installed or not running, or its machines have too few devices.
        """
        self._ray = _imported()
        self._connected = _connect(self._ray)
        self._running: list[Any] = []
        self._group: Any = None
        try:
            machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            self._kind = "CPU" if device == "cpu" or (device == "auto" and not _have_gpus(machines)) else "GPU"
            each = [machine.get(self._kind, 0.0) for machine in machines]
            self.count = nodes if nodes > 1 else fewest_machines(each, num_ranks, self._kind)
            self._each = num_ranks // self.count
            self.address: str = self._ray.util.get_node_ip_address()
            self._reserve(patience_s)
        except BaseException:
            self.close()
            raise

    def start(self, tasks: Sequence[Callable[[], int]]) -> None:
        """Run one task on each machine, in a process that sees the machine's reserved devices.

        Args:
            tasks: functions that Ray can serialize; their code and packages are installed on all machines.
        """
        own = {"num_gpus": self._each, "num_cpus": 0} if self._kind == "GPU" else {"num_cpus": self._each}
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for number, task in enumerate(tasks):
            remote = self._ray.remote(_call).options(
                **own,
                max_retries=0,
                name=f"octavo node {number}",
                scheduling_strategy=strategy(self._group, placement_group_bundle_index=number),
            )
            self._running.append(remote.remote(task))

    def check(self) -> None:
        """Raise ConfigError if a task has failed."""
        for number, task in enumerate(self._running):
            if not self._ray.wait([task], timeout=0)[0]:
                continue
            try:
                code = self._ray.get(task)
            except Exception as error:  # what the task raised, or how its process ended
                cause = getattr(error, "cause", None) or error
                raise ConfigError(f"{BACKEND}: machine {number} could not start its ranks: {cause}") from error
            raise ConfigError(f"{BACKEND}: machine {number} ended with code {code} before its ranks had joined.")

    def close(self) -> None:
        """Wait a short time for the tasks' ends, and free the devices. Call again without effect."""
        if self._running:
            _, pending = self._ray.wait(self._running, num_returns=len(self._running), timeout=_END_S)
            for task in pending:  # cancelled while its result arrives, a task can have Ray abort this process
                self._ray.cancel(task, force=True)
            self._running = []
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None
        if self._connected:
            self._ray.shutdown()
            self._connected = False

    def _reserve(self, patience_s: float) -> None:
        where = "STRICT_SPREAD" if self.count > 1 else "STRICT_PACK"
        self._group = self._ray.util.placement_group([{self._kind: self._each}] * self.count, strategy=where)
        began = time.monotonic()
        if self._group.wait(min(_NOTICE_S, patience_s)):
            return
        wanted = f"{self._each} {self._kind}s on each of {self.count} machines"
        log.warning("waiting for Ray to reserve %s (ray status shows who uses them)", wanted)
        if not self._group.wait(max(0.0, patience_s - (time.monotonic() - began))):
            raise ConfigError(
                f"{BACKEND}: Ray did not reserve {wanted} within {patience_s:g} s. ray status shows what the cluster "
                "has and who uses it."
            )


def _call(task: Callable[[], int]) -> int:
    return task()


def _imported() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(f"{BACKEND} needs Ray: pip install 'octavo[ray]' on all machines ({error}).") from error
    return ray


def _connect(ray: Any) -> bool:
    """Connect to a cluster; return whether this call did, rather than the code that runs this engine.

    Ray replaces the process's handler of SIGTERM, which ends the engine in order; it is put back.
    """
    if ray.is_initialized():
        return False
    address = os.environ.get(_ADDRESS, "auto")
    with _handlers_kept():
        try:
            _knock(address)
            ray.init(address=address, logging_level=logging.WARNING)
        except ConfigError:
            raise
        except Exception as error:  # Ray raises ConnectionError, ValueError and errors of its own
            raise ConfigError(
                f"{BACKEND}: no Ray cluster at {_ADDRESS}={address} ({error}). Start one with ray start --head here "
                "and ray start --address=HEAD:PORT on the other machines."
            ) from error
    return True


def _knock(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT, for which Ray would wait for minutes."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"{BACKEND}: {_ADDRESS}={address} is Ray Client's, but the engine must run on a machine of the cluster. "
            f"Set {_ADDRESS} to HOST:PORT of the head, or leave it out there."
        )
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_NOTICE_S).close()


@contextlib.contextmanager
def _handlers_kept() -> Any:
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not the main thread, in which Ray sets no handler either
            signal.signal(signal.SIGTERM, before)


def _have_gpus(machines: Sequence[Mapping[str, float]]) -> bool:
    return any(machine.get("GPU") for machine in machines)
