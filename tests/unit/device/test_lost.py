"""Which errors of a device are for good."""

from __future__ import annotations

import pytest
import torch

from octavo.device.cpu import CpuDevice
from octavo.device.lost import is_sticky, reason_lost

STICKY = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    torch.AcceleratorError("CUDA error: unspecified launch failure"),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA error: misaligned address"),
    torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:35, remote process exited"),
]
PASSING = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory"),
    torch.AcceleratorError("CUDA error: invalid configuration argument"),
    RuntimeError("a processor wrote: illegal memory access"),
    ValueError("shapes do not match"),
]


@pytest.mark.parametrize("error", STICKY, ids=str)
def test_a_context_that_is_broken_is_lost(error: Exception) -> None:
    assert is_sticky(error)
    reason = reason_lost(error, torch.device("cpu"))
    assert reason == str(error).splitlines()[0]


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_other_errors_leave_a_device_that_still_computes(error: Exception) -> None:
    assert not is_sticky(error)
    assert reason_lost(error, torch.device("cpu")) is None


def test_in_doubt_the_device_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "ones", broken)
    error = ValueError("something else, which came of it")
    assert reason_lost(error, torch.device("cuda")) == "CUDA error: an illegal memory access was encountered"
    monkeypatch.setattr(torch, "ones", full)
    assert reason_lost(error, torch.device("cuda")) is None


def test_the_error_names_the_device_and_the_remedy() -> None:
    lost = CpuDevice().loss(STICKY[0])
    assert lost is not None
    assert CpuDevice().name in str(lost)
    assert "an illegal memory access was encountered. Every request ends with this error" in str(lost)
    assert "start it again" in str(lost)
    assert CpuDevice().loss(PASSING[0]) is None
