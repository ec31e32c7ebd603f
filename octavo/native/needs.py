"""Predict which of the kernels' separate libraries a model needs, from its files, before it is loaded."""

from __future__ import annotations

from octavo.hub.files import ModelFiles
from octavo.hub.gguf_file import read_gguf
from octavo.native.isa import usable

INTEGER_KINDS = frozenset({2, 3, 6, 7, 8, 12, 13})
"""ggml's type numbers of the formats kept as integers (Q4_0 to Q8_0, Q4_K, Q5_K); see models/load/gguf_blocks.py."""

CODE_KINDS = frozenset({10, 11, 14, 20, 23, 39})
"""Those of the formats kept as codes (Q2_K, Q3_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4)."""
_NARROW_KINDS = frozenset({1, 30})  # F16, BF16

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configurations."""
_RECURRENT = ("conv_L_cache", "mamba_d_state", "ssm_state_size", "state_size", "linear_num_value_heads")
MIXERS = {"qk_rope_head_dim": "latent", **dict.fromkeys(_RECURRENT, "recurrent")}
"""Fields of configurations whose models have certain mixers -> the library that these need."""


def needed_libraries(
    files: ModelFiles, dtype: str, load_format: str, kv_cache_dtype: str, activation_dtype: str
) -> list[str]:
    """Return the names of `build.SEPARATE` that a model needs, from its files and the settings of these names.

    Any other that it turns out to need is compiled then.

    Raises:
        ModelFileError: a GGUF file can't be read.
    """
    needed = ["attention_int8"] if kv_cache_dtype.startswith("int8") else []
    needed += ["experts"] if has_experts(files) else []
    needed += dict.fromkeys(library for name, library in MIXERS.items() if files.config.get(name))
    if dtype != "auto" or load_format == "dummy" or activation_dtype == "bfloat16":
        return [*needed, "words"]
    widens = "bf16" not in usable()[0].name  # weights of 16 bits meet activations in float32
    if files.format != "gguf":
        stored = files.config.get("dtype") or files.config.get("torch_dtype")
        return [*needed, *(["codes"] if widens and stored in ("bfloat16", "float16") else []), "words"]
    matrices = {tensor.kind for tensor in read_gguf(files.path).tensors.values() if len(tensor.shape) > 1}
    codes = CODE_KINDS | _NARROW_KINDS if widens else CODE_KINDS
    return [
        *needed,
        *(["blocks"] if matrices & INTEGER_KINDS else []),
        *(["codes"] if matrices & codes else []),
        *(["words"] if matrices - INTEGER_KINDS - codes else []),
    ]


def has_experts(files: ModelFiles) -> bool:
    """Return whether a configuration names experts."""
    counts = (files.config.get(name) for name in EXPERTS)
    return any(isinstance(count, int) and count > 1 for count in counts)
