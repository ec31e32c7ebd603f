from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from toy_gguf import write_gguf

from octavo.core.errors import ModelFileError
from octavo.hub.gguf_file import read_gguf

METADATA = {
    "a.text": "grüße 日本",
    "a.int": 7,
    "a.float": 0.5,
    "a.flag": True,
    "a.words": ["x", "", "ü", "a longer one"],
    "a.ints": [1, -2, 3],
    "a.floats": [0.25, -1.5],
}
TENSORS = {
    "token_embd.weight": np.arange(16 * 32, dtype=np.float32).reshape(16, 32),
    "half": np.ones((3, 5), dtype=np.float16),
    "one": np.ones((7,), dtype=np.float32),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "toy.gguf", METADATA, tensors=TENSORS)


def test_metadata_are_read_as_they_were_written(path: Path) -> None:
    metadata = read_gguf(path).metadata
    assert {key: metadata[key] for key in METADATA} == METADATA
    assert metadata["general.architecture"] == "llama"
    assert "absent" not in metadata
    assert metadata.get("absent", 3) == 3


def test_tensors_lie_where_the_library_finds_them(path: Path) -> None:
    ours = read_gguf(path).tensors
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert ours.keys() == theirs.keys() == TENSORS.keys()
    for name, tensor in ours.items():
        assert tensor.shape == TENSORS[name].shape
        assert tensor.kind == theirs[name].tensor_type
        assert tensor.offset == theirs[name].data_offset
        content = path.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes]
        assert content == TENSORS[name].tobytes()


@pytest.mark.parametrize(
    "kind", [kind for kind in gguf.GGMLQuantizationType if kind in gguf.GGML_QUANT_SIZES], ids=lambda kind: kind.name
)
def test_quantized_tensors_have_the_librarys_sizes(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("w", np.zeros((2, 3 * block_bytes), dtype=np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf(tmp_path / "q.gguf").tensors["w"]
    assert tensor.shape == (2, 3 * per_block)
    assert tensor.num_bytes == 2 * 3 * block_bytes


def test_a_file_cut_anywhere_is_refused_with_its_name(path: Path) -> None:
    whole = path.read_bytes()
    last = max(tensor.offset + tensor.num_bytes for tensor in read_gguf(path).tensors.values())
    for length in range(last):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match=r"toy\.gguf"):
            read_gguf(path)


def test_any_damaged_byte_of_the_head_is_survived(path: Path) -> None:
    """It may be read as something else, but nothing other than ModelFileError may come of it."""
    whole = path.read_bytes()
    head = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    refusals = []
    for place in range(head):
        for value in (0x00, 0x7F, 0xFF):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            try:
                dict(read_gguf(path).metadata)
            except ModelFileError as exc:
                refusals.append(str(exc))
    assert len(refusals) > head / 4
    assert all("toy.gguf" in refusal for refusal in refusals)


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>sign in first</html>")
    with pytest.raises(ModelFileError, match=r"page\.gguf is not a GGUF file"):
        read_gguf(tmp_path / "page.gguf")


def test_unsupported_version(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack("<I", 1)
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="version 1"):
        read_gguf(path)


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="No such file"):
        read_gguf(tmp_path / "none.gguf")
