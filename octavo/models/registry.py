"""Architecture name -> builder. Adding a family takes one line here (see docs/adding-a-model.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from octavo.core.errors import ConfigError, ModelFileError
from octavo.models.decoder import CausalLM
from octavo.models.encoders.registry import ENCODERS
from octavo.models.hf_config import Config
from octavo.models.llama import llama
from octavo.models.mistral import mistral
from octavo.models.qwen2 import qwen2
from octavo.models.qwen3 import qwen3
from octavo.models.spec import DecoderSpec
from octavo.nn.attention.base import AttentionBackend
from octavo.nn.build import Build
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized
from octavo.nn.weights import Keep, fused
from octavo.parallel.mesh import ALONE, Mesh

ARCHITECTURES: Mapping[str, Callable[[Config], DecoderSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def is_own(config: Config) -> bool:
    """Return whether a checkpoint's architecture is one of these families."""
    names = config.get("architectures") or []
    return bool(names) and _with_head(names[0]) in ARCHITECTURES


def _with_head(name: str) -> str:
    """Return the architecture with a language-model head of a bare model's, or the name itself."""
    return name.removesuffix("Model") + "ForCausalLM" if name.endswith("Model") else name


def spec_of(config: Config) -> DecoderSpec:
    """Convert a checkpoint's configuration to a `DecoderSpec`.

    Raises:
        ConfigError: the architecture or a feature of the configuration is not supported.
        ModelFileError: a field is missing.
    """
    names = config.get("architectures") or []
    if not names:
        raise ModelFileError(
            "The model's config has no 'architectures', so Octavo can't tell what kind of model it is. "
            "Get the config.json that belongs to the model."
        )
    name = _with_head(names[0])
    if name not in ARCHITECTURES:
        known = ", ".join(sorted([*ARCHITECTURES, *ENCODERS]))
        raise ConfigError(
            f"The model's architecture is {names[0]}; Octavo supports {known}. Serve a model of one of these."
        )
    quantization = config.get("quantization_config")
    if quantization:
        method = (
            quantization.get("quant_method", "an unnamed method") if isinstance(quantization, Mapping) else quantization
        )
        raise ConfigError(
            f"The model's weights are quantized with {method}; Octavo reads unquantized safetensors and GGUF files."
        )
    spec = ARCHITECTURES[name](config)
    # A checkpoint of the bare model has no head.
    return spec if name == names[0] else replace(spec, tied=True)


def build_model(
    spec: DecoderSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: AttentionBackend,
    scheme: type[Unquantized] = Unquantized,
    keep: Keep = fused,
    mesh: Mesh = ALONE,
) -> CausalLM:
    """Build the model of a spec, without weights, which `models/load` loads."""
    schemes = everywhere(scheme, dtype, device, keep)
    return CausalLM(Build(dtype, device, attention, schemes, keep=keep, mesh=mesh), spec)
