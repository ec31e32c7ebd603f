"""Requirements common to all libraries."""

from __future__ import annotations

import importlib.util

import torch

from octavo.nn.attention.base import BackendRequest
from octavo.nn.attention.kv_dtype import name_of


def common_reason(request: BackendRequest, module: str, title: str) -> str | None:
    """Return the reason why library `title`, imported as `module`, can't serve the request; None if it may."""
    if request.device.type != "cuda":
        return f"runs on cuda, not on {request.device.type}"
    if importlib.util.find_spec("triton") is None:
        return "decodes with Octavo's own kernels, which need the package triton"
    if importlib.util.find_spec(module) is None:
        return f"needs {title} (the module {module}), which is not installed"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, not in {name_of(request.dtype)}: --dtype bfloat16"
    if request.kv_dtype not in (None, request.dtype):
        return "reads keys and values in the model's dtype: leave --kv-cache-dtype out"
    if request.spec.slopes is not None:
        return "has no linear attention biases (ALiBi)"
    if request.spec.sinks:
        return "is not asked for attention sinks"
    if request.spec.chunked:
        return "has no windows that begin at multiples of their size"
    if request.spec.head_dim % 8 or request.spec.head_dim > 256:
        return f"has heads of up to 256 channels, a multiple of 8, not {request.spec.head_dim}"
    return None
