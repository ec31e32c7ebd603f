"""Find and construct processors: entry points of installed packages, names in settings, Python objects."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from octavo.core.errors import ConfigError
from octavo.core.importing import imported
from octavo.core.params import SamplingParams
from octavo.features import FeatureContext
from octavo.features.logits_processors.interface import LogitsProcessor, PerRequest, ProcessorContext, arity
from octavo.features.logits_processors.persistent import PersistentBatch
from octavo.features.logits_processors.settings import LogitsProcessorsSettings

log = logging.getLogger(__name__)

GROUP = "octavo.logits_processors"
SHARED_GROUP = "vllm.logits_processors"
_FLAG = "--logits-processors"


@dataclass(frozen=True, slots=True)
class LoadedProcessor:
    """A constructed processor.

    Attributes:
        name: its name in errors.
        validate: vLLM's `validate_params`, if it has that; raises ValueError to refuse a request.
    """

    name: str
    processor: LogitsProcessor
    validate: Callable[[SamplingParams], Any] | None = None


def load(context: FeatureContext) -> list[LoadedProcessor]:
    """Return the processors of installed packages, by name, then those of the settings, in order; each once.

    Constructed once for a context, so that both halves of the feature share them within a process. Empty for models
    whose prompts are computed whole, which sample nothing.

    Raises:
        ConfigError: one can't be loaded or constructed; the text names it and the remedy. An unusable entry point of
            vLLM's group is skipped with a warning, since it may be meant for vLLM alone.
    """
    if context not in _made_for:
        _made_for[context] = [] if context.whole_prompts else _load(context)
    return _made_for[context]


_made_for: WeakKeyDictionary[FeatureContext, list[LoadedProcessor]] = WeakKeyDictionary()


def _load(context: FeatureContext) -> list[LoadedProcessor]:
    found: dict[str, LoadedProcessor] = {}
    for point in sorted(entry_points(group=SHARED_GROUP), key=lambda one: one.name):
        try:
            found[point.name] = _made(_loaded(point), point.name, context)
        except ConfigError as exc:
            log.warning("left out: %s", exc)
    for point in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        found[point.name] = _made(_loaded(point), point.name, context)
    for given in context.settings_of(LogitsProcessorsSettings).logits_processors:
        name = given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
        found[name] = _made(_named(given) if isinstance(given, str) else given, f"{_FLAG} {name}", context)
    for name in found:
        log.info("logits processor %s", name)
    return list(found.values())


def _loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as exc:  # a user's module may raise anything
        package = f" of the package {point.dist.name}" if point.dist else ""
        raise ConfigError(
            f"The logits processor {point.name}{package} (entry point {point.value} in {point.group}) can't be loaded: "
            f"{_words(exc)}. Repair the package or uninstall it."
        ) from exc


def _named(name: str) -> Any:
    """Import the object named "module:name"."""
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{_FLAG} {name!r} must have the form module:Class, such as my_package.processors:Mine.")
    return imported(module_name, path, f"{_FLAG} {name}")


def _made(found: Any, name: str, context: FeatureContext) -> LoadedProcessor:
    """Return a processor from a class, an instance or a function."""
    made = _construct(found, name, context) if isinstance(found, type) else found
    return LoadedProcessor(name, _adapted(made, name), getattr(made, "validate_params", None))


def _adapted(made: Any, name: str) -> LogitsProcessor:
    if isinstance(made, LogitsProcessor) and not hasattr(made, "update_state"):
        return made
    if hasattr(made, "new_req_logits_processor"):
        return PerRequest(made.new_req_logits_processor)
    if hasattr(made, "update_state"):
        return PersistentBatch(made)
    if callable(made) and arity(made) is not None:
        return PerRequest(lambda params: made)
    raise ConfigError(
        f"{name} is not a logits processor: it must be a subclass of "
        "octavo.features.logits_processors.LogitsProcessor or "
        "AdapterLogitsProcessor, have vLLM's methods update_state and apply, or be a function (prompt_ids, output_ids, "
        "logits) -> logits."
    )


def _construct(kind: type, name: str, context: FeatureContext) -> Any:
    import torch  # imported here: the engine half without processors needs no torch

    device = torch.device(context.device)
    own = ProcessorContext(
        vocab_size=context.vocab_size,
        device=device,
        model=context.model,
        max_num_seqs=context.max_num_seqs,
        load_tokenizer=context.load_tokenizer,
    )
    ways: tuple[tuple[Any, ...], ...] = ((own,), (_vllm_config(context), device, device.type == "cuda"), ())
    arguments = next((way for way in ways if _takes(kind, way)), None)
    if arguments is None:
        raise ConfigError(
            f"{name}: its constructor must take nothing, a ProcessorContext, or (vllm_config, device, is_pin_memory)."
        )
    try:
        return kind(*arguments)
    except Exception as exc:  # a user's constructor may raise anything
        raise ConfigError(f"{name} can't be created: {_words(exc)}. Correct it, or leave it out.") from exc


def _takes(kind: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    try:
        inspect.signature(kind).bind(*arguments)
    except TypeError:
        return False
    return True


def _vllm_config(context: FeatureContext) -> SimpleNamespace:
    """Return the parts of vLLM's configuration that processors read."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=context.model, tokenizer=context.model, get_vocab_size=lambda: context.vocab_size
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=context.max_num_seqs),
        speculative_config=None,
    )


def _words(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"
