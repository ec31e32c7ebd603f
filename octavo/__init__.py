"""Octavo, an engine that serves large language models.

The names below are loaded on first use, so that `import octavo` costs nothing: no torch, no web framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.core.output import CompletionOutput, RequestOutput
    from octavo.core.params import RequestOutputKind, SamplingParams
    from octavo.core.structured import StructuredOutputsParams
    from octavo.features.beams.api import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from octavo.features.lora.api import LoRARequest
    from octavo.features.pooling.api import PoolingParams
    from octavo.python_api.async_llm import AsyncLLM
    from octavo.python_api.async_llm import AsyncLLM as AsyncLLMEngine
    from octavo.python_api.engine import LLMEngine
    from octavo.python_api.engine_args import AsyncEngineArgs, EngineArgs
    from octavo.python_api.llm import LLM
    from octavo.text.prompts.prompt import TextPrompt, TokensPrompt

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_HOMES = {
    "LLM": "octavo.python_api.llm",
    "AsyncEngineArgs": "octavo.python_api.engine_args",
    "AsyncLLM": "octavo.python_api.async_llm",
    "AsyncLLMEngine": "octavo.python_api.async_llm",
    "BeamSearchOutput": "octavo.features.beams.api",
    "BeamSearchParams": "octavo.features.beams.api",
    "BeamSearchSequence": "octavo.features.beams.api",
    "CompletionOutput": "octavo.core.output",
    "EngineArgs": "octavo.python_api.engine_args",
    "LLMEngine": "octavo.python_api.engine",
    "LoRARequest": "octavo.features.lora.api",
    "PoolingParams": "octavo.features.pooling.api",
    "RequestOutput": "octavo.core.output",
    "RequestOutputKind": "octavo.core.params",
    "SamplingParams": "octavo.core.params",
    "StructuredOutputsParams": "octavo.core.structured",
    "TextPrompt": "octavo.text.prompts.prompt",
    "TokensPrompt": "octavo.text.prompts.prompt",
}


_WITH_TORCH = ("LLM", "LLMEngine")


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    if name in _WITH_TORCH:
        from octavo.core.memory import check_address_space

        check_address_space()
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
