"""Pooling configuration: from sentence-transformers' files, the model's config, and the user's setting.

Format: https://sbert.net/docs/sentence_transformer/usage/custom_models.html (modules.json names a folder each).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from octavo.core.errors import ConfigError, ModelFileError
from octavo.features.pooling.params import Activation, DenseActivation, DenseLayer, PoolerInfo, Pooling, Task
from octavo.hub.files import ModelFiles
from octavo.hub.gguf_file import read_gguf
from octavo.hub.gguf_keys import Keys
from octavo.hub.json_file import read_json
from octavo.hub.sentence_transformers import MODULES as _MODULES
from octavo.hub.sentence_transformers import SETTINGS, is_sentence_transformer, model_settings

_KINDS: Mapping[str, Pooling] = {"mean": "mean", "cls": "cls", "last": "last", "lasttoken": "last"}
_GGUF_KINDS: Mapping[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
_RANK = 4
_FLAGS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
_DENSE_NEUTRAL: Mapping[str, Any] = {
    "module_input_name": "sentence_embedding",
    "module_output_name": "sentence_embedding",
    "use_residual": False,
}
_SETTINGS = (
    "pooling_type, seq_pooling_type, normalize, use_activation, is_matryoshka, matryoshka_dimensions, prompt, task"
)


def pooler_of(
    files: ModelFiles, override: Mapping[str, Any], *, size: int, default: Pooling, labels: int = 0
) -> PoolerInfo:
    """Return the model's pooling configuration.

    Args:
        override: the setting `pooler_config`.
        size: elements of a hidden state.
        default: the pooling of a checkpoint that states none.
        labels: number of outputs of its classification head.

    Raises:
        ConfigError: the checkpoint or the override requires something unsupported.
        ModelFileError: a file of the checkpoint is corrupt.
    """
    pooling, normalize = _in_gguf(files, labels) or default, True
    if is_sentence_transformer(files):
        pooling, normalize = _from_modules(
            files.path, stated="pooling_type" in override, default=default, scores=labels == 1
        )
    late = is_late_interaction(files)
    chosen = _checked(override)
    task: Task = chosen.get("task", "classify" if labels else "token_embed" if late else "embed")
    if task == "classify" and not labels:
        raise ConfigError("--pooler-config: task is classify, and the model has no classification head.")
    dense = dense_layers(files, size)
    size = dense[-1].outputs if dense else size
    return PoolerInfo(
        pooling=chosen.get("pooling", pooling),
        normalize=chosen.get("normalize", normalize or late),
        size=size,
        matryoshka=chosen.get("matryoshka", _matryoshka(files.config, size)),
        labels=_labels(files.config, labels),
        activation=_head_activation(files, labels),
        task=task,
        prompt="" if labels else chosen.get("prompt", _default_prompt(files, asked="prompt" in chosen)),
        dimensions=None if labels or late else _length(files, size),
    )


def is_late_interaction(files: ModelFiles) -> bool:
    """Return whether a checkpoint's vectors are those of its tokens (ColBERT, https://arxiv.org/abs/2004.12832): layers
    after the model, and no pooling in front of them."""
    if not is_sentence_transformer(files):
        return False
    kinds = {kind for kind, _ in _modules(files.path)}
    return "Dense" in kinds and "Pooling" not in kinds


def _in_gguf(files: ModelFiles, labels: int) -> Pooling | None:
    """Return the pooling that a GGUF file states.

    Raises:
        ConfigError: it is a reranker's, and it is not served as one.
    """
    if files.format != "gguf":
        return None
    keys = Keys(read_gguf(files.path))
    kind = keys.get("pooling_type")
    if not labels and (kind == _RANK or keys.has("cls.output.weight")):
        if keys.arch == "bert":
            raise ConfigError(
                f"{files.path} holds a reranker (pooling_type 4) without its head (cls.weight, cls.output.weight). "
                "Use the model's safetensors checkpoint instead."
            )
        family = str(files.config["architectures"][0]).removesuffix("ForCausalLM")
        raise ConfigError(
            f"{files.path} holds a reranker that answers with a token. Serve it as a classifier of the two tokens, by "
            f'their numbers: --hf-overrides \'{{"architectures": ["{family}ForSequenceClassification"], '
            '"classifier_from_token": [NO, YES]}\'.'
        )
    return _GGUF_KINDS.get(kind)


def dense_layers(files: ModelFiles, size: int) -> tuple[DenseLayer, ...]:
    """Return a sentence-transformers checkpoint's layers between pooling and normalization.

    Args:
        size: elements of a hidden state.

    Raises:
        ConfigError: a layer requires something unsupported.
        ModelFileError: a layer's files are missing or corrupt, or its input size does not match.
    """
    if not is_sentence_transformer(files):
        return ()
    layers: list[DenseLayer] = []
    for kind, path in _modules(files.path):
        if kind == "Dense":
            layers.append(_dense_layer(files.path / path, layers[-1].outputs if layers else size))
    return tuple(layers)


def _dense_layer(folder: Path, size: int) -> DenseLayer:
    config = read_json(folder / "config.json")
    stated = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = stated.rpartition(".")[2].lower()
    if activation not in get_args(DenseActivation):
        known = ", ".join(get_args(DenseActivation))
        raise ConfigError(f"{folder / 'config.json'} has the activation {stated}; Octavo has {known}.")
    odd = [name for name, neutral in _DENSE_NEUTRAL.items() if config.get(name, neutral) != neutral]
    if odd:
        raise ConfigError(
            f"{folder / 'config.json'} sets {odd[0]}={config[odd[0]]!r}, which Octavo does not have. Use another model."
        )
    inputs, outputs = config.get("in_features"), config.get("out_features")
    if inputs != size or type(outputs) is not int or outputs < 1:
        raise ModelFileError(
            f"{folder / 'config.json'} maps {inputs} elements to {outputs}, but gets {size}. Get the model again."
        )
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ModelFileError(
            f"{weights} is missing. Get it; where the model has {folder.name}/pytorch_model.bin instead, convert "
            "that file."
        )
    return DenseLayer(
        weights=str(weights),
        inputs=size,
        outputs=outputs,
        bias=config.get("bias", True) is not False,
        activation=cast("DenseActivation", activation),
    )


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return kind and folder of each module."""
    try:
        modules = json.loads((folder / _MODULES).read_bytes())
        return [(str(module["type"]).rpartition(".")[2], str(module.get("path", ""))) for module in modules]
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise ModelFileError(f"{folder / _MODULES} is corrupt: {exc}. Download the file again.") from exc


