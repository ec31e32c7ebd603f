"""Models so small that random weights serve, for tests of what an engine does with any model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.device.cpu import CpuDevice
from octavo.hub.files import ModelFiles

VOCAB = 131
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 3,
}
LLAMA_KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
"""Layers, key and value, key-value heads, channels of a head, bytes of a float32."""
QWEN3: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
"""Less to compute, for kernels that run in Triton's interpreter."""

LATENT: dict[str, Any] = LLAMA | {
    "architectures": ["YoutuForCausalLM"],
    "model_type": "youtu",
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LATENT_BYTES_PER_TOKEN = 2 * (32 + 16) * 4
"""Layers, channels of the latent and rotated ones, bytes of a float32."""


def model_files(config: dict[str, Any] = LLAMA, folder: Path = Path("tiny")) -> ModelFiles:
    """A model without weight files; random ones are made with `load_format="dummy"`."""
    return ModelFiles(name="tiny", path=folder, format="safetensors", weights=(), config=config)


def save_decoder(folder: Path, seed: int, **changes: Any) -> Path:
    """A checkpoint of `transformers` with random weights, and a tokenizer of 437 tokens beside it."""
    import torch
    import toy_tokenizers
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.15,
        **{"vocab_size": 440, "max_position_embeddings": 128} | changes,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    toy_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return folder


class Behind(CpuDevice):
    """A CPU that is driven as if it ran behind its host."""

    def __init__(self) -> None:
        super().__init__()
        self.resident = True
        self.default_depth = 1


def behind(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings under which the resident runner computes: on a GPU, or else in Triton's interpreter."""
    import torch

    if torch.cuda.is_available():
        return {"device": "cuda"}
    monkeypatch.setattr("octavo.worker.worker.select_device", lambda name: Behind())
    return {"attention_backend": "triton"}
