"""The names of a GGUF file's tensors, in llama.cpp's and Hugging Face's vocabularies."""

from __future__ import annotations

import re
from collections.abc import Set

ROOT = {
    "token_embd": "embed_tokens",
    "token_embd_norm": "embed_norm",
    "position_embd": "embed_positions",
    "output_norm": "norm",
    "output": "lm_head",
}
"""Tensors outside layers -> modules of Octavo's decoder, whose names are Llama's where Llama has them."""
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""A layer's tensors, except its norms, whose names depend on where they are."""
_BERT = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "cls": "classifier.dense",
    "cls.output": "classifier.out_proj",
}
_BERT_LAYER = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_LLAMA = LAYER | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>[\w.]+)\.(?P<suffix>weight|bias)")


def is_gguf(names: Set[str]) -> bool:
    """Return whether a checkpoint's tensors have llama.cpp's names."""
    return "token_embd.weight" in names


def hf_name(name: str) -> str:
    """Return the name of a GGUF tensor in a Llama's checkpoint; a tensor that Llama lacks keeps its name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, stem, suffix = match["layer"], match["stem"], match["suffix"]
    if layer is not None:
        return f"model.layers.{layer}.{_LLAMA[stem]}.{suffix}" if stem in _LLAMA else name
    if stem not in ROOT:
        return name
    return f"lm_head.{suffix}" if stem == "output" else f"model.{ROOT[stem]}.{suffix}"


def bert_name(name: str) -> str:
    """Return the name of a GGUF tensor in a BERT's checkpoint; a tensor that BERT lacks keeps its name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, stem, suffix = match["layer"], match["stem"], match["suffix"]
    if layer is not None:
        return f"encoder.layer.{layer}.{_BERT_LAYER[stem]}.{suffix}" if stem in _BERT_LAYER else name
    return f"{_BERT[stem]}.{suffix}" if stem in _BERT else name
