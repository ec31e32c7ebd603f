"""The table of features: optional capabilities, each a folder here.

A feature's halves are modules of its folder, each of which may be missing:

- `engine.py` has `build_engine(context) -> EngineHook | None`. It needs no torch.
- `worker.py` has `build_worker(context) -> WorkerHook | None`, which may be called in another process, with a context
  of the same settings.
- `payload.py` has `NAME`, by which requests' options and plans call the feature, and `PAYLOAD`, the msgspec type of
  what the engine half sends to the worker half with a step. It needs no torch.

A folder that is not there leaves the engine without that feature and otherwise whole; a request that asks for it is
then refused by name (`ModelInfo.features`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from octavo.core.pooling import DenseLayer
from octavo.core.structured import NO_DEFAULTS, StructuredDefaults

if TYPE_CHECKING:
    from octavo.schedule.hooks import EngineHook
    from octavo.text.tokenizers.tokenizer import Tokenizer
    from octavo.worker.hooks import WorkerHook

FEATURES = ("grammar", "logits_processors", "pooling", "prompt_embeds", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class FeatureContext:
    """What a feature may know of the engine that it becomes part of: settings, and facts about model and device.

    Attributes:
        vocab_size: columns of the logits.
        eos_token_ids: tokens that end a sequence.
        load_tokenizer: the model's tokenizer; called only when it is needed, from any thread.
        whole_prompts: each prompt is computed in one step, all of it at once.
        device: where the logits are, in torch's words.
        model: the model's folder or file.
        max_num_seqs: the most rows of logits there are at once.
        dense: layers that pooled vectors go through.
        structured_outputs: what holds for every structured output.
        logits_processors: what the setting of that name holds: names, and in-process classes, instances and functions.
        prompt_embeds: prompts may hold embeddings.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    load_tokenizer: Callable[[], Tokenizer]
    whole_prompts: bool = False
    device: str = "cpu"
    model: str = ""
    max_num_seqs: int = 0
    dense: tuple[DenseLayer, ...] = ()
    structured_outputs: StructuredDefaults = NO_DEFAULTS
    logits_processors: tuple[Any, ...] = ()
    prompt_embeds: bool = False


def build_engine_halves(context: FeatureContext) -> list[EngineHook]:
    """Return the engine halves of all features that are there and have something to do."""
    built = (module.build_engine(context) for module in _modules("engine"))
    return [hook for hook in built if hook is not None]


def build_worker_halves(context: FeatureContext) -> list[WorkerHook]:
    """Return the worker halves likewise."""
    built = (module.build_worker(context) for module in _modules("worker"))
    return [hook for hook in built if hook is not None]


def payload_types() -> dict[str, Any]:
    """Return the payload's type of each feature that sends one, by the feature's name."""
    return {module.NAME: module.PAYLOAD for module in _modules("payload")}


def _modules(part: str) -> Iterator[ModuleType]:
    """Yield this module of every feature that has it."""
    for feature in FEATURES:
        folder = f"{__name__}.{feature}"
        module = f"{folder}.{part}"
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as exc:
            if exc.name not in (folder, module):
                raise
        else:
            yield found
