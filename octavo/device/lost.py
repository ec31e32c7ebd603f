"""Recognize a lost device: its context is broken and every later call in this process fails."""

from __future__ import annotations

import torch

_CUDA_ERRORS = ("CUDA error", "Triton Error [CUDA]", "CUDA driver error")
_STICKY = (
    "illegal memory access",
    "illegal instruction",
    "illegal address",
    "misaligned address",
    "device-side assert",
    "unspecified launch failure",
    "uncorrectable ECC error",
    "hardware stack error",
    "invalid address space",
    "invalid program counter",
    "launch timed out",
    "the launch timed out and was terminated",
    "NVLink error",
    "context is destroyed",
)
"""CUDA's texts for errors after which "the process must be terminated and relaunched" (CUDA Runtime API,
`cudaError`)."""


def is_sticky(error: BaseException) -> bool:
    """Return True if the error's type or text means that the device or a communicator can't be used any more."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, torch.distributed.DistBackendError):
        return True
    text = str(error)
    from_cuda = isinstance(error, torch.AcceleratorError) or any(mark in text for mark in _CUDA_ERRORS)
    return from_cuda and any(phrase in text for phrase in _STICKY)


def reason_lost(error: BaseException, device: torch.device) -> str | None:
    """Return why `device` is lost after `error`, as one line, or None if it can still compute.

    If the error is inconclusive, a probe decides. Kernel errors surface late and anywhere, so the probe's error is then
    the better reason.
    """
    if is_sticky(error):
        return _first_line(error)
    found = None if device.type == "cpu" else _probe(device)
    return None if found is None else _first_line(found)


def _probe(device: torch.device) -> Exception | None:
    """Run a small computation and wait for it; return its error, except for lack of memory."""
    try:
        torch.ones(1, device=device).add_(1)
        torch.accelerator.synchronize(device)
    except torch.OutOfMemoryError:
        return None
    except Exception as error:
        return error
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
