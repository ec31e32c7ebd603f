"""Find a checkpoint's classes in transformers, or in the model's folder; refuse by name what Octavo can't run."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from octavo.core.errors import ConfigError
from octavo.hub.overrides import ROPE_SETTINGS
from octavo.models.registry import ARCHITECTURES

_CAUSAL: Mapping[str, Any] = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
_ATTENDING = {"full_attention", "sliding_attention"}


def refusal(name: str, why: str) -> ConfigError:
    """Return the error for an architecture that transformers knows and Octavo can't run."""
    return ConfigError(f"{name} can't be computed by transformers' modules in Octavo: {why}. Serve another model.")


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of a checkpoint's configuration and of its causal language model."""

    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]


def classes_of(config: Mapping[str, Any], folder: Path, *, trusts_code: bool) -> Classes:
    """Return the classes of a checkpoint.

    Raises:
        ConfigError: there are none, or they are code that may not be run.
    """
    name = str(config["architectures"][0])
    kind = str(config.get("model_type") or _model_type(name))
    causal = _first(_CAUSAL[kind]) if kind in _CAUSAL else None
    if kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise ConfigError(
            f"{name} takes images, and Octavo runs models of text through transformers. Serve a model of text."
        )
    if causal is not None and hasattr(transformers, name):
        if name != causal and not name.endswith("Model"):
            raise ConfigError(
                f"{name} is not a language model: of this family, Octavo runs {causal} through transformers. Serve a "
                "checkpoint of that."
            )
        return Classes(CONFIG_MAPPING[kind], getattr(transformers, causal))
    mapped = config.get("auto_map") or {}
    if "AutoModelForCausalLM" in mapped:
        return _from_folder(name, mapped, folder, trusts_code=trusts_code)
    raise ConfigError(_reason_against(name, kind))


def _from_folder(name: str, mapped: Mapping[str, str], folder: Path, *, trusts_code: bool) -> Classes:
    """Return classes that come with the model."""
    files = sorted({f"{reference.rpartition('--')[2].split('.')[0]}.py" for reference in mapped.values()})
    if not trusts_code:
        raise ConfigError(
            f"{name} is known neither to Octavo nor to transformers {transformers.__version__}: the model brings "
            f"Python code of its own ({', '.join(files)}), which could do anything on this machine, so Octavo does not "
            "run it by default. Read that code, and give --trust-remote-code if you trust it."
        )
    references = {part: mapped.get(part) for part in ("AutoConfig", "AutoModelForCausalLM")}
    missing = [part for part, reference in references.items() if reference is None]
    if missing:
        raise ConfigError(f"{name}: the model's auto_map has no {missing[0]}. Get the model's files again.")
    elsewhere = [reference for reference in references.values() if reference and "--" in reference]
    absent = [file for file in files if not (folder / file).is_file()]
    if elsewhere or absent:
        raise ConfigError(
            f"--trust-remote-code: {name} needs {', '.join(elsewhere or absent)}, which {folder} lacks; Octavo runs "
            "code from the model's own folder only. Download the whole repository to a folder (hf download REPOSITORY "
            "--local-dir FOLDER), with code that is in another one, and serve that folder."
        )
    found = {part: get_class_from_dynamic_module(str(reference), str(folder)) for part, reference in references.items()}
    return Classes(found["AutoConfig"], found["AutoModelForCausalLM"])


def _reason_against(name: str, kind: str) -> str:
    version = f"transformers {transformers.__version__}"
    if kind in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return f"{name} has an encoder and a decoder, and Octavo runs models with one of them. Serve another model."
    if kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return f"{name} is an encoder that Octavo has no implementation of. Serve another embedding model."
    if kind in CONFIG_MAPPING:
        return f"{name} is not a language model that generates text, as far as {version} knows. Serve another model."
    known = {*ARCHITECTURES, *map(_first, _CAUSAL.values())} - {name}
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
    return (
        f"The model's architecture is {name}, which neither Octavo nor {version} knows; the nearest known one is "
        f"{near}. A newer transformers may know it (pip install -U transformers), or serve another model."
    )


def _model_type(name: str) -> str | None:
    """Return the `model_type` of an architecture's configurations; None if transformers lacks it."""
    return next((kind for kind, stated in _CAUSAL.items() if _first(stated) == name), None)


def _first(stated: str | Sequence[str]) -> str:
    """Return the first of the classes that transformers states for a model type."""
    return stated if isinstance(stated, str) else stated[0]


def has_field(config: type[PreTrainedConfig], name: str) -> bool:
    """Return whether a class of configurations has a field."""
    fields = {*inspect.signature(config.__init__).parameters, *config.attribute_map, *ROPE_SETTINGS}
    return name in fields or name in getattr(config, "__dataclass_fields__", {})


def check_class(model: type[PreTrainedModel], config: PreTrainedConfig, name: str) -> None:
    """Raise ConfigError if a class can't use Octavo's attention, or keeps more than keys and values."""
    if model._is_stateful:
        raise refusal(name, "it keeps a recurrent state between tokens (linear attention or a state space)")
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENDING)
    if kinds:
        raise refusal(name, f"it has layers of type {', '.join(kinds)}, only {', '.join(sorted(_ATTENDING))} work so")
    if not model.is_backend_compatible():
        raise refusal(
            name,
            f"its class {model.__name__} computes attention by itself instead of through transformers' "
            "AttentionInterface (its _supports_attention_backend is false)",
        )


def check_rope(model: PreTrainedModel, name: str) -> None:
    """Raise ConfigError for rotary embeddings whose frequencies depend on the longest sequence of a batch."""
    for module in model.modules():
        stated = getattr(module, "rope_type", None)
        for kind in stated.values() if isinstance(stated, dict) else [stated]:
            if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
                raise refusal(
                    name,
                    f"transformers computes its rotary frequencies (rope type {kind!r}) from the longest sequence of a "
                    "batch, so the answers of a request would depend on the others",
                )
