"""Memory of one GPU that other GPUs' processes write to: CUDA IPC through the driver.

https://docs.nvidia.com/cuda/cuda-driver-api/ (cuIpcGetMemHandle, cuIpcOpenMemHandle)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_char, c_size_t, c_uint, c_uint64
from dataclasses import dataclass

import torch
from torch import Tensor

Share = Callable[[str, bytes], list[bytes]]
"""(name, a rank's data) -> the data of all ranks, in their order; waits for them."""

_PEER_ACCESS = 1


class PeerAccessError(RuntimeError):
    """The GPUs can't write to each other's memory; the text says why."""


class _Handle(ctypes.Structure):
    _fields_ = (("data", c_char * 64),)


@dataclass(frozen=True, slots=True)
class Inboxes:
    """The memory that ranks receive in, as this rank reaches it.

    Attributes:
        rank: this rank's number.
        addresses: [ranks] int64, of each rank's inbox of zeros at first.
        counts: [programs] int32, how many exchanges each program has made; zeros at first.
        slot: words that a rank can send to an inbox at a time, for each program.
    """

    rank: int
    addresses: Tensor
    counts: Tensor
    slot: int

    @property
    def ranks(self) -> int:
        return len(self.addresses)


def inbox_bytes(ranks: int, programs: int, slot: int) -> int:
    """Return the size of one rank's inbox: see `triton_peers.py`."""
    return 8 * programs * 2 * (ranks + 1) * slot


def map_inboxes(rank: int, share: Share, programs: int, slot: int) -> Inboxes:
    """Allocate this rank's inbox on the current GPU, and map those of the others. It is freed with the process.

    Raises:
        PeerAccessError: a rank could not do so; all ranks raise it.
    """
    driver = _driver()
    ranks = len(share("present", b""))
    own = c_uint64()
    handle = _Handle()
    size = inbox_bytes(ranks, programs, slot)
    problem = ""
    try:
        _check(driver, driver.cuMemAlloc_v2(byref(own), c_size_t(size)), "allocate memory")
        _check(driver, driver.cuMemsetD8_v2(own, 0, c_size_t(size)), "clear memory")
        _check(driver, driver.cuIpcGetMemHandle(byref(handle), own), "share memory")
    except PeerAccessError as error:
        problem = str(error)
    torch.cuda.synchronize()
    handles = share("handle", bytes(handle) if not problem else b"")
    _agree(share, "allocated", problem)
    addresses = []
    try:
        for number, data in enumerate(handles):
            mapped = c_uint64(own.value)
            if number != rank:
                its = _Handle.from_buffer_copy(data)
                status = driver.cuIpcOpenMemHandle_v2(byref(mapped), its, c_uint(_PEER_ACCESS))
                _check(driver, status, f"map the memory of rank {number}")
            addresses.append(mapped.value)
    except PeerAccessError as error:
        problem = str(error)
    _agree(share, "mapped", problem)
    counts = torch.zeros(programs, dtype=torch.int32, device="cuda")
    return Inboxes(rank, torch.tensor(addresses, dtype=torch.int64, device="cuda"), counts, slot)


def _agree(share: Share, name: str, problem: str) -> None:
    """Raise PeerAccessError if any rank has a problem."""
    raise_first(share(name, problem.encode()))


def raise_first(problems: Sequence[bytes]) -> None:
    """Raise PeerAccessError with the first of the ranks' problems; empty ones are none."""
    for rank, problem in enumerate(problems):
        if problem:
            raise PeerAccessError(f"rank {rank} {problem.decode()}")


def _driver() -> ctypes.CDLL:
    torch.cuda.current_stream()  # makes the context current
    return ctypes.CDLL("libcuda.so.1")


def _check(driver: ctypes.CDLL, status: int, action: str) -> None:
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, byref(text))
        raise PeerAccessError(f"can't {action}: {(text.value or b'unknown error').decode()}")
