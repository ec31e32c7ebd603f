"""FlashInfer (https://docs.flashinfer.ai), which compiles kernels at their first use, which takes minutes."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.device.transfer import upload
from octavo.nn.attention.base import AttentionSpec, BackendRequest
from octavo.nn.attention.libraries.prompts import Prompts
from octavo.nn.attention.libraries.request import common_reason

_MODULE = "flashinfer"
_WORKSPACE = 128 << 20
_HEADS = (64, 128, 256)


def reason_against(request: BackendRequest) -> str | None:
    """Return None if it can serve the request, else the reason against it."""
    if (reason := common_reason(request, _MODULE, "FlashInfer")) is not None:
        return reason
    if request.spec.head_dim not in _HEADS:
        return f"has heads of {', '.join(map(str, _HEADS))} channels, not {request.spec.head_dim}"
    return None


class FlashInfer:
    """Attention of prompts by FlashInfer, planned on the host once per step. Each kind of layer has its own wrapper."""

    name = "flashinfer"

    def __init__(self, device: torch.device) -> None:
        self._library = importlib.import_module(_MODULE)
        self._workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        self._wrappers: dict[AttentionSpec, Any] = {}
        self._sent = torch.cuda.Event()

    def attend(self, q: Tensor, cache: Tensor, prompts: Prompts, spec: AttentionSpec) -> Tensor:
        if spec not in prompts.plans:
            prompts.plans[spec] = self._planned(q.dtype, cache.shape[3], prompts, spec)
        out: Tensor = prompts.plans[spec].run(q, cache, enable_pdl=False)  # earlier kernels must have ended
        return out

    def _planned(self, dtype: torch.dtype, page: int, prompts: Prompts, spec: AttentionSpec) -> Any:
        if spec not in self._wrappers:
            self._wrappers[spec] = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        wrapper = self._wrappers[spec]
        pages = -(-prompts.lengths // page)
        self._sent.synchronize()  # the wrapper sends plans from one pinned buffer
        try:
            wrapper.plan(
                _starts(prompts.counts),
                _starts(pages),
                _blocks(prompts, pages),
                torch.from_numpy(prompts.lengths - (pages - 1) * page),
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                page,
                causal=True,
                sm_scale=spec.scale,
                window_left=-1 if spec.window is None else spec.window - 1,
                logits_soft_cap=spec.soft_cap,
                q_data_type=dtype,
                kv_data_type=dtype,
            )
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"FlashInfer could not prepare its kernels: {error}. It compiles them with the CUDA toolkit's nvcc; "
                "leave --attention-backend out to do without."
            ) from error
        self._sent.record()
        return wrapper


def _starts(counts: np.ndarray) -> Tensor:
    """Return the start indices of counts, [n + 1] int32 on the host, for plans."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return torch.from_numpy(starts)


def _blocks(prompts: Prompts, pages: np.ndarray) -> Tensor:
    """Return the rows' block ids concatenated, without entries after a row's last block."""
    tables = prompts.block_tables
    width = tables.shape[1]
    places = np.concatenate([row * width + np.arange(count, dtype=np.int32) for row, count in enumerate(pages)])
    return tables.flatten().index_select(0, upload(places.astype(np.int32), tables.device))
