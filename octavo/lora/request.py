"""`from octavo.lora.request import LoRARequest`, as in vLLM's examples."""

from __future__ import annotations

from octavo.features.lora.api import LoRARequest

__all__ = ["LoRARequest"]
