"""A core and its client over real sockets, with the toy device for a model and a thread for a process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from octavo.cache.cache import KVCache
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine import wire
from octavo.engine.client import CoreClient
from octavo.engine.connections import listen_at
from octavo.engine.core_server import CoreServer
from octavo.engine.fake import fake_info
from octavo.engine.frames import frame
from octavo.engine.loop import EngineLoop
from octavo.engine.phases import PhaseTimer
from octavo.engine.toy import ToyDevice
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler


class ThreadCore:
    """What `CoreClient` needs of a `CoreProcess`, in a thread. `fail` is raised instead of starting.

    `lost_at` is the step at which the device is lost.
    """

    def __init__(self, folder, *, fail=None, gate=None, lost_at=None, hooks=()):
        self.address = f"{folder}/core.sock"
        self._listener = listen_at(self.address)
        self.fail, self.gate, self.lost_at, self.hooks = fail, gate, lost_at, hooks
        self.code = None
        self.killed = threading.Event()
        self.loop = None
        self.stacks_shown = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        self.code = CoreServer(self._listener).run(self._make)

    def _make(self, on_phase):
        timer = PhaseTimer(on_phase)
        timer.begin("weights")
        if self.fail is not None:
            raise self.fail
        timer.end()
        cache = KVCache(64, 4)
        limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200)
        self.loop = GatedLoop(
            Scheduler(cache, limits, make_policy("fcfs"), hooks=self.hooks),
            ToyDevice(64, 4, lost_at=self.lost_at),
            gate=self.gate,
        )
        return self.loop, fake_info()

    @property
    def alive(self):
        return self._thread.is_alive() and not self.killed.is_set()

    async def exited(self):
        while self.alive:
            await asyncio.sleep(0.01)

    def obituary(self):
        return "The engine core was killed by SIGKILL."

    def show_stacks(self):
        self.stacks_shown += 1

    def stop(self):
        """A process that was killed is gone; a thread must still be told."""
        if self.killed.is_set():
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(self.address)
                peer.sendall(frame(wire.encode(wire.Shutdown())))
        self._thread.join()


class GatedLoop(EngineLoop):
    """Steps only while the gate is open, so that a test decides when the core makes progress."""

    def __init__(self, *args, gate=None):
        super().__init__(*args)
        self.gate = gate

    def step(self):
        if self.gate is not None:
            self.gate.wait()
        return super().step()


class Turnstile:
    """A gate that lets so many steps through, and all of them once it is set."""

    def __init__(self, steps):
        self._places, self._open = threading.Semaphore(steps), False

    def wait(self):
        if not self._open:
            self._places.acquire()

    def set(self):
        self._open = True
        self._places.release()


@contextlib.asynccontextmanager
async def client_of(folder, *, stall_after_s=60.0, on_phase=None, max_unread_tokens=None, **core):
    process = ThreadCore(folder, **core)
    client = await CoreClient.start(
        process, stall_after_s=stall_after_s, max_unread_tokens=max_unread_tokens, on_phase=on_phase
    )
    try:
        yield client, process
    finally:
        if process.gate is not None:
            process.gate.set()
        await client.close()


def ask(name, prompt=(1, 2, 3), **params):
    return GenerateRequest(
        id=name, tokens=list(prompt), params=SamplingParams(**{"seed": 0, "max_tokens": 8, **params})
    )


async def tokens_of(client, request):
    return [token async for delta in client.generate(request) for token in delta.tokens]


async def until(condition):
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


def run(coroutine):
    return asyncio.run(coroutine)
