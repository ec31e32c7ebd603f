"""Which of the kernels' separate libraries a model will need, told by its files before anything of it is loaded."""

from __future__ import annotations

from octavo.hub.files import ModelFiles
from octavo.hub.gguf_file import read_gguf

INTEGER_KINDS = frozenset({2, 3, 6, 7, 8, 12, 13})
"""ggml's type numbers of the formats that stay integers (Q4_0 to Q8_0, Q4_K, Q5_K): see models/load/gguf_blocks.py."""


def needed_libraries(
    files: ModelFiles, dtype: str, load_format: str, kv_cache_dtype: str, activation_dtype: str
) -> list[str]:
    """Some of `build.SEPARATE`, by the model's files and the settings of these names. If a model should need another,
    that is compiled when it turns out.

    Raises:
        ModelFileError: a GGUF file can't be read.
    """
    needed = ["attention_int8"] if kv_cache_dtype.startswith("int8") else []
    if files.format != "gguf" or dtype != "auto" or load_format == "dummy" or activation_dtype == "bfloat16":
        return [*needed, "words"]
    matrices = {tensor.kind for tensor in read_gguf(files.path).tensors.values() if len(tensor.shape) > 1}
    return [
        *needed,
        *(["blocks"] if matrices & INTEGER_KINDS else []),
        *(["words"] if matrices - INTEGER_KINDS else []),
    ]
