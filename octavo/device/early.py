"""What is known or done before torch is imported: the kind of device, a GPU's context. No torch here."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DRIVER = Path("/dev/nvidiactl")


def is_cpu(device: str) -> bool:
    """Return whether the model will probably run on a CPU.

    Args:
        device: as for `select_device`.
    """
    return device == "cpu" or (device == "auto" and not DRIVER.exists())


def begin_context(device: str) -> threading.Thread | None:
    """Begin to create the context of the first visible GPU in a thread, if a process without torch will compute there;
    return the thread. torch finds it, or waits for it.

    Both take about as long, and neither needs the other. Errors are left to torch, which reports them.

    Args:
        device: as for `select_device`.
    """
    if device == "cpu" or "torch" in sys.modules or not DRIVER.exists() or importlib.util.find_spec("triton") is None:
        return None
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does; the driver reads it only once
    thread = threading.Thread(target=_create, name="octavo-context", daemon=True)
    thread.start()
    return thread


@contextmanager
def without_collection() -> Iterator[None]:
    """Import in this block without the garbage collector, which takes a tenth of the time: imports make many objects
    and no garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _create() -> None:
    """See https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__PRIMARY__CTX.html; calls release the GIL."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
