"""`Bridge`: builds models of transformers' modules."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.core.errors import ConfigError
from octavo.features.bridge import attention
from octavo.features.bridge.architecture import check_class, check_rope, classes_of, has_field
from octavo.features.bridge.compilation import compile_body
from octavo.features.bridge.conversion import converted
from octavo.features.bridge.model import BridgedLM
from octavo.features.bridge.spec import BridgedSpec
from octavo.features.bridge.trial import run_trial
from octavo.hub.files import ModelFiles
from octavo.models.hf_rope import stretched_limit
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.model import LayeredModel, ModelSpec
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.build import Build
from octavo.parallel.mesh import ALONE, Mesh


class Bridge:
    """An `Implementation` for one architecture.

    Attributes:
        name: the library and its version.
    """

    def __init__(
        self,
        version: str,
        files: ModelFiles,
        *,
        trusts_code: bool,
        compiles: bool = False,
        overrides: Collection[str] = (),
    ) -> None:
        """
        Args:
            compiles: compile the modules with torch.compile.
            overrides: names of fields of the model's config that settings replace.

        Raises:
            ConfigError: the architecture can't be run this way, or has no field that is overridden; the text says why.
        """
        self.name = f"transformers {version}"
        self._architecture = str(files.config["architectures"][0])
        self._classes = classes_of(files.config, files.path, trusts_code=trusts_code)
        self._compiles = compiles
        self._skeleton: PreTrainedModel | None = None
        for name in overrides:
            if name not in files.own_fields and not has_field(self._classes.config, name):
                raise ConfigError(
                    f"--hf-overrides {name}: neither the model nor {self._classes.config.__name__} of transformers has "
                    "such a field."
                )

    def spec_of(self, config: Mapping[str, Any]) -> BridgedSpec:
        model = self._without_weights(config)
        trial = run_trial(model, self._architecture)
        if self._skeleton is None:
            self._skeleton = model
        head = model.get_output_embeddings()
        widest = max(
            (module.out_features for module in model.modules() if isinstance(module, nn.Linear) and module is not head),
            default=trial.hidden_size,
        )
        return BridgedSpec(
            hidden_size=trial.hidden_size,
            intermediate_size=widest,
            vocab_size=trial.vocab_size,
            max_position=_max_position(model.config),
            tied=head is not None and head.weight is model.get_input_embeddings().weight,
            recordable=trial.recordable,
            layers=trial.attention,
        )

    def attention(self, spec: ModelSpec, mesh: Mesh = ALONE) -> AttentionSpec:
        assert isinstance(spec, BridgedSpec)
        if mesh.size > 1:
            raise ConfigError(
                f"{self._architecture} is computed by transformers' modules, which run on one device. Leave out the "
                "settings that divide a model."
            )
        layers = [spec.attention(i) for i in range(spec.num_layers)]
        return next((layer for layer in layers if layer.window is not None), layers[0])

    def build(self, b: Build, spec: ModelSpec) -> LayeredModel:
        assert isinstance(spec, BridgedSpec)
        assert self._skeleton is not None, "spec_of is called first"
        model = copy.deepcopy(self._skeleton)
        model.config.dtype = b.dtype
        bridged = BridgedLM(b, spec, model)
        if self._compiles:
            compile_body(bridged.body)
        return bridged

    def named(self, checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
        assert self._skeleton is not None, "spec_of is called first"
        return converted(checkpoint, self._skeleton)

    def _without_weights(self, stored: Mapping[str, Any]) -> PreTrainedModel:
        config = self._config(stored)
        check_class(self._classes.model, config, self._architecture)
        try:
            with _WithoutStorage():
                model = self._classes.model(config)
        except Exception as error:
            raise ConfigError(
                f"transformers can't build {self._architecture} from the model's config: {_said(error)}"
            ) from error
        check_rope(model, self._architecture)
        return model.eval().requires_grad_(False)

    def _config(self, stored: Mapping[str, Any]) -> PreTrainedConfig:
        """Return the configuration with Octavo's attention chosen."""
        fields = dict(stored)
        if str(fields["architectures"][0]) != self._classes.model.__name__:
            fields["tie_word_embeddings"] = True  # a checkpoint of the bare model has no head
        try:
            config = self._classes.config.from_dict(fields)
        except Exception as error:
            raise ConfigError(f"transformers can't read the model's config: {_said(error)}") from error
        config.use_cache = False
        config._attn_implementation = attention.NAME
        return config


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class _WithoutStorage(TorchFunctionMode):
    """Makes what `torch.empty` returns, and so large weights, on the meta device. What a module computes from its
    configuration, such as rotary frequencies, is real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        return func(*args, **(kwargs or {}))


def _max_position(config: PreTrainedConfig) -> int:
    """Return the model's longest sequence.

    Raises:
        ConfigError: the configuration doesn't say.
    """
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            params = getattr(config, "rope_parameters", None) or {}
            factor = params.get("factor") if params.get("rope_type") in ("linear", "yarn") else None
            return stretched_limit(params, config.to_dict(), value, float(factor)) if factor else value
    raise ConfigError(
        "The model's config has no max_position_embeddings, the longest sequence that it was made for; state it: "
        '--hf-overrides {"max_position_embeddings": 4096}.'
    )
