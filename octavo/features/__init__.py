"""The table of features: optional capabilities, each a folder here with a `build(context) -> Feature | None`.

A folder that is not there leaves the engine without that feature and otherwise whole; a request that asks for it is
then refused by name (`ModelInfo.features`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.pooling import DenseLayer
from octavo.core.structured import NO_DEFAULTS, StructuredDefaults
from octavo.schedule.hooks import EngineHook
from octavo.worker.hooks import WorkerHook

if TYPE_CHECKING:
    from octavo.text.tokenizers.tokenizer import Tokenizer

FEATURES = ("grammar", "logits_processors", "pooling", "prompt_embeds", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureContext:
    """What a feature may know of the engine that it becomes part of.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """The two halves of a feature, under the name that requests' options use."""

    name: str
    engine: EngineHook
    worker: WorkerHook


def build_features(context: FeatureContext) -> list[Feature]:
    """All features whose folders are there and that have something to do: the `build` of others gives None."""
    built: list[Feature | None] = []
    for name in FEATURES:
        module = f"{__name__}.{name}"
        try:
            built.append(importlib.import_module(module).build(context))
        except ModuleNotFoundError as exc:
            if exc.name != module:
                raise
    return [feature for feature in built if feature is not None]
