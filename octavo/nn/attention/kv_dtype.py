"""The dtype of stored keys and values."""

from __future__ import annotations

import torch

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
INT8 = {"int8": torch.int8, "int8_per_token_head": torch.int8}
_NAMES = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


def kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a setting; "auto" is the model's dtype."""
    return (FP8 | INT8).get(name, dtype)


def name_of(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def is_fp8(dtype: torch.dtype | None) -> bool:
    return dtype in _NAMES
