"""Reading tensors out of GGUF files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from octavo.core.errors import ModelFileError
from octavo.hub.files import ModelFiles
from octavo.hub.gguf_names import hf_name
from octavo.models.load import open_checkpoint
from octavo.models.load.gguf import GGUFCheckpoint
from octavo.models.load.gguf_blocks import CODES, INTEGERS, SUPPORTED
from octavo.nn.quant.blocks import dequantized
from octavo.nn.weights import TensorSpec

SHAPE = (6, 512)
SPEC = TensorSpec(SHAPE, torch.float32)
# Byte offsets of each block's float16 fields; random bits there could be infinite.
HALVES = {
    Kind.Q4_0: [0],
    Kind.Q4_1: [0, 2],
    Kind.Q5_0: [0],
    Kind.Q5_1: [0, 2],
    Kind.Q8_0: [0],
    Kind.Q2_K: [80, 82],
    Kind.Q3_K: [108],
    Kind.Q4_K: [0, 2],
    Kind.Q5_K: [0, 2],
    Kind.Q6_K: [208],
    Kind.IQ4_NL: [0],
    Kind.IQ4_XS: [0],
    Kind.IQ1_S: [0],
    Kind.IQ2_XXS: [0],
    Kind.IQ2_XS: [0],
    Kind.IQ2_S: [0],
    Kind.IQ3_XXS: [0],
    Kind.IQ3_S: [0],
    Kind.TQ1_0: [52],
    Kind.TQ2_0: [64],
}
PLAIN = {Kind.F32: np.float32, Kind.F16: np.float16}


def random_raw(kind: Kind, shape: tuple[int, int] = SHAPE) -> np.ndarray:
    """A tensor as stored, with every bit of the quantized values random."""
    random = np.random.default_rng(int(kind))
    if kind in PLAIN:
        return random.standard_normal(shape).astype(PLAIN[kind])
    if kind == Kind.BF16:
        return gguf.quants.quantize(random.standard_normal(shape).astype(np.float32), kind)
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (shape[0], shape[1] // per_block, size), dtype=np.uint8)
    for at in HALVES.get(kind, []):
        halves = random.standard_normal(blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = halves.view(np.uint8).reshape(*halves.shape, 2)
    if kind == Kind.IQ1_M:
        blocks[:, :, 55] &= 0xBF  # the highest bit of the scale's exponent
    if kind == Kind.MXFP4:
        blocks[:, :, 0] %= 200  # the exponent
    return blocks.reshape(shape[0], -1)


def write(path: Path, tensors: dict[str, tuple[Kind, np.ndarray]], **keys: int) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(keys.get("heads", 1))
    writer.add_head_count_kv(keys.get("kv_heads", 1))
    for name, (kind, raw) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=None if kind in PLAIN else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", sorted(SUPPORTED), ids=lambda kind: kind.name)
def test_values_equal_those_of_the_gguf_library(kind: Kind, tmp_path: Path) -> None:
    raw = random_raw(kind)
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", {"blk.3.ffn_up.weight": (kind, raw)}))
    name = "blk.3.ffn_up.weight"
    values = checkpoint.tensor(name, SPEC)
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(raw, kind)))
    assert checkpoint.names() == {name}
    assert checkpoint.shape(name) == SHAPE
    assert torch.isfinite(expected).all()
    assert torch.equal(values.float(), expected)


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q6_K, Kind.F16], ids=lambda kind: kind.name)
def test_tensors_longer_than_a_piece(kind: Kind, tmp_path: Path) -> None:
    raw = random_raw(kind, (2100, 512))
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", {"token_embd.weight": (kind, raw)}))
    values = checkpoint.tensor("token_embd.weight", TensorSpec((2100, 512), torch.bfloat16))
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(raw, kind))).bfloat16()
    assert torch.equal(values.bfloat16(), expected)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.F32], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["blk.0.attn_k", "blk.0.attn_v"])
def test_a_slice_is_the_same_as_slicing_the_whole(kind: Kind, name: str, tmp_path: Path) -> None:
    """Also where rows are stored in another order."""
    raw = random_raw(kind, (16, 512))
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", {f"{name}.weight": (kind, raw)}, heads=4, kv_heads=2))
    full = next(iter(checkpoint.names()))
    spec = TensorSpec((16, 512), torch.float32)
    whole = checkpoint.tensor(full, spec)
    assert torch.equal(checkpoint.tensor(full, spec, (slice(3, 9),)), whole[3:9])
    assert torch.equal(checkpoint.tensor(full, spec, (slice(8, 16), slice(32, 40))), whole[8:16, 32:40])


def test_rows_of_q_and_k_come_back_in_half_rotation_order(tmp_path: Path) -> None:
    """Stored: pair after pair. Wanted: all first halves of a head, then all second halves."""
    rows = np.arange(16, dtype=np.float32)[:, None].repeat(32, axis=1)
    path = write(
        tmp_path / "m.gguf",
        {"blk.0.attn_q.weight": (Kind.F32, rows), "blk.0.attn_k.weight": (Kind.F32, rows)},
        heads=4,
        kv_heads=2,
    )
    checkpoint, spec = GGUFCheckpoint(path), TensorSpec((16, 32), torch.float32)
    q = checkpoint.tensor("blk.0.attn_q.weight", spec)[:, 0].tolist()
    k = checkpoint.tensor("blk.0.attn_k.weight", spec)[:, 0].tolist()
    assert q == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15]
    assert k == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def test_an_undecodable_type_is_named_with_those_that_work(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (Kind.Q8_K, random_raw(Kind.Q8_K))})
    with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_up\.weight in .*m\.gguf is stored as Q8_K.*Q4_K.*Q8_0"):
        GGUFCheckpoint(path)


def test_types_without_kernels_are_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kinds = {"up": Kind.IQ3_S, "down": Kind.IQ2_XS, "gate": Kind.Q8_0}
    tensors = {f"blk.0.ffn_{name}.weight": (kind, random_raw(kind)) for name, kind in kinds.items()}
    path = write(tmp_path / "m.gguf", tensors)
    with caplog.at_level("INFO", "octavo"):
        checkpoint = GGUFCheckpoint(path)
    assert caplog.messages[-1:] == ["expanded 2 of 3 tensors: types IQ2_XS, IQ3_S"]
    assert checkpoint.blocks("blk.0.ffn_up.weight", codes=True) is None


def test_a_truncated_file_names_the_tensor_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"output.weight": (Kind.Q8_0, random_raw(Kind.Q8_0))})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match=r"m\.gguf.*output\.weight"):
        GGUFCheckpoint(path)


def test_a_model_in_several_gguf_files_is_refused(tmp_path: Path) -> None:
    paths = tuple(tmp_path / f"{i}.gguf" for i in range(2))
    files = ModelFiles(name="m", path=tmp_path, format="gguf", weights=paths, config={})
    with pytest.raises(ModelFileError, match=r"0\.gguf, 1\.gguf"):
        open_checkpoint(files)


def test_tensors_that_llama_lacks_keep_their_names() -> None:
    assert hf_name("blk.7.attn_q.bias") == "model.layers.7.self_attn.q_proj.bias"
    assert hf_name("output_norm.weight") == "model.norm.weight"
    assert hf_name("blk.7.ffn_gate_exps.weight") == "blk.7.ffn_gate_exps.weight"
    assert hf_name("rope_freqs.weight") == "rope_freqs.weight"


@pytest.mark.parametrize("kind", sorted(SUPPORTED), ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["blk.3.ffn_up", "blk.3.attn_q"])
def test_blocks_hold_the_same_values(kind: Kind, name: str, tmp_path: Path) -> None:
    """In the formats that they can hold; scales that are products, and minima, are rounded to float16."""
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", {f"{name}.weight": (kind, random_raw(kind))}, heads=3))
    blocks = checkpoint.blocks(f"{name}.weight")
    assert (blocks is not None) == (kind in INTEGERS)
    if kind in CODES:
        blocks = checkpoint.blocks(f"{name}.weight", codes=True)
        assert blocks is not None
        torch.testing.assert_close(dequantized(blocks, torch.float32), checkpoint.tensor(f"{name}.weight", SPEC))
        return
    if blocks is None:
        return
    assert int(blocks.values.max()) == {Kind.Q5_0: 31, Kind.Q5_1: 31, Kind.Q5_K: 31}.get(kind, 2**blocks.bits - 1)
    expected = checkpoint.tensor(f"{name}.weight", SPEC)
    rtol = 1e-6 if blocks.minima is None else 2e-3
    scale = float(expected.abs().max())
    torch.testing.assert_close(dequantized(blocks, torch.float32), expected, rtol=rtol, atol=scale * rtol / 10)
