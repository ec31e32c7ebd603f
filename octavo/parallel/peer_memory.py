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
class Sizes:
    """Sizes of the memory that a rank receives in: cells (`triton_peers.py`), then room for rows (`triton_stores.py`).

    Attributes:
        programs: of a launch that exchanges cells, at most.
        slot: words that a rank can send at a time, for each program.
        storers: programs of a launch that stores rows.
        groups: most groups of a storer's rows.
        room: bytes of rows that each other rank can store at a time.
    """

    programs: int
    slot: int
    storers: int
    groups: int
    room: int

    def cells(self, ranks: int) -> int:
        """Return the bytes of the cells."""
        return 8 * self.programs * 2 * (ranks + 1) * self.slot

    def total(self, ranks: int) -> int:
        """Return the bytes of cells, rows and flags."""
        return self.cells(ranks) + 2 * (ranks - 1) * (self.room + 4 * self.storers * self.groups)


class Inboxes:
    """The memory that ranks receive in, as this rank reaches it.

    Attributes:
        rank: this rank's number.
        ranks: their number.
        sizes: of each rank's memory.
        cells, rooms: [ranks] int64, addresses of each rank's cells, and of its room for rows.
        counts: [programs] int32, how many exchanges of cells each program has made; zeros at first.
        turns: [storers] int32, how many launches have stored rows; zeros at first.
    """

    def __init__(self, rank: int, addresses: Tensor, sizes: Sizes) -> None:
        """
        Args:
            addresses: [ranks] int64, of each rank's memory of zeros.
        """
        self.rank, self.ranks, self.sizes = rank, len(addresses), sizes
        self.cells, self.rooms = addresses, addresses + sizes.cells(self.ranks)
        self.counts = torch.zeros(sizes.programs, dtype=torch.int32, device=addresses.device)
        self.turns = torch.zeros(sizes.storers, dtype=torch.int32, device=addresses.device)


def map_inboxes(rank: int, share: Share, sizes_for: Callable[[int], Sizes]) -> Inboxes:
    """Allocate this rank's memory on the current GPU, and map that of the others. It is freed with the process.

    Args:
        sizes_for: returns the sizes for a number of ranks.

    Raises:
        PeerAccessError: a rank could not do so; all ranks raise it.
    """
    driver = _driver()
    ranks = len(share("present", b""))
    own = c_uint64()
    handle = _Handle()
    sizes = sizes_for(ranks)
    size = sizes.total(ranks)
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
    return Inboxes(rank, torch.tensor(addresses, dtype=torch.int64, device="cuda"), sizes)


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
