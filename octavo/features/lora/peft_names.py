"""How PEFT names the files of an adapter and their tensors."""

from __future__ import annotations

from octavo.features.lora.adapter_file import MAGNITUDE, ROWS, WHOLE, A, B

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."

BIAS = "bias"
"""A copy of the base's, which PEFT saves beside a changed head."""

ROLES = {
    ".lora_A.weight": A,
    ".lora_B.weight": B,
    ".lora_embedding_A": A,
    ".lora_embedding_B": B,
    ".lora_magnitude_vector": MAGNITUDE,
    ".lora_magnitude_vector.weight": MAGNITUDE,
    ".token_adapter.trainable_tokens_delta": ROWS,
    ".token_adapter.base_layer.weight": WHOLE,
    ".modules_to_save.weight": WHOLE,
    ".original_module.weight": WHOLE,
    ".base_layer.weight": WHOLE,
    ".weight": WHOLE,
    ".token_adapter.base_layer.bias": BIAS,
    ".base_layer.bias": BIAS,
}
"""How names end; the longest match counts."""


def ending_of(name: str) -> str | None:
    """Return how a tensor's name ends, of `ROLES`, whose endings have up to three parts; None if otherwise."""
    last = name.rfind(".")
    second = name.rfind(".", 0, max(0, last))
    third = name.rfind(".", 0, max(0, second))
    for place in (third, second, last):
        if place >= 0 and (end := name[place:]) in ROLES:
            return end
    return None
