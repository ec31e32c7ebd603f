"""How a checkpoint's images, videos or audio are prepared, and why some are not read. Without torch and NumPy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from octavo.core.errors import ConfigError, OctavoError
from octavo.features import FeatureContext
from octavo.features.media.kinds import PLURALS, kind_of, lacking, modality_of
from octavo.features.media.payload import MediaInfo
from octavo.features.media.settings import MediaSettings
from octavo.hub.files import ModelFiles
from octavo.hub.json_file import read_json_if_there
from octavo.hub.text_config import with_halves

if TYPE_CHECKING:
    from octavo.features.media.processors.base import LoadTokenizer, Processor
    from octavo.features.media.processors.videos import VideoProcessor

Made = TypeVar("Made")
_FOLDER = "octavo.features.media"


def refusals(context: FeatureContext) -> dict[str, str]:
    """Return why images, videos or audio of the model are not read, by modality; "" for what is read. Both halves
    follow it.

    Raises:
        ConfigError: a setting has no effect on the model.
    """
    files, settings = context.files, context.settings_of(MediaSettings)
    if files is None:
        return {"image": "this model takes only text"}
    modality = modality_of(files.config)
    if not context.generates:
        return {modality: "this server makes embeddings of texts"}
    if why := lacking(files.config):
        return {modality: why}
    if files.format == "gguf":
        return {
            modality: f"a GGUF file has no weights for {PLURALS[modality]}; files of their own (mmproj) are not read"
        }
    found = {modality: _limited(settings, modality)}
    videos = kind_of(files.config).videos is not None
    if videos:
        found["video"] = _limited(settings, "video")
    if all(found.values()):
        return found
    stated = processor_config(files)
    if not stated:
        return dict.fromkeys(found, f"{files.path} has neither preprocessor_config.json nor processor_config.json")
    given = settings.mm_processor_kwargs
    check_fields(files.config, given)
    try:
        make_processor(files.config, stated | own_fields(files.config, given), context.load_tokenizer)
        if videos:
            found["video"] = found["video"] or _why_no_videos(context, files, given)
    except OctavoError as exc:
        return dict.fromkeys(found, str(exc))
    return found


def info_of(context: FeatureContext, why: Mapping[str, str]) -> MediaInfo:
    """Return what the text half has to know.

    Args:
        why: see `refusals`.
    """
    files, settings = context.files, context.settings_of(MediaSettings)
    assert files is not None
    modality = modality_of(files.config)
    if all(why.values()):
        video = MediaInfo(modality="video", refused=why["video"]) if "video" in why else None
        return MediaInfo(modality=modality, refused=next(iter(why.values())), video=video)
    kind, config = kind_of(files.config), with_halves(files.config)
    given = settings.mm_processor_kwargs
    kept = {name: value for name, value in config.items() if not isinstance(value, dict)}
    own: dict[str, Any] = {
        "config": {**kept, kind.half: config.get(kind.half, {})},
        "domains": list(settings.allowed_media_domains),
        "local_path": settings.folder,
    }
    video = None
    if "video" in why:
        video = MediaInfo(
            modality="video",
            refused=why["video"],
            processor=video_config(files, given),
            limit=settings.limit_of("video"),
            timeout_s=settings.video_fetch_timeout,
            max_bytes=settings.max_video_bytes,
            max_pixels=settings.max_video_pixels,
            max_frame_pixels=settings.max_image_pixels,
            max_seconds=settings.max_video_seconds,
            max_frames=settings.max_video_frames,
            **own,
        )
    audio = modality == "audio"
    return MediaInfo(
        modality=modality,
        refused=why[modality],
        processor=processor_config(files) | own_fields(files.config, given),
        limit=settings.limit_of(modality),
        timeout_s=settings.audio_fetch_timeout if audio else settings.image_fetch_timeout,
        max_bytes=settings.max_audio_bytes if audio else settings.max_image_bytes,
        max_pixels=settings.max_image_pixels,
        max_seconds=settings.max_audio_seconds,
        video=video,
        **own,
    )


def _limited(settings: MediaSettings, modality: str) -> str:
    if settings.limit_of(modality):
        return ""
    return f"the server was started with --limit-mm-per-prompt {modality}=0"


def _why_no_videos(context: FeatureContext, files: ModelFiles, given: Mapping[str, Any]) -> str:
    try:
        make_video_processor(files.config, video_config(files, given), context.load_tokenizer)
    except OctavoError as exc:
        return str(exc)
    scaled = processor_config(files) | own_fields(files.config, given)
    from octavo.features.media.processors.base import NORMALIZING  # imported here: it needs NumPy

    other = next((name for name in sorted(NORMALIZING) if _differs(scaled, video_config(files, given), name)), None)
    return "" if other is None else f"its frames have another {other} than its images"


def _differs(first: Mapping[str, Any], second: Mapping[str, Any], name: str) -> bool:
    """Return whether two preprocessors state different values of a field; what is missing is the family's default."""
    one, other = first.get(name), second.get(name)
    return one is not None and other is not None and one != other


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


