"""Vectors as bytes, against torch's own conversions."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import numpy as np
import pytest
import torch

from octavo.features.pooling.http.encode import EmbedDtype, encode
from octavo.features.pooling.params import Pooled

TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def numbers() -> torch.Tensor:
    """All sizes from the smallest to the largest, and those that lie in the middle between two of a short format."""
    bits = torch.arange(0, 1 << 32, 65521, dtype=torch.int64).to(torch.int32).view(torch.float32)
    short = torch.arange(1 << 8, dtype=torch.int32).to(torch.uint8)
    codes = [short.view(kind).float() for kind in (torch.float8_e4m3fn, torch.float8_e5m2)]
    near = [one * factor for one in codes for factor in (1.0, 1.0625, 1.125, 1.25)]
    wanted = torch.cat([bits, *near, torch.tensor([0.0, -0.0, 464.0, 465.0, 61440.0, 61439.0])])
    return wanted[~wanted.isnan()]


@pytest.mark.parametrize("dtype", get_args(EmbedDtype))
def test_each_number_is_rounded_to_its_nearest(dtype: Any) -> None:
    values = numbers()
    pooled = Pooled([len(values)], values.numpy().tobytes())
    made = torch.frombuffer(bytearray(encode(pooled, dtype)), dtype=TORCH[dtype]).float()
    if dtype == "fp8_e4m3":
        values = values.clamp(-448, 448)  # torch 2.11 makes NaN of larger numbers
    expected = values.to(TORCH[dtype]).float()
    assert torch.equal(made.isnan(), expected.isnan())
    assert torch.equal(made.nan_to_num(nan=0), expected.nan_to_num(nan=0))
    assert torch.equal(made.signbit(), expected.signbit())


def test_no_number_stays_none() -> None:
    pooled = Pooled([1], np.array([np.nan], dtype="<f4").tobytes())
    for dtype in get_args(EmbedDtype):
        assert torch.frombuffer(bytearray(encode(pooled, dtype)), dtype=TORCH[dtype]).float().isnan().all()


def test_the_order_of_bytes_is_chosen() -> None:
    pooled = Pooled([2], np.array([1.5, -2.0], dtype="<f4").tobytes())
    assert np.frombuffer(encode(pooled, "float32", "big"), dtype=">f4").tolist() == [1.5, -2.0]
    assert np.frombuffer(encode(pooled, "float32", "little"), dtype="<f4").tolist() == [1.5, -2.0]
    assert encode(pooled, "bfloat16", "big") == encode(pooled, "bfloat16", "little")[1::-1] + b"\xc0\x00"


def test_a_server_that_makes_no_vectors_does_without_numpy() -> None:
    code = "import octavo.server.process.serving, sys; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
