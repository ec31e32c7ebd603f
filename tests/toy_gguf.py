"""Small GGUF files for tests, written by the `gguf` library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LLAMA: dict[str, Any] = {
    "general.file_type": 0,
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any] = LLAMA,
    *,
    arch: str = "llama",
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A file with this metadata; by default of a model with one tensor, token_embd.weight of [16, 32]."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        _add(writer, key, value)
    default = {"token_embd.weight": np.zeros((16, 32), dtype=np.float32)}
    for name, array in (default if tensors is None else tensors).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
