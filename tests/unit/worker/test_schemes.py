"""How much memory packed weights need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from toy_models import LLAMA

from octavo.config import ModelConfig
from octavo.hub.files import ModelFiles
from octavo.worker.schemes import needed_bytes

EIGHT, FOUR = {"num_bits": 8}, {"num_bits": 4}


def files(tmp_path: Path, method: str | None, **further: Any) -> ModelFiles:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(100))
    config = LLAMA | ({"quantization_config": {"quant_method": method}} if method else {}) | further
    return ModelFiles(name="tiny", path=tmp_path, format="safetensors", weights=(path,), config=config)


@pytest.mark.parametrize(
    ("method", "settings", "needed"),
    [
        ("awq", {}, 200),
        ("awq", {"dtype": "float16"}, 400),
        ("fp8", {}, 106),
        ("fp8", {"dtype": "bfloat16"}, 400),
        ("modelopt", {}, 400),
        (None, {}, 400),
    ],
)
def test_a_packed_model_fits_where_an_expanded_one_would_not(
    method: str | None, settings: dict[str, Any], needed: int, tmp_path: Path
) -> None:
    given = files(tmp_path, method)
    assert given.weight_bytes == 100
    assert needed_bytes(400, lambda: 400, ModelConfig(**settings), given, resident=True) == needed
    assert needed_bytes(400, lambda: 400, ModelConfig(**settings), given, resident=False) == 400


@pytest.mark.parametrize(
    ("weights", "activations", "needed"), [(EIGHT, EIGHT, 106), (EIGHT, None, 112), (FOUR, EIGHT, 400)]
)
def test_weights_of_8_bits_keep_their_bytes(
    weights: dict[str, int], activations: dict[str, int] | None, needed: int, tmp_path: Path
) -> None:
    groups = {"all": {"weights": weights, "input_activations": activations}}
    settings = {"quant_method": "compressed-tensors", "config_groups": groups}
    given = files(tmp_path, None, quantization_config=settings)
    assert needed_bytes(400, lambda: 400, ModelConfig(), given, resident=True) == needed


@pytest.mark.parametrize(("bits", "needed"), [(2, 200), (3, 150), (4, 125), (8, 125)])
def test_packed_integers_keep_about_their_bytes(bits: int, needed: int, tmp_path: Path) -> None:
    given = files(tmp_path, None, quantization_config={"quant_method": "gptq", "bits": bits})
    assert needed_bytes(400, lambda: 400, ModelConfig(), given, resident=True) == needed


@pytest.mark.parametrize(
    ("method", "bits", "further", "needed"),
    [
        ("bitsandbytes", "load_in_4bit", {}, 125),
        ("bitsandbytes", "load_in_8bit", {"num_experts": 4}, 112),
        ("bitsandbytes", "load_in_4bit", {"num_experts": 4}, 400),
        ("torchao", "", {}, 112),
    ],
)
def test_tables_and_floats_in_groups_keep_about_their_bytes(
    method: str, bits: str, further: dict[str, int], needed: int, tmp_path: Path
) -> None:
    """But experts in tables of 4 bits are expanded."""
    given = files(tmp_path, None, quantization_config={"quant_method": method, bits: True}, **further)
    assert needed_bytes(400, lambda: 400, ModelConfig(), given, resident=True) == needed


@pytest.mark.parametrize(("method", "needed"), [("gptq", 50), ("fp8", 27), ("modelopt", 100)])
def test_a_rank_needs_its_share(method: str, needed: int, tmp_path: Path) -> None:
    """Of 400 bytes without quantization and 100 on disk, a quarter."""
    assert needed_bytes(100, lambda: 400, ModelConfig(), files(tmp_path, method), resident=True) == needed


def test_experts_stay_packed(tmp_path: Path) -> None:
    assert needed_bytes(400, lambda: 400, ModelConfig(), files(tmp_path, "fp8", num_experts=4), resident=True) == 106


def test_types_of_a_gguf_are_counted_one_by_one(tmp_path: Path) -> None:
    """Four bits stay four unless a fused projection has another type; tables are expanded."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    kinds = {"attn_q": Kind.Q4_K, "attn_k": Kind.Q4_K, "attn_v": Kind.Q6_K, "attn_output": Kind.Q4_K}
    tensors = {f"blk.0.{name}.weight": kind for name, kind in kinds.items()}
    for name, kind in {**tensors, "token_embd.weight": Kind.Q8_0, "output.weight": Kind.IQ3_S}.items():
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor(name, np.zeros((2, 256 // per_block * size), np.uint8), raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    path = tmp_path / "model.gguf"
    given = ModelFiles(name="tiny", path=path, format="gguf", weights=(path,), config=LLAMA)
    needed = 512 * (3 * 10 + 6 + 2 * 16) // 8
    assert needed_bytes(10000, lambda: 10000, ModelConfig(), given, resident=True) == needed
    assert needed_bytes(100, lambda: 100, ModelConfig(), given, resident=True) == 100
