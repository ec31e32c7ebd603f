"""Open the parts of prompts: the forms of images, videos and audio that requests have."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, Protocol

from octavo.core.errors import InvalidRequestError
from octavo.features.media.fetch import Fetcher
from octavo.features.media.payload import MediaInfo
from octavo.features.media.video.video import Limits, Video
from octavo.text.prompts.message_parts import GivenPart

IMAGES = {"image": "image", "image_url": "image_url", "image_pil": "image_pil", "input_image": "image_url"}
AUDIO = {"audio": "audio", "audio_url": "audio_url", "input_audio": "input_audio"}
VIDEO = {"video": "video", "video_url": "video_url"}
"""Types of parts -> the field that has their data."""
MODALITIES: Mapping[str, str] = {
    kind: modality for modality, kinds in (("image", IMAGES), ("audio", AUDIO), ("video", VIDEO)) for kind in kinds
}
"""Type of a part -> its modality, under which chat templates know it, too."""
_DETAILS = (None, "auto", "low", "high")
_BY_URL = ("image_url", "input_image", "audio_url", "video_url")


class Opener(Protocol):
    """Opens parts of one modality."""

    def open(self, part: GivenPart) -> tuple[Any, bool]:
        """Return what a processor takes, and whether it should use few embeddings.

        Raises:
            InvalidRequestError: the part is malformed, can't be fetched or decoded, or is too large.
        """
        ...

    def listed(self, given: Any) -> list[Any]:
        """Return what `multi_modal_data` has of the modality, one by one."""
        ...


def fetcher_of(own: MediaInfo) -> Fetcher:
    hosts = tuple(host.lower() for host in own.domains)
    return Fetcher(hosts, own.local_path, own.timeout_s, own.max_bytes, own.modality)


def opener(own: MediaInfo) -> Opener:
    fetcher = fetcher_of(own)
    return AudioParts(fetcher, own.max_seconds) if own.modality == "audio" else ImageParts(fetcher, own.max_pixels)


class ImageParts:
    def __init__(self, fetcher: Fetcher, max_pixels: int) -> None:
        self._fetcher, self._max_pixels = fetcher, max_pixels

    def open(self, part: GivenPart) -> tuple[Any, bool]:
        from octavo.features.media.decode import converted, decoded  # imported here: they need Pillow

        given: Any = part.data
        param, detail = part.param, part.part.get("detail")
        if isinstance(given, Mapping):
            given, detail, param = given.get("url"), given.get("detail", detail), f"{param}.url"
        if given is None:
            given, param = _of_template(part)
        if detail not in _DETAILS:
            raise InvalidRequestError(
                f"{param}: detail must be auto, low or high, got {json.dumps(detail, default=str)}.", param=param
            )
        if isinstance(given, str) or part.kind in _BY_URL:
            return decoded(self._fetcher.fetch(given, param), self._max_pixels, param), detail == "low"
        return converted(given, self._max_pixels, param), detail == "low"

    def listed(self, given: Any) -> list[Any]:
        return list(given) if isinstance(given, list | tuple) else [given]


class AudioParts:
    def __init__(self, fetcher: Fetcher, max_seconds: float) -> None:
        self._fetcher, self._max_seconds = fetcher, max_seconds

    def open(self, part: GivenPart) -> tuple[Any, bool]:
        from octavo.features.media.audio.decode import converted, decoded  # imported here: they need NumPy

        given: Any = part.data
        param = part.param
        if part.kind == "input_audio":
            return decoded(self._of_base64(given, param), self._max_seconds, f"{param}.data"), False
        if isinstance(given, Mapping):
            given, param = given.get("url"), f"{param}.url"
        if given is None:
            given, param = _of_template(part)
        if isinstance(given, str) or part.kind in _BY_URL:
            return decoded(self._fetcher.fetch(given, param), self._max_seconds, param), False
        return converted(given, self._max_seconds, param), False

    def listed(self, given: Any) -> list[Any]:
        """A tuple is one piece: samples and their rate."""
        return list(given) if isinstance(given, list) else [given]

    def _of_base64(self, given: Any, param: str) -> bytes:
        """Return the content of OpenAI's form. The format is that of the content, whatever the part says."""
        data = given.get("data") if isinstance(given, Mapping) else None
        if not isinstance(data, str):
            raise InvalidRequestError(
                f'{param} must be an object such as {{"data": "...", "format": "wav"}}, with base64.', param=param
            )
        try:
            found = base64.b64decode("".join(data.split()), validate=True)
        except (binascii.Error, ValueError) as exc:
            raise InvalidRequestError(
                f"{param}.data is not valid base64: {exc}. Encode the file again.", param=f"{param}.data"
            ) from None
        return self._fetcher.checked(found, f"{param}.data")


class VideoParts:
    def __init__(self, own: MediaInfo) -> None:
        self._fetcher = fetcher_of(own)
        self._limits = Limits(own.max_frames, own.max_seconds, own.max_frame_pixels, own.max_pixels)

    def open(self, part: GivenPart, fps: float | None) -> Video:
        """Return a video; most of it is not decoded yet.

        Args:
            fps: what the request asks for: the rate of frames that come without one.

        Raises:
            InvalidRequestError: the part is malformed, can't be fetched or read, or is too large.
        """
        from octavo.features.media.video.decode import decoded_video, of_pictures  # imported here: they need Pillow
        from octavo.features.media.video.given import converted_video

        given: Any = part.data
        param = part.param
        if isinstance(given, Mapping):
            given, param = given.get("url"), f"{param}.url"
        if given is None:
            given, param = _of_template(part)
        if not isinstance(given, str) and part.kind not in _BY_URL:
            return converted_video(given, self._limits, fps, param)
        if (frames := self._fetcher.frames(given, self._limits.frames, param)) is not None:
            return of_pictures(frames, fps, self._limits, param)
        return decoded_video(self._fetcher.fetch(given, param), self._limits, param)

    def listed(self, given: Any) -> list[Any]:
        """A list of frames is one video, and so is a tuple: frames and what is known of them."""
        if isinstance(given, tuple) or not isinstance(given, list):
            several = getattr(given, "ndim", 4) == 5
            return list(given) if several else [given]
        return [given] if given and _is_frame(given[0]) else given


def _is_frame(given: Any) -> bool:
    return not isinstance(given, str | tuple | list) and getattr(given, "ndim", 3) == 3


def _of_template(part: GivenPart) -> tuple[Any, str]:
    """Return the data of a part in the form of templates, {"type": "image", "url": ...}, and its field."""
    if part.kind not in ("image", "audio", "video"):
        return None, part.param
    return part.part.get("url"), f"{part.param.rpartition('.')[0]}.url"
