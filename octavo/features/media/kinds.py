"""The architectures whose images, videos or audio are read: which files of this folder they need. Without torch and
NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.hub.text_config import with_halves

_HALVES = {"image": "vision_config", "audio": "audio_config"}
PLURALS = {"image": "images", "audio": "audio", "video": "videos"}
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
        videos: module and class of the preprocessing of videos, which the same tower encodes; None if it has none.
    """

    processor: tuple[str, str]
    tower: str
    types: tuple[str, ...]
    axes: bool = False
    mutual: bool = False
    modality: Literal["image", "audio"] = "image"
    videos: tuple[str, str] | None = None

    @property
    def half(self) -> str:
        """Field of the model's configuration that has the tower's."""
        return _HALVES[self.modality]


_TILED = ("tiled", "TiledProcessor")
_NATIVE = ("native", "NativeProcessor")
_QWEN_VIDEOS = ("native_videos", "QwenVideoProcessor")
_TIMED_VIDEOS = ("native_videos", "TimedVideoProcessor")
_PIXTRAL = Kind(("rows", "RowsProcessor"), "pixtral", ("pixtral",))
_WHISPER = ("speech", "WhisperProcessor")
_ASR_ENCODERS = ("qwen3_asr_encoder", "qwen3_asr_audio_encoder")


def _qwen2(name: str) -> Kind:
    return Kind(_NATIVE, "qwen_vl", (name, f"{name}_vision"), axes=True, videos=_QWEN_VIDEOS)


def _qwen3(name: str) -> Kind:
    return Kind(_NATIVE, "qwen3_vl", (name, f"{name}_vision"), axes=True, videos=_TIMED_VIDEOS)


KINDS: Mapping[str, tuple[Kind, ...]] = {
    "AudioFlamingo3ForConditionalGeneration": (
        Kind(("speech", "FlamingoProcessor"), "whisper", ("audioflamingo3_encoder",), modality="audio"),
    ),
    "Gemma3ForConditionalGeneration": (
        Kind(("pooled", "PooledProcessor"), "gemma3", ("siglip_vision_model",), mutual=True),
    ),
    "Idefics3ForConditionalGeneration": (Kind(_TILED, "idefics3", ("idefics3_vision", "idefics3")),),
    "InternVLForConditionalGeneration": (
        Kind(
            ("grid", "GridProcessor"),
            "internvl",
            ("internvl_vision",),
            videos=("frame_videos", "InternVideoProcessor"),
        ),
    ),
    "LlavaForConditionalGeneration": (
        Kind(("single", "SingleProcessor"), "llava", ("clip_vision_model", "siglip_vision_model")),
        _PIXTRAL,
    ),
    "LlavaNextForConditionalGeneration": (Kind(("anyres", "AnyresProcessor"), "llava_next", ("clip_vision_model",)),),
    "LlavaOnevisionForConditionalGeneration": (
        Kind(
            ("anyres", "AnyresProcessor"),
            "llava_next",
            ("siglip_vision_model",),
            videos=("frame_videos", "OnevisionVideoProcessor"),
        ),
    ),
    "Mistral3ForConditionalGeneration": (_PIXTRAL,),
    "Qwen2AudioForConditionalGeneration": (Kind(_WHISPER, "whisper", ("qwen2_audio_encoder",), modality="audio"),),
    "Qwen2VLForConditionalGeneration": (_qwen2("qwen2_vl"),),
    "Qwen2_5_VLForConditionalGeneration": (_qwen2("qwen2_5_vl"),),
    "Qwen3ASRForConditionalGeneration": (
        Kind(("speech", "QwenAsrProcessor"), "qwen3_asr", _ASR_ENCODERS, modality="audio"),
    ),
    "Qwen3VLForConditionalGeneration": (_qwen3("qwen3_vl"),),
    "Qwen3VLMoeForConditionalGeneration": (_qwen3("qwen3_vl_moe"),),
    "Qwen3_5ForConditionalGeneration": (_qwen3("qwen3_5"),),
    "Qwen3_5MoeForConditionalGeneration": (_qwen3("qwen3_5_moe"),),
    "SmolVLMForConditionalGeneration": (
        Kind(_TILED, "idefics3", ("smolvlm_vision", "smolvlm"), videos=("frame_videos", "SmolVideoProcessor")),
    ),
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


def _tower_type(config: Mapping[str, Any], kinds: Sequence[Kind]) -> str:
    return str(with_halves(config).get(kinds[0].half, {}).get("model_type") or kinds[0].types[0])


def _name(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or [""])[0])
