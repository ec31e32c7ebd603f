"""Octavo, an engine that serves large language models.

The names below are loaded on first use, so that `import octavo` costs nothing: no torch, no web framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.core.output import RequestOutput
    from octavo.core.params import SamplingParams
    from octavo.core.structured import StructuredOutputsParams
    from octavo.llm import LLM

__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__"]

_HOMES = {
    "LLM": "octavo.llm",
    "AsyncLLM": "octavo.async_llm",
    "RequestOutput": "octavo.core.output",
    "SamplingParams": "octavo.core.params",
    "StructuredOutputsParams": "octavo.core.structured",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
