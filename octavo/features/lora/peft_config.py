"""PEFT's `adapter_config.json`: the fields that change results, each supported or refused by name.

Source: `LoraConfig` of https://github.com/huggingface/peft (0.21).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from octavo.core.errors import ModelFileError
from octavo.features.lora.activation import invocation_of

T = TypeVar("T")

_MERGE = "Merge the adapter into its base model and serve the result."
_REFUSED = {
    "layer_replication": "it repeats layers of the base model",
    "use_qalora": "its inputs are pooled (QA-LoRA)",
    "use_bdlora": "its matrices are block-diagonal (BD-LoRA)",
    "lora_bias": "its matrices have biases",
    "arrow_config": "it routes between adapters (Arrow)",
    "kasa_config": "it changes the base weights (KaSA)",
    "monteclora_config": "its weights are random (MonteCLoRA)",
    "velora_config": "it compresses activations (VeLoRA)",
}
"""Fields that must be unset -> what they do."""
_PLAIN_STARTS = ("true", "false", "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base weights as they are."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields that matter here.

    Attributes:
        path: the file, for errors.
        alpha: numerator of the scale; None for a scale of 1.
        r: rank of projections without a pattern; None if not stated.
        modules: names, or one regular expression, of the changed modules; empty if not stated.
        excluded: the same for modules that are left out.
        parameters: names of changed tensors: of all experts, or the weights of modules.
        layers: indices of the changed layers; empty for all.
        layer_names: names of the lists of layers that `layers` refers to; empty for any.
        saved: how the names of modules with weights of their own end, not only after a dot.
        tokens: name of a module -> the token ids whose rows are changed in it; "" for the model's embedding.
        base: the base model's name; "" if not stated.
        invocation: tokens that activate it; empty if it is always active.
    """

    path: Path
    alpha: float | None = None
    r: int | None = None
    modules: Sequence[str] | str = ()
    excluded: Sequence[str] | str = ()
    parameters: Sequence[str] = ()
    layers: Sequence[int] = ()
    layer_names: Sequence[str] = ()
    saved: Sequence[str] = ()
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    ensure_weight_tying: bool = False
    base: str = ""
    invocation: tuple[int, ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any], path: Path) -> PeftConfig:
        """Return a file's configuration.

        Raises:
            ModelFileError: a field has an unusable value, or asks for something that Octavo lacks.
        """
        kind = fields.get("peft_type")
        if kind != "LORA":
            raise ModelFileError(
                f"{path}: peft_type is {kind!r}; Octavo serves adapters of type 'LORA'. Train one of these, or merge "
                "the adapter into its base model, if its type allows that, and serve the result."
            )
        for name, effect in _REFUSED.items():
            if fields.get(name):
                raise ModelFileError(f"{path}: {name} is set: {effect}, which Octavo lacks. {_MERGE}")
        if fields.get("bias", "none") != "none":
            raise ModelFileError(f"{path}: bias is {fields['bias']!r}; only 'none' is supported. {_MERGE}")
        started = fields.get("init_lora_weights", True)
        if str(started).lower() not in _PLAIN_STARTS:
            raise ModelFileError(
                f"{path}: init_lora_weights is {started!r}, which changed the base weights. Convert the adapter to "
                "plain LoRA (PEFT: save_pretrained with path_initial_model_for_weight_conversion), or merge it into "
                "the weights that it was trained on and serve the result."
            )
        names = _names(fields, "layers_pattern", path)
        return cls(
            path,
            alpha=_number(fields, "lora_alpha", path),
            r=_rank(fields.get("r"), "r", path),
            modules=_names(fields, "target_modules", path),
            excluded=_names(fields, "exclude_modules", path),
            parameters=_listed(fields, "target_parameters", path),
            layers=_layers(fields, path),
            layer_names=[names] if isinstance(names, str) else names,
            saved=_listed(fields, "modules_to_save", path),
            tokens=_tokens(fields, path),
            ranks={key: _rank(one, f"rank_pattern.{key}", path) for key, one in _table(fields, "rank_pattern", path)},
            alphas={
                key: _number({f"alpha_pattern.{key}": one}, f"alpha_pattern.{key}", path)
                for key, one in _table(fields, "alpha_pattern", path)
            },
            use_rslora=bool(fields.get("use_rslora")),
            use_dora=bool(fields.get("use_dora")),
            ensure_weight_tying=bool(fields.get("ensure_weight_tying")),
            base=str(fields.get("base_model_name_or_path") or ""),
            invocation=invocation_of(fields, "alora_invocation_tokens", path),
        )

    def rank(self, module: str) -> int | None:
        """Return the stated rank of a module; None if none is stated."""
        return self._patterned(self.ranks, module, self.r)

    def scale(self, module: str, rank: int) -> float:
        """Return alpha / r, or alpha / sqrt(r) of rank-stabilised LoRA (https://arxiv.org/abs/2312.03732)."""
        alpha = self._patterned(self.alphas, module, self.alpha)
        if alpha is None:
            return 1.0
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def saves(self, module: str) -> bool:
        """Return whether the adapter has a module's whole weights."""
        return module.endswith(tuple(self.saved))

    def names_parameter(self, tensor: str) -> bool:
        """Return whether a tensor is changed by its name, not that of its module."""
        return self._matches(self.parameters, tensor)

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """Return the token ids whose rows of a module are changed."""
        named = (ids for name, ids in self.tokens.items() if name and module.endswith(name))
        return next(named, self.tokens.get("", ()))

    def targets(self, module: str, *, linear: bool) -> bool:
        """Return whether the adapter must have matrices for a module of the model, by its name."""
        if not self.modules or self.saves(module) or self._matches(self.excluded, module):
            return False
        if self.modules == "all-linear":
            return linear and not module.endswith("lm_head")
        if not self._matches(self.modules, module):
            return False
        if isinstance(self.modules, str) or not self.layers:
            return True
        names = self.layer_names or [r"[^.]*"]
        found = (self._match(name, f".{module}", before=r".*?\.", after=r"\.(?P<layer>\d+)\..*") for name in names)
        index = next((int(match["layer"]) for match in found if match is not None), None)
        return index in self.layers

    def _matches(self, names: Sequence[str] | str, module: str) -> bool:
        """Return whether a module is among names, or matches a regular expression, as PEFT decides it."""
        if not isinstance(names, str):
            return any(module == name or module.endswith(f".{name}") for name in names)
        return self._match(names, module) is not None

    def _patterned(self, patterns: Mapping[str, T], module: str, default: T) -> T:
        fitting = (patterns[one] for one in patterns if self._match(one, module, before=r"(.*\.)?(", after=")"))
        return next(fitting, default)

    def _match(self, pattern: str, module: str, *, before: str = "", after: str = "") -> re.Match[str] | None:
        try:
            return re.fullmatch(f"{before}{pattern}{after}", module)
        except re.error as error:
            raise ModelFileError(f"{self.path}: {pattern!r} is no regular expression ({error}).") from error


