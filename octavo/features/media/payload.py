"""Messages of the halves: what a request has of images, and the payload of a step."""

from __future__ import annotations

import math
from typing import Any

import msgspec

NAME = "media"


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """What is encoded at once: an image, a tile of one, some frames of a video, or a window of audio.

    Attributes:
        digest: of the data; equal items are encoded once.
        shape: of the data: images or frames, height, width, 3; or parts, mel bins, frames.
        layout: what the tower needs to know besides the data, see the model's processor; rows and columns of the
            placeholders, where positions follow them.
        count: embeddings that it has.
        runs: (position in the prompt, first embedding, number of embeddings) of each run of its placeholders.
        data: row by row: colors as resized and cropped but not normalized, or spectrograms.
        dtype: of the data, as NumPy names it.
        times: where time is an axis of positions: that of each group of frames, counted from the video's beginning.
        group: the number of the first of these groups in the video. From 1 on, the item continues the one before it.
    """

    digest: bytes
    shape: tuple[int, ...]
    layout: tuple[int, ...]
    count: int
    runs: list[tuple[int, int, int]]
    data: memoryview
    dtype: str = "uint8"
    times: tuple[int, ...] = ()
    group: int = 0

    @property
    def work(self) -> int:
        """Numbers of the data that grow with what has to be computed: an image's pixels."""
        return math.prod(self.shape[:3])

    @property
    def start(self) -> int:
        """Position of the first placeholder."""
        return self.runs[0][0]

    @property
    def end(self) -> int:
        """Position after the last placeholder."""
        return self.runs[-1][0] + self.runs[-1][2]


class MediaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the text half knows of the model and of the settings.

    Attributes:
        modality: what is read.
        refused: why it is refused; "" if it is not.
        config: of the model.
        processor: the content of preprocessor_config.json, or its equivalent.
        limit: images, videos or pieces of audio, of a prompt, at most.
        domains, local_path, timeout_s, max_bytes, max_pixels, max_seconds, max_frames: see `MediaSettings`.
        max_frame_pixels: of a frame of a video.
        video: likewise of the videos of a model that reads images; None if its kind has none.
    """

    modality: str = "image"
    refused: str = ""
    config: dict[str, Any] = {}
    processor: dict[str, Any] = {}
    limit: int = 0
    domains: list[str] = []
    local_path: str = ""
    timeout_s: float = 0.0
    max_bytes: int = 0
    max_pixels: int = 0
    max_seconds: float = 0.0
    max_frames: int = 0
    max_frame_pixels: int = 0
    video: MediaInfo | None = None

    @property
    def read(self) -> list[MediaInfo]:
        """The modalities that are read."""
        return [one for one in (self, self.video) if one is not None and not one.refused]

    def of(self, modality: str) -> MediaInfo | None:
        """Return what is known of a modality; None if the model's kind does not read it."""
        return next((one for one in (self, self.video) if one is not None and one.modality == modality), None)


class EmbedPiece(msgspec.Struct, frozen=True, array_like=True):
    """Embeddings [first, first + count) of an encoded item, for the tokens of the step from `start` on."""

    digest: bytes
    start: int
    first: int
    count: int


class ShiftPiece(msgspec.Struct, frozen=True, array_like=True):
    """What is added to the positions of a row.

    Attributes:
        start: of the row's tokens in the step.
        slot: of the row.
        after: what is added to the positions of all tokens after the prompt, along each axis.
        count: the row's tokens.
        shifts: [count, 3] int32: what is added to the position of each, along each axis.
    """

    start: int
    slot: int
    after: int
    count: int
    shifts: memoryview


class MediaStep(msgspec.Struct):
    """The images among a step's tokens, and the positions that depend on them."""

    pieces: list[EmbedPiece]
    shifts: list[ShiftPiece] = []


PAYLOAD = MediaStep
