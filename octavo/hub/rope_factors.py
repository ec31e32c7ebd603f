"""Rotary scalings that GGUF stores as one divisor per frequency: Llama 3's, recovered as a formula, and LongRoPE's."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

from octavo.core.errors import ModelFileError
from octavo.hub.gguf_file import GGUFFile, GGUFTensor

_F32 = 0
_TOLERANCE = 1e-3


def llama3_scaling(path: Path, tensor: GGUFTensor, theta: float) -> dict[str, Any] | None:
    """Return the `rope_scaling` that yields the divisors in the tensor (rope_freqs.weight, one per pair of channels).

    Llama 3 divides a frequency by 1 where its wavelength is short and by `factor` where it is long. In between, the
    inverse divisor is linear in `original / wavelength`, from `low` to `high`. Only the ratios of `original`, `low` and
    `high` matter, so `low` is set to 1, the value in all released models. Return None if all divisors are 1.

    Raises:
        ModelFileError: the divisors do not follow that formula.
    """
    divisors = _read(path, tensor)
    factor = divisors[-1]
    if all(abs(divisor - 1) < _TOLERANCE for divisor in divisors):
        return None
    waves = [2 * math.pi * theta ** (pair / len(divisors)) for pair in range(len(divisors))]
    original, high = _fit(path, waves, divisors, factor)
    for wave, divisor in zip(waves, divisors, strict=True):
        blend = min(max((original / wave - 1) / (high - 1), 0.0), 1.0)
        expected = 1 / ((1 - blend) / factor + blend)
        if abs(expected - divisor) > _TOLERANCE * divisor:
            raise _unknown(path)
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": round(high, 4),
        "original_max_position_embeddings": round(original),
    }


def longrope_scaling(
    file: GGUFFile, *, long: str, short: str, original: int, attention_factor: float | None
) -> dict[str, Any]:
    """Return the `rope_scaling` of LongRoPE.

    Args:
        long, short: names of the tensors with the divisors.
        original: positions in training.
        attention_factor: of cosines and sines; None for the paper's.

    Raises:
        ModelFileError: a tensor is missing or is not one-dimensional float32.
    """
    if short not in file.tensors:
        raise ModelFileError(f"{file.path} has {long} but lacks {short}. Convert the model again.")
    factor = {} if attention_factor is None else {"attention_factor": attention_factor}
    return {
        "rope_type": "longrope",
        "long_factor": _read(file.path, file.tensors[long]),
        "short_factor": _read(file.path, file.tensors[short]),
        "original_max_position_embeddings": original,
        **factor,
    }


def _fit(path: Path, waves: list[float], divisors: list[float], factor: float) -> tuple[float, float]:
    """Return `original` and `high`, from the two outermost frequencies in the blended range, which is linear."""
    blended = [
        (1 / wave, (1 / divisor - 1 / factor) / (1 - 1 / factor))
        for wave, divisor in zip(waves, divisors, strict=True)
        if 1 + _TOLERANCE < divisor < factor * (1 - _TOLERANCE)
    ]
    if len(blended) < 2 or factor <= 1:
        raise _unknown(path)
    (x0, y0), (x1, y1) = blended[0], blended[-1]
    slope = (y0 - y1) / (x0 - x1)  # original / (high - 1)
    start = y0 - slope * x0  # -1 / (high - 1)
    if slope <= 0 or start >= 0:
        raise _unknown(path)
    return slope / -start, 1 + 1 / -start


def _read(path: Path, tensor: GGUFTensor) -> list[float]:
    if tensor.kind != _F32 or len(tensor.shape) != 1 or not tensor.shape[0]:
        raise ModelFileError(f"{path}: {tensor.name} must be one-dimensional float32. Convert the model again.")
    with path.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes)))


def _unknown(path: Path) -> ModelFileError:
    return ModelFileError(
        f"{path}: the rotary divisors in rope_freqs.weight are not of Llama 3's form, the only one supported. "
        "Use the model's safetensors checkpoint instead."
    )