def _default_prompt(files: ModelFiles, *, asked: bool) -> str:
    """Return the prompt that a checkpoint puts in front of texts by default. `asked`: the user has set another.

    Raises:
        ConfigError: it is not one of the checkpoint's prompts, or its tokens do not belong to the vector.
    """
    settings = model_settings(files)
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts") or {}
    if name is None or asked or not is_sentence_transformer(files):
        return ""
    if name not in prompts:
        raise ConfigError(
            f"{files.path / SETTINGS} has default_prompt_name={name!r}, which is not among its prompts "
            f'({", ".join(map(repr, prompts)) or "none"}). Give one with --pooler-config \'{{"prompt": "..."}}\'.'
        )
    prompt = str(prompts[name] or "")
    places = [files.path / path / "config.json" for kind, path in _modules(files.path) if kind == "Pooling"]
    if prompt and any(read_json(place).get("include_prompt", True) is False for place in places):
        raise ConfigError(
            f"{places[0]} has include_prompt=false, and {SETTINGS} a default prompt ({name}); Octavo pools the "
            'prompt\'s tokens, too. Serve it without, with --pooler-config \'{"prompt": ""}\'.'
        )
    return prompt


def _length(files: ModelFiles, size: int) -> int | None:
    """Return the length to which a checkpoint cuts its vectors by default; None if it does not."""
    length = model_settings(files).get("truncate_dim")
    return length if type(length) is int and 0 < length < size else None


def _from_modules(folder: Path, *, stated: bool, default: Pooling, scores: bool) -> tuple[Pooling, bool]:
    """Return pooling and normalization.

    Args:
        stated: the user has set the pooling; the checkpoint's may be unknown.
        scores: the model's head makes a score.
    """
    pooling, normalize = default, False
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules if kind != "Dropout"]
    if set(kinds) <= set(_ORDER) and sorted(kinds, key=_ORDER.index) != kinds:
        raise ConfigError(
            f"{folder / _MODULES} has the order {', '.join(kinds)}; Octavo has {', '.join(_ORDER)}. Use another model."
        )
    for kind, path in modules:
        match kind:
            case "Transformer" | "Dense" | "Dropout":
                pass
            case "Pooling":
                pooling = pooling if stated else _pooling_mode(folder / path / "config.json")
            case "Normalize":
                normalize = True
            case "LogitScore" if scores:
                pass
            case "LogitScore":
                raise ConfigError(
                    f"{folder / _MODULES} makes scores of a token's logit. Name the tokens that {folder / path} "
                    'states, and the classifier of the family: --hf-overrides \'{"architectures": '
                    '["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}\'.'
                )
            case _:
                raise ConfigError(
                    f"{folder / _MODULES} puts a module {kind} after the model, which Octavo does not have; it has "
                    f"{', '.join(_ORDER)}. Use another model."
                )
    return pooling, normalize