def video_config(files: ModelFiles, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a checkpoint says that videos are prepared, with fields in place of some; where it says nothing of
    videos, what it says of images.

    Raises:
        ModelFileError: a file is not JSON.
    """
    whole = read_json_if_there(files.path / "processor_config.json")
    own = whole.get("video_processor") or read_json_if_there(files.path / "video_preprocessor_config.json")
    stated = own or read_json_if_there(files.path / "preprocessor_config.json") or whole.get("image_processor") or {}
    return {**stated, **video_fields(files.config, given)}


def make_processor(config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> Processor:
    """Return the preprocessing of a model whose images or audio are supported.

    Raises:
        ConfigError, ModelFileError: the checkpoint asks for something that is not supported, or its files don't fit.
    """
    return _made(_processor_class(config), config, processor, tokenizer)


def most_of_videos(context: FeatureContext) -> int:
    """Return the embeddings of the largest item of a video; 0 if videos are not read."""
    files = context.files
    if files is None or refusals(context).get("video", "none") != "":
        return 0
    given = context.settings_of(MediaSettings).mm_processor_kwargs
    return make_video_processor(files.config, video_config(files, given), context.load_tokenizer).most


def make_video_processor(
    config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer
) -> VideoProcessor:
    """Return the preprocessing of videos; likewise."""
    return _made(_video_class(config), config, processor, tokenizer)


def _made(
    make: Callable[[Mapping[str, Any], Mapping[str, Any], LoadTokenizer], Made],
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    tokenizer: LoadTokenizer,
) -> Made:
    try:
        return make(with_halves(config), processor, tokenizer)
    except OctavoError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ConfigError(f"The model's preprocessor_config.json or config.json is damaged: {exc!r}.") from exc


def _processor_class(config: Mapping[str, Any]) -> type[Processor]:
    return cast("type[Processor]", _class_of(kind_of(config).processor))


def _video_class(config: Mapping[str, Any]) -> type[VideoProcessor]:
    place = kind_of(config).videos
    assert place is not None
    return cast("type[VideoProcessor]", _class_of(place))


def _class_of(place: tuple[str, str]) -> Any:
    module, name = place
    return getattr(importlib.import_module(f"{_FOLDER}.processors.{module}"), name)


_OF_VIDEOS = "videos_kwargs"
"""Field with those that replace the video preprocessor's only, as Transformers names it."""


def own_fields(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some fields that replace the preprocessor's of images or audio."""
    known = _processor_class(config).fields
    return {name: value for name, value in given.items() if name in known}


def video_fields(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some fields that replace the video preprocessor's: those that only it has, or that mean the same
    for both."""
    known = _video_class(config).common
    return {name: value for name, value in given.items() if name in known} | dict(given.get(_OF_VIDEOS) or {})


def check_fields(config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a field in place of a preprocessor's has no effect on this model."""
    known = set(_processor_class(config).fields)
    if kind_of(config).videos is not None:
        known |= {*_video_class(config).common, _OF_VIDEOS}
        _check_known(_video_class(config).fields, given.get(_OF_VIDEOS) or {}, f"--mm-processor-kwargs {_OF_VIDEOS}")
    _check_known(known, given, "--mm-processor-kwargs")


def _check_known(known: Collection[str], given: Any, where: str) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be an object of fields, got {given!r}.")
    odd = next((name for name in given if name not in known), None)
    if odd is not None:
        raise ConfigError(
            f"{where} has {odd!r}, which has no effect on this model. It takes {', '.join(sorted(known)) or 'none'}."
        )
