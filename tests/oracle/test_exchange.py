"""Sums over processes that share memory, against float64; and a process that is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from octavo.core.errors import DeviceLostError
from octavo.native.bindings import StepArgs
from octavo.native.builder import ProgramBuilder
from octavo.native.exchange import Exchange
from octavo.native.program import Pool, Program
from octavo.parallel.shared import SharedMemory

SIZES = (1, 3, 16, 17, 2048, 2049, 40_001, 7, 70_003, 64)
"""Numbers of a round: less than a vector, whole ones and not, and larger than any before."""
ROUNDS = 300
DTYPES = (torch.float32, torch.bfloat16)


@contextmanager
def shared_memory() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def given(rank: int, number: int) -> Tensor:
    """A rank's numbers in a round, which differ in each."""
    size, dtype = SIZES[number % len(SIZES)], DTYPES[number // len(SIZES) % 2]
    return torch.randn(size, generator=torch.Generator().manual_seed(number * 8 + rank)).to(dtype)


def take_part(descriptor: int, rank: int, size: int) -> None:
    """Compare the sums and gathered parts of many rounds, in a process of its own."""
    ranks = SharedMemory(Exchange(descriptor, rank, size, limit_s=60.0))
    for number in range(ROUNDS):
        parts = [given(other, number) for other in range(size)]
        exact = torch.stack(parts).double().sum(0)
        total = ranks.all_reduce(parts[rank].clone())
        torch.testing.assert_close(
            total.double(), exact, rtol=2e-7 if total.dtype == torch.float32 else 4e-3, atol=1e-6
        )
        bits = total.view(torch.uint8)
        assert all(torch.equal(bits, one) for one in ranks.all_gather(bits)), "not the same bits on all ranks"
        gathered = ranks.all_gather(parts[rank])
        assert all(torch.equal(one, other) for one, other in zip(gathered, parts, strict=True))


def start(descriptor: int, *args: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, *map(str, (descriptor, *args))]
    return subprocess.Popen(command, pass_fds=[descriptor], env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_sums_of_processes(size: int) -> None:
    with shared_memory() as descriptor:
        processes = [start(descriptor, rank, size) for rank in range(size)]
        assert [one.wait(120) for one in processes] == [0] * size


def test_numbers_of_another_dtype_are_refused() -> None:
    with shared_memory() as descriptor:
        ranks = SharedMemory(Exchange(descriptor, 0, 1))
        with pytest.raises(TypeError, match=r"not torch\.int32"):
            ranks.all_reduce(torch.ones(3, dtype=torch.int32))


def test_a_missing_rank_is_an_error_from_then_on() -> None:
    with shared_memory() as descriptor:
        exchange = Exchange(descriptor, 0, 2, limit_s=0.01)
        ranks = SharedMemory(exchange)
        for _ in range(2):
            with pytest.raises(DeviceLostError, match=r"rank 1 did not take part in a sum within 0\.01 s"):
                ranks.all_reduce(torch.ones(3))
        b = ProgramBuilder.make(64, 64)
        b.all_reduce(0, 1, 16, exchange)
        x = torch.ones(1, 16)
        step = StepArgs(tokens=1)
        step.external[:2] = x.data_ptr(), x.data_ptr()
        with pytest.raises(DeviceLostError):
            Program(Pool(1), b).run(0, 2, step)


def run_program(descriptor: int, rank: int, size: int, threads: int, inputs: list[Tensor]) -> list[Tensor]:
    """Add twice each rank's rows to ones, and gather the rows; each step with another number of tokens."""
    exchange, columns = Exchange(descriptor, rank, size, limit_s=60.0), inputs[0].shape[1]
    b = ProgramBuilder.make(columns * 4, columns * 4 * size, attended_bytes=columns * 4)
    b.all_reduce(0, 2, columns, exchange, add=2.0)
    b.all_gather(0, 1, columns, exchange)
    program, found = Program(Pool(threads), b), []
    for x in inputs:
        gathered, total = torch.empty(len(x), columns * size), torch.ones(len(x), columns)
        step = StepArgs(tokens=len(x))
        step.external[:] = x.data_ptr(), gathered.data_ptr(), total.data_ptr()
        program.run(0, len(b.ops), step)
        found += [total, gathered]
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_sums_in_programs_of_several_threads(size: int) -> None:
    shapes, columns = [1, 3, 70, 2, 33] * 8, 4112
    inputs = [[given_rows(rank, i, rows, columns) for i, rows in enumerate(shapes)] for rank in range(size)]
    with shared_memory() as descriptor, ThreadPoolExecutor(size) as ranks:
        jobs = [ranks.submit(run_program, descriptor, rank, size, 2, inputs[rank]) for rank in range(size)]
        found = [job.result(120) for job in jobs]
    for one in found:
        for i in range(len(shapes)):
            parts = [inputs[rank][i] for rank in range(size)]
            exact = 1 + 2 * torch.stack(parts).double().sum(0)
            torch.testing.assert_close(one[2 * i].double(), exact, rtol=1e-6, atol=1e-6)
            assert torch.equal(one[2 * i], found[0][2 * i]), "not the same bits on all ranks"
            assert torch.equal(one[2 * i + 1], torch.cat(parts, dim=1))


def given_rows(rank: int, number: int, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(number * 8 + rank))


if __name__ == "__main__":
    torch.set_num_threads(1)
    take_part(*map(int, sys.argv[1:]))
