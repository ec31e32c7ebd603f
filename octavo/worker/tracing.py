"""`TorchTracer`: torch's profiler, which records torch's operations and GPU activity."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from octavo.core.profiling import ProfileSettings


class TorchTracer:
    """A `Tracer`. Start and stop it in the thread that computes, the only thread that it traces."""

    def __init__(self, device: torch.device, settings: ProfileSettings) -> None:
        self._device = device
        self._settings = settings
        self._profile: profile | None = None

    def start(self) -> None:
        settings = self._settings
        gpu = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *gpu],
            with_stack=settings.with_stack,
            record_shapes=settings.record_shapes,
            profile_memory=settings.with_memory,
            with_flops=settings.with_flops,
            acc_events=True,  # without it, torch 2.11 warns about lost events of earlier cycles
        )
        self._profile.start()

    def stop(self, path: Path) -> None:
        ended, self._profile = self._profile, None
        assert ended is not None, "the profiler was not started"
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        ended.stop()
        ended.export_chrome_trace(str(path))
