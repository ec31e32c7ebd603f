from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.core.errors import ModelFileError
from octavo.hub.safetensors_files import check_safetensors, safetensors_files

TENSORS = {"a": np.ones((4, 4), dtype=np.float32), "b": np.zeros(3, dtype=np.float16)}


def test_single_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert safetensors_files(tmp_path) == (tmp_path / "model.safetensors",)


def test_index_lists_the_shards(tmp_path: Path) -> None:
    for name in ("two.safetensors", "one.safetensors", "unrelated.safetensors"):
        save_file(TENSORS, tmp_path / name)
    index = {"weight_map": {"a": "two.safetensors", "b": "one.safetensors", "c": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in safetensors_files(tmp_path)] == ["one.safetensors", "two.safetensors"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"missing from the folder: two\.safetensors"):
        safetensors_files(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_a_corrupt_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"model\.safetensors\.index\.json"):
        safetensors_files(tmp_path)


def test_consolidated_copies_are_left_out(tmp_path: Path) -> None:
    for name in ("weights.safetensors", "consolidated.safetensors"):
        save_file(TENSORS, tmp_path / name)
    assert [path.name for path in safetensors_files(tmp_path)] == ["weights.safetensors"]


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    check_safetensors(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match=r"model\.safetensors is corrupt or truncated"):
            check_safetensors(path)


@pytest.mark.parametrize("header", [b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [0]}}', b"\xff\xff"])
def test_headers_of_a_wrong_form(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelFileError, match="header is not valid"):
        check_safetensors(path)
