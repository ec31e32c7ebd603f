"""FlashAttention-3 (https://github.com/Dao-AILab/flash-attention, folder `hopper`), for Hopper."""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import Tensor

from octavo.nn.attention.base import AttentionSpec, BackendRequest
from octavo.nn.attention.libraries.prompts import Prompts
from octavo.nn.attention.libraries.request import common_reason

_MODULE = "flash_attn_interface"


def reason_against(request: BackendRequest) -> str | None:
    """Return None if it can serve the request, else the reason against it."""
    if (reason := common_reason(request, _MODULE, "FlashAttention-3")) is not None:
        return reason
    if torch.cuda.get_device_capability(request.device)[0] != 9:
        return "is FlashAttention-3, which runs only on Hopper GPUs"
    left_out = _left_out()
    for name, wanted in (
        ("SOFTCAP", request.spec.soft_cap is not None),
        ("LOCAL", request.spec.window is not None),
        ("FP16", request.dtype == torch.float16),
        ("PAGEDKV", True),
        ("VARLEN", True),
    ):
        if wanted and name in left_out:
            return f"is installed without what this model needs (built with FLASHATTENTION_DISABLE_{name})"
    return None


def _left_out() -> set[str]:
    """Return the features that the installed build was compiled without, if it reports them."""
    if importlib.util.find_spec("flash_attn_config") is None:
        return set()
    flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    return {name.rpartition("_DISABLE_")[2] for name, value in flags.items() if "_DISABLE_" in name and value}


class FlashAttention3:
    """Attention of prompts by FlashAttention-3, without splitting contexts, since there are many queries."""

    name = "flash_attn"

    def __init__(self) -> None:
        self._attend = importlib.import_module(_MODULE).flash_attn_with_kvcache

    def attend(self, q: Tensor, cache: Tensor, prompts: Prompts, spec: AttentionSpec) -> Tensor:
        out: Tensor = self._attend(
            q,
            cache[:, 0].transpose(1, 2),
            cache[:, 1].transpose(1, 2),
            cache_seqlens=prompts.seq_lens,
            page_table=prompts.block_tables,
            cu_seqlens_q=prompts.query_start,
            max_seqlen_q=int(prompts.counts.max()),
            softmax_scale=spec.scale,
            causal=True,
            window_size=_window(spec),
            softcap=spec.soft_cap or 0.0,
            num_splits=1,
        )
        return out


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """Return the number of visible keys to the left and to the right of a query."""
    return (-1, -1) if spec.window is None else (spec.window - 1, 0)
