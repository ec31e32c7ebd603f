"""Custom logits processors: Python code that changes logits before sampling, loaded at engine start.

`interface.py` is what users implement; `load.py` finds and constructs processors, `persistent.py` runs those of vLLM's
batch interface; `engine.py` tracks the requests that they accept, `worker.py` applies them to logits. See
docs/logits-processors.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.features.logits_processors.interface import (
        AdapterLogitsProcessor,
        LogitsProcessor,
        ProcessorContext,
        Row,
    )
    from octavo.features.logits_processors.persistent import BatchUpdate, MoveDirectionality

__all__ = [
    "AdapterLogitsProcessor",
    "BatchUpdate",
    "LogitsProcessor",
    "MoveDirectionality",
    "ProcessorContext",
    "Row",
]

_PERSISTENT = ("BatchUpdate", "MoveDirectionality")


def __getattr__(name: str) -> Any:
    """Import the public names lazily: they need torch, which the engine half must not import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "persistent" if name in _PERSISTENT else "interface"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
