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
        room: bytes of rows that each other rank can store at a time.
    """

    programs: int
    slot: int
    storers: int
    room: int

    def cells(self, ranks: int) -> int:
        """Return the bytes of the cells."""
        return 8 * self.programs * 2 * (ranks + 1) * self.slot

    def total(self, ranks: int) -> int:
        """Return the bytes of cells and rows."""
        return self.cells(ranks) + 2 * (ranks - 1) * self.room


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
    """Allocate this rank's memory on the current GPU, and map that of the others; see `map_memory`.

    Args:
        sizes_for: returns the sizes for a number of ranks.
    """
    addresses = map_memory(rank, share, lambda ranks: sizes_for(ranks).total(ranks))
    return Inboxes(rank, torch.tensor(addresses, dtype=torch.int64, device="cuda"), sizes_for(len(addresses)))


def map_memory(rank: int, share: Share, size_for: Callable[[int], int], name: str = "") -> list[int]:
    """Allocate memory of zeros on the current GPU, and map that of the other ranks; return the address of each one's.
    It is freed with the process.

    Args:
        size_for: returns the bytes for a number of ranks.
        name: of this memory, if there is other.

    Raises:
        PeerAccessError: a rank could not do so; all ranks raise it.
    """
    driver = driver_api()
    ranks = len(share(f"{name}present", b""))
    own = c_uint64()
    handle = _Handle()
    size = size_for(ranks)
    problem = ""
    try:
        check(driver, driver.cuMemAlloc_v2(byref(own), c_size_t(size)), "allocate memory")
        check(driver, driver.cuMemsetD8_v2(own, 0, c_size_t(size)), "clear memory")
        check(driver, driver.cuIpcGetMemHandle(byref(handle), own), "share memory")
    except PeerAccessError as error:
        problem = str(error)
    torch.cuda.synchronize()
    handles = share(f"{name}handle", bytes(handle) if not problem else b"")
    _agree(share, f"{name}allocated", problem)
    addresses = []
    try:
        for number, data in enumerate(handles):
            mapped = c_uint64(own.value)
            if number != rank:
                its = _Handle.from_buffer_copy(data)
                status = driver.cuIpcOpenMemHandle_v2(byref(mapped), its, c_uint(_PEER_ACCESS))
                check(driver, status, f"map the memory of rank {number}")
            addresses.append(mapped.value)
    except PeerAccessError as error:
        problem = str(error)
    _agree(share, f"{name}mapped", problem)
    return addresses


def _agree(share: Share, name: str, problem: str) -> None:
    """Raise PeerAccessError if any rank has a problem."""
    raise_first(share(name, problem.encode()))


def raise_first(problems: Sequence[bytes]) -> None:
    """Raise PeerAccessError with the first of the ranks' problems; empty ones are none."""
    for rank, problem in enumerate(problems):
        if problem:
            raise PeerAccessError(f"rank {rank} {problem.decode()}")


def driver_api() -> ctypes.CDLL:
    """Return the functions of the driver, whose context is the current thread's then."""
    torch.cuda.current_stream()  # makes the context current
    return ctypes.CDLL("libcuda.so.1")


def check(driver: ctypes.CDLL, status: int, action: str) -> None:
    """Raise PeerAccessError if a function of the driver has failed."""
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, byref(text))
        raise PeerAccessError(f"can't {action}: {(text.value or b'unknown error').decode()}")
