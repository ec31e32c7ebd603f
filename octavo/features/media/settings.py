"""Settings of images, videos and audio in prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core import quantities
from octavo.core.errors import ConfigError
from octavo.core.flag import setting
from octavo.features import FeatureSettings

MOST_PIXELS = 178_000_000
"""Pillow refuses larger images."""
_DEFAULT_LIMIT = 999
_KINDS = ("image", "audio", "video")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings(FeatureSettings):
    """Settings of images and audio in prompts.

    Attributes:
        limit_mm_per_prompt: kind -> most of it in a prompt. With 0 of what it reads, the model is served as one of
            text, and the weights that read images or audio are not loaded.
        mm_processor_kwargs: fields that replace those of the checkpoint's preprocessor_config.json.
        mm_encoder_cache_gb: GiB of encoded images, frames or audio on the device.
        allowed_media_domains: hosts that images, videos and audio may be fetched from; empty for all public ones.
        allowed_local_media_path: folder whose files `file://` URLs may name; empty for none.

    Raises:
        ConfigError: a value is out of range.
    """

    limit_mm_per_prompt: dict[str, Any] = setting(
        {},
        'most images, videos or pieces of audio in a prompt, such as {"image": 4, "video": 1}; by default 999. With 0 '
        "images and no videos named, or 0 pieces of audio, only text is served, without the weights of the tower",
    )
    mm_processor_kwargs: dict[str, Any] = setting(
        {}, 'fields in place of those of preprocessor_config.json, such as {"max_pixels": 802816} or {"fps": 1}'
    )
    mm_encoder_cache_gb: float = setting(
        0.25,
        "GiB of the device's memory for encoded images, frames or audio; equal ones are encoded once. One always fits",
        read=quantities.gibibytes,
        metavar="GIB",
    )
    allowed_media_domains: tuple[str, ...] = setting(
        (),
        "hosts that images, videos and audio may be fetched from, also if their addresses are private; without it, all "
        "hosts with public addresses",
        metavar="HOST",
    )
    allowed_local_media_path: str = setting(
        "", "folder whose files requests may name as file:// URLs", shown="none", metavar="DIR"
    )
    image_fetch_timeout: float = setting(
        5.0, "seconds that fetching an image may take", read=quantities.positive, metavar="S", env="IMAGE_FETCH_TIMEOUT"
    )
    max_image_bytes: int = setting(32 << 20, "largest image file", read=quantities.size, metavar="SIZE")
    max_image_pixels: int = setting(
        50_000_000, "most pixels of an image as sent, which it is decoded to", read=quantities.natural, metavar="N"
    )

    audio_fetch_timeout: float = setting(
        10.0, "seconds that fetching audio may take", read=quantities.positive, metavar="S", env="AUDIO_FETCH_TIMEOUT"
    )
    max_audio_bytes: int = setting(32 << 20, "largest audio file", read=quantities.size, metavar="SIZE")
    max_audio_seconds: float = setting(
        1800.0, "longest audio as sent, which it is decoded to", read=quantities.positive, metavar="S"
    )

    video_fetch_timeout: float = setting(
        30.0, "seconds that fetching a video may take", read=quantities.positive, metavar="S", env="VIDEO_FETCH_TIMEOUT"
    )
    max_video_bytes: int = setting(64 << 20, "largest file of a video", read=quantities.size, metavar="SIZE")
    max_video_seconds: float = setting(
        600.0, "longest video as sent; some of its frames are used", read=quantities.positive, metavar="S"
    )
    max_video_frames: int = setting(36_000, "most frames of a video as sent", read=quantities.natural, metavar="N")
    max_video_pixels: int = setting(
        40_000_000_000,
        "most pixels of a video as sent, in all its frames together; --max-image-pixels holds for each",
        read=quantities.natural,
        metavar="N",
    )

    def __post_init__(self) -> None:
        for kind, given in self.limit_mm_per_prompt.items():
            if kind not in _KINDS:
                raise ConfigError(f"--limit-mm-per-prompt has {kind!r}; its keys are {', '.join(_KINDS)}.")
            count = given.get("count") if isinstance(given, dict) else given
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ConfigError(f"--limit-mm-per-prompt {kind}={given!r} must be a whole number, 0 or more.")
        if not 1 <= self.max_image_pixels <= MOST_PIXELS:
            raise ConfigError(f"--max-image-pixels {self.max_image_pixels} must be from 1 to {MOST_PIXELS:,}.")
        for name, size in (
            ("image-bytes", self.max_image_bytes),
            ("audio-bytes", self.max_audio_bytes),
            ("video-bytes", self.max_video_bytes),
            ("video-frames", self.max_video_frames),
            ("video-pixels", self.max_video_pixels),
        ):
            if size < 1:
                raise ConfigError(f"--max-{name} {size} must be at least 1.")
        for name, seconds in (
            ("image-fetch-timeout", self.image_fetch_timeout),
            ("audio-fetch-timeout", self.audio_fetch_timeout),
            ("video-fetch-timeout", self.video_fetch_timeout),
            ("max-video-seconds", self.max_video_seconds),
            ("max-audio-seconds", self.max_audio_seconds),
        ):
            if not seconds > 0:
                raise ConfigError(f"--{name} {seconds:g} must be more than 0.")
        if not self.mm_encoder_cache_gb >= 0:
            raise ConfigError(f"--mm-encoder-cache-gb {self.mm_encoder_cache_gb:g} must be 0 or more.")
        if self.allowed_local_media_path and not Path(self.allowed_local_media_path).expanduser().is_dir():
            raise ConfigError(f"--allowed-local-media-path {self.allowed_local_media_path} is not a folder.")

    def limit_of(self, modality: str) -> int:
        """Return how many of a modality a prompt may have, at most. Without images, videos are read only if named."""
        if modality == "video" and "video" not in self.limit_mm_per_prompt and not self.limit_of("image"):
            return 0
        given = self.limit_mm_per_prompt.get(modality, _DEFAULT_LIMIT)
        return int(given["count"] if isinstance(given, dict) else given)

    @property
    def folder(self) -> str:
        """The folder of local files, absolute and without links; "" for none."""
        path = self.allowed_local_media_path
        return str(Path(path).expanduser().resolve()) if path else ""


SETTINGS = MediaSettings
