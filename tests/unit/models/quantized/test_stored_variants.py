"""Variants of the formats that published checkpoints have, and variants that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_kit import EXAMPLES, Example, Stored, gptq
from torch import Tensor

from octavo.models.load.quantized.table import dequantizing
from octavo.models.load.tensors import TensorCheckpoint
from octavo.nn.weights import TensorSpec

ROWS, COLUMNS = 64, 128


def written(example: Example) -> tuple[Stored, Tensor]:
    torch.manual_seed(0)
    return example.write(torch.randn(ROWS, COLUMNS))


def values_of(stored: Stored, settings: dict[str, Any]) -> Tensor:
    tensors = {f"a.proj.{suffix}": tensor for suffix, tensor in stored.items()}
    view = dequantizing(TensorCheckpoint(tensors), {"quantization_config": settings})
    assert view.names() == {"a.proj.weight"}
    return view.tensor("a.proj.weight", TensorSpec((ROWS, COLUMNS), torch.float32)).double()


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_symmetric_gptq_with_zero_points_of_version_2(bits: int) -> None:
    """The configuration names version 1, whose zero points would be one larger."""
    stored, exact = written(gptq(bits, 32, version=2))
    torch.testing.assert_close(values_of(stored, gptq(bits, 32).settings), exact)


def test_asymmetric_gptq_has_the_version_of_its_configuration() -> None:
    stored, _ = written(gptq(4, 32, version=2))
    values = values_of(stored, gptq(4, 32, symmetric=False).settings)
    torch.testing.assert_close(values, values_of(stored, gptq(4, 32, version=2).settings) - steps(stored))


def steps(stored: Stored) -> Tensor:
    """Each weight's scale."""
    return stored["scales"].T.double().repeat_interleave(32, 1)


def test_gptq_with_the_older_name_of_its_version() -> None:
    example = gptq(4, 32, version=2, symmetric=False)
    stored, exact = written(example)
    settings = {**example.settings, "format": "gptq_v2"}
    del settings["checkpoint_format"]
    torch.testing.assert_close(values_of(stored, settings), exact)


def test_gptq_groups_that_are_all_zero_are_in_order() -> None:
    example = EXAMPLES["gptq-4"]
    stored, exact = written(example)
    stored["g_idx"].zero_()
    torch.testing.assert_close(values_of(stored, example.settings), exact)