def _pooling_mode(path: Path) -> Pooling:
    config = read_json(path)
    mode = config.get("pooling_mode")
    given = mode if isinstance(mode, list) else [mode] if mode else []
    modes = [str(one) for one in given] or [name for flag, name in _FLAGS.items() if config.get(flag)] or ["mean"]
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise ConfigError(
            f"{path} pools by {' and '.join(modes)}; Octavo supports mean, cls and last, one of them at a "
            'time. Use another model, or choose one with --pooler-config \'{"pooling_type": "MEAN"}\', which gives '
            "other vectors than the model was trained for."
        )
    return _KINDS[modes[0]]


def _checked(override: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's settings under their names here.

    Raises:
        ConfigError: an unknown name or value.
    """
    chosen: dict[str, Any] = {}
    for name, value in override.items():
        match name:
            case "pooling_type" | "seq_pooling_type" if str(value).lower() in _KINDS:
                chosen["pooling"] = _KINDS[str(value).lower()]
            case "normalize" | "use_activation" if isinstance(value, bool):
                chosen["normalize"] = value
            case "is_matryoshka" if isinstance(value, bool):
                chosen.setdefault("matryoshka", [] if value else None)
            case "matryoshka_dimensions" if _are_sizes(value):
                chosen["matryoshka"] = sorted(value)
            case "prompt" if isinstance(value, str):
                chosen["prompt"] = value
            case "prompt":
                raise ConfigError(f"--pooler-config: prompt is a text in front of others, not {value!r}.")
            case "task" if value in get_args(Task):
                chosen["task"] = value
            case "task":
                raise ConfigError(f"--pooler-config: task is {', '.join(get_args(Task))}, not {value!r}.")
            case "pooling_type" | "seq_pooling_type":
                raise ConfigError(f"--pooler-config: {name} is MEAN, CLS or LAST, not {value!r}.")
            case "normalize" | "use_activation" | "is_matryoshka" | "matryoshka_dimensions":
                wanted = "a list of whole numbers" if name == "matryoshka_dimensions" else "true or false"
                raise ConfigError(f"--pooler-config: {name} is {wanted}, not {value!r}.")
            case _:
                raise ConfigError(f"--pooler-config has no setting {name!r}; it has {_SETTINGS}.")
    return chosen


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int and one > 0 for one in value)


def _matryoshka(config: Mapping[str, Any], size: int) -> list[int] | None:
    dimensions = config.get("matryoshka_dimensions")
    if _are_sizes(dimensions):
        return sorted(one for one in cast("list[int]", dimensions) if one <= size)
    return [] if config.get("is_matryoshka") else None


def _labels(config: Mapping[str, Any], count: int) -> list[str]:
    named = config.get("id2label") or {}
    return [str(named.get(str(i), f"LABEL_{i}")) for i in range(count)]


def _head_activation(files: ModelFiles, labels: int) -> Activation:
    """Return the activation that a cross-encoder's files state; otherwise as Transformers' pipelines choose."""
    nested = files.config.get("sentence_transformers") or {}
    newer = model_settings(files).get("activation_fn") if labels else None
    stated = newer or nested.get("activation_fn") or files.config.get("sbert_ce_default_activation_function")
    if stated is not None:
        kind = str(stated).rpartition(".")[2].lower()
        known: dict[str, Activation] = {"identity": "none", "sigmoid": "sigmoid", "softmax": "softmax"}
        if kind not in known:
            raise ConfigError(f"The model's config asks for the activation {stated}; Octavo has {', '.join(known)}.")
        return known[kind]
    if files.config.get("problem_type") == "regression":
        return "none"
    if not labels:
        return "none"
    several = files.config.get("problem_type") == "multi_label_classification"
    return "sigmoid" if labels == 1 or several else "softmax"
