"""The architectures whose images or audio are read: which files of this folder they need. Without torch and NumPy."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from octavo.core.errors import ConfigError, OctavoError
from octavo.features import FeatureContext
from octavo.features.media.settings import MediaSettings
from octavo.hub.files import ModelFiles
from octavo.hub.json_file import read_json_if_there
from octavo.hub.text_config import with_halves

if TYPE_CHECKING:
    from octavo.features.media.processors.base import LoadTokenizer, Processor

_FOLDER = "octavo.features.media"
_HALVES = {"image": "vision_config", "audio": "audio_config"}
PLURALS = {"image": "images", "audio": "audio"}
"""A modality -> the word for some of it in messages."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model.

    Attributes:
        processor: module and class of its preprocessing.
        tower: module of its tower, which has `build_tower`.
        types: values of `model_type` that the tower's configuration may have; a missing one is the first.
        axes: positions of an image's tokens follow its rows and columns (M-RoPE).
        mutual: an image's tokens attend to each other, also to later ones.
        modality: what it reads besides text.
    """

    processor: tuple[str, str]
    tower: str
    types: tuple[str, ...]
    axes: bool = False
    mutual: bool = False
    modality: Literal["image", "audio"] = "image"

    @property
    def half(self) -> str:
        """Field of the model's configuration that has the tower's."""
        return _HALVES[self.modality]


_TILED = ("tiled", "TiledProcessor")
_NATIVE = ("native", "NativeProcessor")
_PIXTRAL = Kind(("rows", "RowsProcessor"), "pixtral", ("pixtral",))
_WHISPER = ("speech", "WhisperProcessor")
_ASR_ENCODERS = ("qwen3_asr_encoder", "qwen3_asr_audio_encoder")


def _qwen3(name: str) -> Kind:
    return Kind(_NATIVE, "qwen3_vl", (name, f"{name}_vision"), axes=True)


KINDS: Mapping[str, tuple[Kind, ...]] = {
    "AudioFlamingo3ForConditionalGeneration": (
        Kind(("speech", "FlamingoProcessor"), "whisper", ("audioflamingo3_encoder",), modality="audio"),
    ),
    "Gemma3ForConditionalGeneration": (
        Kind(("pooled", "PooledProcessor"), "gemma3", ("siglip_vision_model",), mutual=True),
    ),
    "Idefics3ForConditionalGeneration": (Kind(_TILED, "idefics3", ("idefics3_vision", "idefics3")),),
    "InternVLForConditionalGeneration": (Kind(("grid", "GridProcessor"), "internvl", ("internvl_vision",)),),
    "LlavaForConditionalGeneration": (
        Kind(("single", "SingleProcessor"), "llava", ("clip_vision_model", "siglip_vision_model")),
        _PIXTRAL,
    ),
    "LlavaNextForConditionalGeneration": (Kind(("anyres", "AnyresProcessor"), "llava_next", ("clip_vision_model",)),),
    "LlavaOnevisionForConditionalGeneration": (
        Kind(("anyres", "AnyresProcessor"), "llava_next", ("siglip_vision_model",)),
    ),
    "Mistral3ForConditionalGeneration": (_PIXTRAL,),
    "Qwen2AudioForConditionalGeneration": (Kind(_WHISPER, "whisper", ("qwen2_audio_encoder",), modality="audio"),),
    "Qwen2VLForConditionalGeneration": (Kind(_NATIVE, "qwen_vl", ("qwen2_vl", "qwen2_vl_vision"), axes=True),),
    "Qwen2_5_VLForConditionalGeneration": (Kind(_NATIVE, "qwen_vl", ("qwen2_5_vl", "qwen2_5_vl_vision"), axes=True),),
    "Qwen3ASRForConditionalGeneration": (
        Kind(("speech", "QwenAsrProcessor"), "qwen3_asr", _ASR_ENCODERS, modality="audio"),
    ),
    "Qwen3VLForConditionalGeneration": (_qwen3("qwen3_vl"),),
    "Qwen3VLMoeForConditionalGeneration": (_qwen3("qwen3_vl_moe"),),
    "Qwen3_5ForConditionalGeneration": (_qwen3("qwen3_5"),),
    "Qwen3_5MoeForConditionalGeneration": (_qwen3("qwen3_5_moe"),),
    "SmolVLMForConditionalGeneration": (Kind(_TILED, "idefics3", ("smolvlm_vision", "smolvlm")),),
}
"""Architecture -> its kinds, by their towers."""
_LACKING = {
    "Gemma4ForConditionalGeneration": "its tower is not supported",
    "Gemma4UnifiedForConditionalGeneration": "its embedder of pixels is not supported",
    "InternVLChatModel": "its tensors have names that are not read; use a checkpoint of "
    "InternVLForConditionalGeneration",
    "Llama4ForConditionalGeneration": "its tower is not supported",
}
"""Architectures with images that only the text half is served of -> what is missing."""


def has_media(config: Mapping[str, Any]) -> bool:
    """Return whether an architecture reads images or audio, supported or not."""
    return _name(config) in KINDS or _name(config) in _LACKING


def kind_of(config: Mapping[str, Any]) -> Kind:
    """Return the kind of a model whose images or audio are supported; see `lacking`."""
    kinds = KINDS[_name(config)]
    return next(kind for kind in kinds if _tower_type(config, kinds) in kind.types)


def modality_of(config: Mapping[str, Any]) -> str:
    """Return what an architecture reads besides text, supported or not."""
    kinds = KINDS.get(_name(config), ())
    return kinds[0].modality if kinds else "image"


def lacking(config: Mapping[str, Any]) -> str:
    """Return why images or audio of this architecture are not supported; "" if they are."""
    name = _name(config)
    if name in _LACKING:
        return f"images of {name} are not supported: {_LACKING[name]}"
    if name not in KINDS:
        return "this model takes only text"
    tower = _tower_type(config, KINDS[name])
    if not any(tower in kind.types for kind in KINDS[name]):
        return f"{PLURALS[modality_of(config)]} of {name} with a tower of type {tower!r} are not supported"
    return ""


def refusal(context: FeatureContext) -> str:
    """Return why images or audio of the model are not read; "" if they are. Both halves follow it.

    Raises:
        ConfigError: a setting has no effect on the model.
    """
    files, settings = context.files, context.settings_of(MediaSettings)
    if files is None or not context.generates:
        return "this model takes only text"
    if why := lacking(files.config):
        return why
    modality = kind_of(files.config).modality
    if files.format == "gguf":
        return f"a GGUF file has no weights for {PLURALS[modality]}; files of their own (mmproj) are not read"
    if not settings.limit_of(modality):
        return f"the server was started with --limit-mm-per-prompt {modality}=0"
    stated = processor_config(files)
    if not stated:
        return f"{files.path} has neither preprocessor_config.json nor processor_config.json"
    check_fields(files.config, settings.mm_processor_kwargs)
    try:
        make_processor(files.config, stated | settings.mm_processor_kwargs, context.load_tokenizer)
    except OctavoError as exc:
        return str(exc)
    return ""


def processor_config(files: ModelFiles) -> dict[str, Any]:
    """Return how a checkpoint says that images or audio are prepared; {} if it does not. Transformers 5 writes one file
    for all that a processor does, with that of images or audio inside.

    Raises:
        ModelFileError: a file is not JSON.
    """
    whole = read_json_if_there(files.path / "processor_config.json")
    if modality_of(files.config) == "image":
        return dict(whole.get("image_processor") or {}) or read_json_if_there(files.path / "preprocessor_config.json")
    inner = whole.pop("feature_extractor", None) or read_json_if_there(files.path / "preprocessor_config.json")
    return {**whole, **inner} if inner else {}


def make_processor(config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> Processor:
    """Return the preprocessing of a model whose images or audio are supported.

    Raises:
        ConfigError, ModelFileError: the checkpoint asks for something that is not supported, or its files don't fit.
    """
    try:
        make = _processor_class(config)
        return make(with_halves(config), processor, tokenizer)
    except OctavoError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ConfigError(f"The model's preprocessor_config.json or config.json is damaged: {exc!r}.") from exc


def _processor_class(config: Mapping[str, Any]) -> type[Processor]:
    module, name = kind_of(config).processor
    found: type[Processor] = getattr(importlib.import_module(f"{_FOLDER}.processors.{module}"), name)
    return found


def check_fields(config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a field in place of a preprocessor's has no effect on this model."""
    known = _processor_class(config).fields
    odd = next((name for name in given if name not in known), None)
    if odd is not None:
        raise ConfigError(
            f"--mm-processor-kwargs has {odd!r}, which has no effect on this model. It takes "
            f"{', '.join(sorted(known)) or 'none'}."
        )


def _tower_type(config: Mapping[str, Any], kinds: Sequence[Kind]) -> str:
    return str(with_halves(config).get(kinds[0].half, {}).get("model_type") or kinds[0].types[0])


def _name(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or [""])[0])
