"""What the driver is given to launch a kernel, with a driver that only takes notes."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.nn.ops import nvrtc

_CLUSTER, _OVERLAP = 4, 6  # CUlaunchAttributeID


class Driver:
    def __init__(self) -> None:
        self.launches: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def cuLaunchKernelEx(self, how: Any, function: Any, arguments: Any, extra: None) -> int:
        form = how._obj
        kinds = [form.attributes[i].kind for i in range(form.count)]
        values = [ctypes.cast(argument, ctypes.POINTER(c_int))[0] for argument in arguments]
        self.launches.append((tuple(form.grid), tuple(form.block), form.shared, form.stream, kinds, values))
        return 0


@pytest.mark.parametrize("cluster", [1, 8])
def test_each_launch_has_its_own_grid_stream_and_arguments(cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(nvrtc, "driver", lambda: driver)
    monkeypatch.setattr(nvrtc, "_binary", lambda source, defines: b"")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    kernel = nvrtc.Kernel("kernel", "", {}, 128, 4096, cluster)
    one = int.from_bytes(ctypes.string_at(ctypes.addressof(c_float(1.0)), 4), "little")
    for stream, grid, arguments in ((5, (3, 2, 1), [c_void_p(70), c_float(1.0)]), (6, (9, 8, 7), [c_int(4)])):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda stream=stream: SimpleNamespace(cuda_stream=stream))
        kernel.launch(grid, arguments)
    kinds = [_OVERLAP] if cluster == 1 else [_OVERLAP, _CLUSTER]
    shape = (128, 1, 1), 4096
    assert driver.launches == [((3, 2, 1), *shape, 5, kinds, [70, one]), ((9, 8, 7), *shape, 6, kinds, [4])]
