"""Tiny random checkpoints of every family, made by Transformers, and the same models as Octavo builds them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_families import DENSE, HYBRID, HYBRID_MOE, MOE

from octavo.hub.files import ModelFiles
from octavo.models.attention import widest_attention
from octavo.models.decoder import CausalLM
from octavo.models.load import open_checkpoint
from octavo.models.load.arranged import arranged
from octavo.models.load.weights import load_weights
from octavo.models.registry import build_model, spec_of
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.build import AnyBackend
from octavo.nn.latent.base import LatentSpec
from octavo.nn.latent.reference import ReferenceLatents
from octavo.nn.quant.none import Unquantized
from octavo.parallel.mesh import ALONE, Mesh

_COMMON = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_GROWING = {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3, "factor": 16.0}

Make = Callable[..., Any]

_QUANTIZED = {"intermediate_size": 128, "num_hidden_layers": 2, "tie_word_embeddings": False}
"""Sizes that groups of 64 inputs divide."""

FAMILIES: dict[str, tuple[Make, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "llama-biases": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": (transformers.LlamaConfig, {"rope_parameters": _LLAMA3}),
    "llama-yarn-rope": (transformers.LlamaConfig, {"rope_parameters": _YARN}),
    "llama-linear-rope": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}},
    ),
    "quantized": (transformers.LlamaConfig, _QUANTIZED),
    "smollm": (
        transformers.LlamaConfig,
        {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": 7}),
    "ministral3": (transformers.Ministral3Config, {"head_dim": 16, "rope_parameters": _YARN | _GROWING}),
    "mistral-wide-heads": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 24}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-some-windows": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "qwen3-biases": (transformers.Qwen3Config, {"head_dim": 32, "attention_bias": True, "num_key_value_heads": 1}),
}


def config_of(family: str, changes: Mapping[str, Any] | None = None) -> Any:
    """The family's tiny configuration, with some fields changed."""
    make, settings = {**FAMILIES, **DENSE, **HYBRID, **HYBRID_MOE, **MOE}[family]
    return make(**{**_COMMON, **settings, **(changes or {})})


def make_checkpoint(family: str, folder: Path, changes: Mapping[str, Any] | None = None, **save: Any) -> Any:
    """Writes a random checkpoint of the family and returns the Transformers model, in float32."""
    config = config_of(family, changes)
    return _saved(class_of(config), config, folder, len(family), **save)


def class_of(config: Any) -> Any:
    """The class of a configuration's language models; some are not among those that transformers finds by itself."""
    mapped = transformers.AutoModelForCausalLM._model_mapping
    kind = type(config)
    return mapped[kind] if kind in mapped else getattr(transformers, kind.__name__.replace("Config", "ForCausalLM"))


def make_classifier(family: str, folder: Path, labels: int, changes: Mapping[str, Any] | None = None) -> Any:
    """The same with a classification head in place of the language model's."""
    config = config_of(family, changes)
    config.num_labels = labels
    return _saved(transformers.AutoModelForSequenceClassification, config, folder, len(family))


def vary_vectors(model: Any, by: float = 0.2) -> None:
    """Add noise to one-dimensional parameters. Norms start at one and biases at zero, where a forgotten one would not
    show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * by)


def _saved(kind: Any, config: Any, folder: Path, seed: int, **save: Any) -> Any:
    torch.manual_seed(seed)
    # The eager form of Falcon adds its linear biases twice.
    config._attn_implementation = "sdpa" if getattr(config, "alibi", False) else "eager"
    model = (kind.from_config if hasattr(kind, "from_config") else kind._from_config)(
        config, dtype=torch.float32
    ).eval()
    vary_vectors(model)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.normal_().mul_(0.3)
            elif tensor.dim() > 1 and not tensor.any():  # routers of some families start at zero
                tensor.normal_().mul_(0.15)
            if name.endswith("layer_scalar"):
                tensor.uniform_(0.4, 1.2)
                # Such models do not scale scores, which norms at one would make so large that rounding shows.
                model.get_parameter(name.replace("layer_scalar", "self_attn.q_norm.weight")).mul_(0.2)
    model.save_pretrained(folder, **save)
    return model


def model_files(folder: Path) -> ModelFiles:
    """The folder as the hub would describe it."""
    config = json.loads((folder / "config.json").read_text())
    weights = tuple(sorted(folder.glob("*.safetensors")))
    return ModelFiles(name=folder.name, path=folder, format="safetensors", weights=weights, config=config)


def reference_of(files: ModelFiles) -> AnyBackend:
    """The slow attention backend for a checkpoint's layers."""
    latent = isinstance(widest_attention(spec_of(files.config)), LatentSpec)
    return ReferenceLatents() if latent else ReferenceAttention()


def load_model(
    files: ModelFiles,
    attention: AnyBackend,
    dtype: torch.dtype = torch.float32,
    scheme: type[Unquantized] = Unquantized,
    mesh: Mesh = ALONE,
    max_length: int | None = None,
) -> CausalLM:
    """Built and filled; every tensor of the checkpoint must have been used. `max_length`: see `DecoderSpec.within`."""
    spec = spec_of(files.config).within(max_length)
    model = build_model(spec, dtype=dtype, device=torch.device("cpu"), attention=attention, scheme=scheme, mesh=mesh)
    report = load_weights(model, arranged(open_checkpoint(files), spec))
    assert report.unread == ()
    return model
