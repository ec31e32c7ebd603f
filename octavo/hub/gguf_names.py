"""The names of a GGUF file's tensors, in llama.cpp's and Hugging Face's vocabularies."""

from __future__ import annotations

import re

_ROOT = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(?P<suffix>weight|bias)")


def hf_name(name: str) -> str:
    """Return a GGUF tensor's Hugging Face name; an unknown tensor keeps its name and is reported as unread."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, stem, suffix = match["layer"], match["stem"], match["suffix"]
    if layer is None:
        return f"{_ROOT[stem]}.{suffix}" if stem in _ROOT else name
    return f"model.layers.{layer}.{_BLOCK[stem]}.{suffix}" if stem in _BLOCK else name
