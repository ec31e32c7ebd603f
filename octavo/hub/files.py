"""`ModelFiles`: a model found on this machine, independent of where it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

QUANTIZATION_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files with settings that older checkpoints have beside config.json -> the method of those that don't name one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The paths of a model's files, and its configuration in Hugging Face's vocabulary.

    Attributes:
        name: the model as the user named it.
        path: the folder, or the single .gguf file.
        format: how the weights are stored.
        weights: the weight files; empty is legal only for dummy weights.
        config: the content of config.json, or its equivalent made from GGUF metadata.
        generation_config: the content of generation_config.json, or its equivalent from GGUF metadata and the
            catalogue.
        own_fields: the original values of config fields that the user has overridden.
    """

    name: str
    path: Path
    format: Literal["safetensors", "gguf"]
    weights: tuple[Path, ...]
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    own_fields: frozenset[str] = frozenset()

    @property
    def weight_bytes(self) -> int:
        """Size of the weight files on disk, in bytes."""
        return sum(path.stat().st_size for path in self.weights)
