"""Host-side parameters of FP8 keys and values on a GPU; see `triton_fp8.py` for the kernels."""

from __future__ import annotations

import functools

import torch

from octavo.device.launch_sizes import next_power_of_2

PLAIN, E4M3, E5M2 = 0, 1, 2
FORMS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}


def tile_width(head_dim: int, form: int) -> int:
    """Return the channels of a tile, a power of two: matrix units process 16 at once, and FP8 tiles are halved."""
    width = next_power_of_2(head_dim)
    return max(16 if form == PLAIN else 32, width)


@functools.cache
def means_of(device: torch.device) -> int:
    """Return the kernels' argument MEANS: how to convert FP8 on this device."""
    if device.type != "cuda":
        return 0
    return 2 if torch.cuda.get_device_capability(device) >= (8, 9) else 1


def form_of(dtype: torch.dtype) -> int:
    """Return the kernels' argument FORM for a cache of this dtype."""
    return FORMS.get(dtype, PLAIN)
