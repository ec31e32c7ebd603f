"""Videos as series of pictures: SmolVLM2 (https://arxiv.org/abs/2504.05299), InternVL
(https://arxiv.org/abs/2404.16821) and LLaVA-OneVision (https://arxiv.org/abs/2408.03326)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from octavo.core.errors import ConfigError
from octavo.features.media.processors.base import (
    BICUBIC,
    LANCZOS,
    Item,
    LoadTokenizer,
    Piece,
    Run,
    digits,
    edge,
    edges,
    one_token,
    resized,
    token_or_none,
)
from octavo.features.media.processors.tiled import MOST_EDGE, even
from octavo.features.media.processors.videos import USUAL, VideoProcessor, frames_of, number, rate
from octavo.features.media.video.video import Sampling, Video
from octavo.features.media.video.words import in_words

_FRAMES = 32
"""Frames to use where neither the request nor the checkpoint says it, as usual for models that take pictures."""
_SMOL_FRAMES, _SMOL_FPS = 64, 1.0


class FrameVideoProcessor(VideoProcessor):
    """Each frame is an item: a picture of one size with as many embeddings."""

    fields = USUAL
    mark = "<video>"
    _count: int
    _side: int
    _resample: int
    _num_frames: int | None
    _fps: float | None

    @property
    def most(self) -> int:
        return self._count

    def cost(self, video: Video, frames: Sequence[int], sampling: Sampling) -> tuple[int, str]:
        return len(frames) * self._count, f"{self._count} tokens"

    def _wanted(self, video: Video, sampling: Sampling) -> int:
        """Return how many frames to use, at most as many as there are."""
        count, fps = sampling.num_frames, sampling.fps
        if count is None and fps is None:
            count, fps = self._num_frames, self._fps
        if count is None:
            count = _FRAMES if fps is None else int(video.count / video.fps * fps)
        return min(max(count, 1), video.count, self.max_frames)

    def _pictures(self, video: Video, frames: Sequence[int]) -> Iterator[Item]:
        for pixels in frames_of(video, frames, self._side, self._side, self._resample):
            yield Item(np.ascontiguousarray(pixels)[None], self._count)

    def _check_size(self, processor: Mapping[str, Any]) -> None:
        size = edges(processor.get("size") or {"height": 384, "width": 384}, "size")
        if {*size.values()} != {self._side} or processor.get("do_center_crop") or processor.get("crop_size"):
            raise ConfigError(
                f"The model's video processor makes frames of {size}, and its vision_config has "
                f"image_size={self._side}. Octavo supports square frames of that size, not cropped."
            )


class InternVideoProcessor(FrameVideoProcessor):
    """InternVL: each frame between two marks, after its number."""

    fields = USUAL | {"initial_shift"}
    textual = True

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        vision = config["vision_config"]
        self._side, patch = edge(vision, "image_size", 448), edge(vision, "patch_size", 14)
        self._check_size(processor)
        self._count = int((self._side // patch * float(config.get("downsample_ratio", 0.5))) ** 2)
        self._resample = int(processor.get("resample", BICUBIC))
        self._num_frames, self._fps = number(processor, "num_frames"), rate(processor, None)
        self._shift = processor.get("initial_shift", True)
        self.token = token_or_none(tokenizer, self.mark)
        self._begin, self._end = one_token(tokenizer, "<img>"), one_token(tokenizer, "</img>")

    def sampled(self, video: Video, sampling: Sampling) -> list[int]:
        step = video.count / self._wanted(video, sampling)
        first = step / 2 if self._shift is True else float(self._shift or 0)
        return [int(place) for place in np.arange(first, video.count, step).astype(np.float32) if place < video.count]

    def laid_out(self, video: Video, frames: Sequence[int], sampling: Sampling) -> Sequence[Piece]:
        pieces: list[Piece] = []
        for place, item in enumerate(self._pictures(video, frames), start=1):
            text = f"Frame{place}: " if place == 1 else f"\nFrame{place}: "
            pieces += [text, [self._begin], Run(item, 0, item.count), [self._end]]
        return pieces


class OnevisionVideoProcessor(FrameVideoProcessor):
    """LLaVA-OneVision: the patches of a frame are pooled; one more embedding ends the video.

    An item's layout: 1 for the last frame, which has that embedding, else 0.
    """

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        vision = config["vision_config"]
        self._side, patch = digits(vision, "image_size", 224), digits(vision, "patch_size", 32)
        self._check_size(processor)
        self._count = (-(-(self._side // patch) // 2)) ** 2
        self._resample = int(processor.get("resample", BICUBIC))
        self._num_frames, self._fps = number(processor, "num_frames"), rate(processor, None)
        self.token = int(config.get("video_token_index") or config.get("video_token_id") or 151647)

    @property
    def most(self) -> int:
        return self._count + 1

    def sampled(self, video: Video, sampling: Sampling) -> list[int]:
        count = self._wanted(video, sampling)
        return [place * video.count // count for place in range(count)]

    def cost(self, video: Video, frames: Sequence[int], sampling: Sampling) -> tuple[int, str]:
        count, about = super().cost(video, frames, sampling)
        return count + 1, about

    def laid_out(self, video: Video, frames: Sequence[int], sampling: Sampling) -> Sequence[Piece]:
        items = list(self._pictures(video, frames))
        ends = [False] * (len(items) - 1) + [True]
        placed = [Item(item.data, item.count + end, (int(end),)) for item, end in zip(items, ends, strict=True)]
        return [Run(item, 0, item.count) for item in placed]


class SmolVideoProcessor(FrameVideoProcessor):
    """SmolVLM2: each frame after its time, and before them all a sentence about the video."""

    fields = USUAL | {"max_image_size", "video_sampling"}
    textual = True

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        vision = config["vision_config"]
        self._side, patch = digits(vision, "image_size", 224), digits(vision, "patch_size", 32)
        tile = edges(processor.get("max_image_size", {"longest_edge": 364}), "max_image_size").get("longest_edge")
        if tile != self._side:
            raise ConfigError(
                f"The model's video processor makes frames of {tile} pixels, and its vision_config has "
                f"image_size={self._side}. Octavo supports frames of that size."
            )
        self._count = int((self._side // patch) ** 2 / digits(config, "scale_factor", 2) ** 2)
        self._resample = int(processor.get("resample", LANCZOS))
        stated = processor.get("video_sampling") or {}
        size = stated.get("video_size") or processor.get("size") or {"longest_edge": 4 * 364}
        self._size = edges(size, "size")
        self._num_frames = number(processor, "num_frames", number(stated, "max_frames", _SMOL_FRAMES))
        self._fps = rate(processor, rate(stated, _SMOL_FPS))
        self._tokenizer = tokenizer
        self.token = token_or_none(tokenizer, self.mark)
        marks = ("<fake_token_around_image>", "<global-img>")
        self._around, self._whole = (one_token(tokenizer, mark) for mark in marks)

    def sampled(self, video: Video, sampling: Sampling) -> list[int]:
        """Choose frames from all but the first and last second, where the video is long."""
        most, fps = sampling.num_frames or self._num_frames or _SMOL_FRAMES, sampling.fps or self._fps or _SMOL_FPS
        wanted = max(1, min(round(fps * video.seconds), most, self.max_frames))
        first, last = 0, video.count - 1
        if video.seconds - 2 > most * fps:
            first, last = int(video.fps), min(int(video.count - video.fps), last)
            if first >= last:
                first, last = 0, video.count - 1
        return [int(place) for place in np.unique(np.linspace(first, last, wanted, dtype=int))]

    def laid_out(self, video: Video, frames: Sequence[int], sampling: Sampling) -> Sequence[Piece]:
        length = timedelta(seconds=int(video.seconds))
        text = (
            f"You are provided the following series of {in_words(len(frames))} frames from a {length} [H:MM:SS] "
            "video.\n"
        )
        pieces: list[Piece] = []
        for frame, item in zip(frames, self._pictures(video, frames), strict=True):
            seconds = int(video.number(frame) / video.fps)
            text += f"\nFrame from {seconds // 60:02d}:{seconds % 60:02d}:"
            pieces += [text, [self._around, self._whole], Run(item, 0, item.count), [self._around]]
            text = ""
        return [*pieces, "\n\n"]

    def _pictures(self, video: Video, frames: Sequence[int]) -> Iterator[Item]:
        """Yield frames, resized twice, as pictures that are not split."""
        height, width = self._target(video)
        for pixels in frames_of(video, frames, height, width, self._resample):
            square = resized(pixels, self._side, self._side, self._resample)
            yield Item(np.ascontiguousarray(square)[None], self._count)

    def _target(self, video: Video) -> tuple[int, int]:
        width, height = video.size
        long = self._size.get("longest_edge")
        if long is None:
            return self._size["height"], self._size["width"]
        long, ratio = min(long, MOST_EDGE), width / height
        if width >= height:
            return max(even(int(long / ratio)), 1), long
        return long, max(even(int(long * ratio)), 1)