def _names(fields: Mapping[str, Any], key: str, path: Path) -> Sequence[str] | str:
    value = fields.get(key) or ()
    if isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)):
        return value
    raise ModelFileError(f"{path}: {key} is {value!r}; it must be a list of names or a regular expression.")


def _listed(fields: Mapping[str, Any], key: str, path: Path) -> Sequence[str]:
    value = _names(fields, key, path)
    if isinstance(value, str):
        raise ModelFileError(f"{path}: {key} is {value!r}; it must be a list of names.")
    return value


def _layers(fields: Mapping[str, Any], path: Path) -> Sequence[int]:
    value = fields.get("layers_to_transform")
    layers = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(one) is int for one in layers):
        raise ModelFileError(f"{path}: layers_to_transform is {value!r}; it must be the number of a layer, or a list.")
    return layers


def _tokens(fields: Mapping[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    """Return `trainable_token_indices`: a list is for the embedding."""
    value = fields.get("trainable_token_indices") or {}
    found = value if isinstance(value, dict) else {"": value}
    for ids in found.values():
        if not isinstance(ids, list) or not ids or not all(type(one) is int and one >= 0 for one in ids):
            raise ModelFileError(
                f"{path}: trainable_token_indices is {value!r}; it must be a list of token ids, or an object from "
                "names of modules to such lists."
            )
        odd = next((one for one in ids if ids.count(one) > 1), None)
        if odd is not None:
            raise ModelFileError(f"{path}: trainable_token_indices has token {odd} twice. Save the adapter again.")
    return {name: tuple(ids) for name, ids in found.items()}


def _table(fields: Mapping[str, Any], key: str, path: Path) -> list[tuple[str, Any]]:
    value = fields.get(key) or {}
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: {key} is {value!r}; it must be an object from names to numbers.")
    return list(value.items())


def _rank(value: Any, key: str, path: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFileError(f"{path}: {key} is {value!r}; it must be a positive integer.")
    return value


def _number(fields: Mapping[str, Any], key: str, path: Path) -> float:
    value = fields.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ModelFileError(f"{path}: {key} is {value!r}; it must be a number.")
    return float(value)
