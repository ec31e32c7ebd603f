"""Videos of Qwen's families: pairs of frames are groups of patches, as in images. Their times are positions in Qwen2-VL
(https://arxiv.org/abs/2409.12191) and Qwen2.5-VL (https://arxiv.org/abs/2502.13923), and texts in Qwen3-VL
(https://arxiv.org/abs/2511.21631) and Qwen3.5."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from octavo.core.errors import ConfigError
from octavo.features.media.processors.base import (
    BICUBIC,
    Item,
    LoadTokenizer,
    Piece,
    Pixels,
    Run,
    TooOddError,
    digits,
    edges,
    switch,
)
from octavo.features.media.processors.native import MOST_RATIO, near
from octavo.features.media.processors.videos import USUAL, VideoProcessor, batches, frames_of, number, rate
from octavo.features.media.video.video import Sampling, Video

_TOGETHER = 512
"""Patches that are encoded together if they fit: a GPU is faster with more, and other requests wait for them."""
_FPS = 2.0


class NativeVideoProcessor(VideoProcessor):
    """What the families share: the layout of groups of patches.

    An item's data: [frames, height, width, 3] of whole groups. Its layout: rows and columns of embeddings of a group.
    """

    fields = USUAL | {
        "patch_size",
        "merge_size",
        "temporal_patch_size",
        "min_frames",
        "max_frames",
        "cap_pixels_per_frame",
        "max_video_tokens",
    }
    common = VideoProcessor.common | {"min_frames", "max_frames"}
    mark = "<|video_pad|>"
    has_pixels = True
    _sizes: tuple[int, int]
    """Default least and most pixels, of a frame or of all."""
    _share: int
    """Default of `max_video_tokens`."""

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        vision = config["vision_config"]
        self.token = int(config.get("video_token_id", 151656))
        begin, end = config.get("vision_start_token_id", 151652), config.get("vision_end_token_id", 151653)
        self.around = [int(begin)], [int(end)]
        usual = 16 if config["architectures"][0].startswith("Qwen3") else 14
        names = (
            ("patch_size", "patch_size", usual),
            ("merge_size", "spatial_merge_size", 2),
            ("temporal_patch_size", "temporal_patch_size", 2),
        )
        for name, own, default in names:
            if digits(processor, name, default) != digits(vision, own, default):
                raise ConfigError(
                    f"The model's video processor has {name}={processor.get(name)}, and its vision_config "
                    f"{own}={vision.get(own)}. Get the files that belong together."
                )
        patch, merged, self._depth = (digits(vision, own, default) for _, own, default in names)
        self._edge, self._merged = patch * merged, merged**2
        self._resample = int(processor.get("resample", BICUBIC))
        if not switch(processor, "do_resize", default=True):
            raise ConfigError("The model's video processor has do_resize=false; Octavo supports true only.")
        least, limit = self._sizes
        size = edges(processor.get("size") or {"shortest_edge": least, "longest_edge": limit}, "size")
        self._least, self._limit = size.get("shortest_edge", least), size.get("longest_edge", limit)
        self._min_frames = digits(processor, "min_frames", 4)
        self.max_frames = digits(processor, "max_frames", 768)
        self._num_frames, self._fps = number(processor, "num_frames"), rate(processor, _FPS)
        self._caps = switch(processor, "cap_pixels_per_frame", default=False)
        self._share = digits(processor, "max_video_tokens", type(self)._share)

    def cost(self, video: Video, frames: Sequence[int], sampling: Sampling) -> tuple[int, str]:
        height, width = self._target(video, len(frames), sampling)
        rows, columns = height // self._edge, width // self._edge
        return -(-len(frames) // self._depth) * rows * columns, f"{width} x {height} pixels"

    def laid_out(self, video: Video, frames: Sequence[int], sampling: Sampling) -> Sequence[Piece]:
        height, width = self._target(video, len(frames), sampling)
        rows, columns = height // self._edge, width // self._edge
        together = self._depth * max(1, _TOGETHER // (rows * columns * self._merged))
        times = self._times(video, frames)
        pieces: list[Piece] = []
        group = 0
        for some in batches(frames_of(video, frames, height, width, self._resample), together):
            data = self._whole(some)
            count = len(data) // self._depth
            item = Item(data, count * rows * columns, (rows, columns), *self._place(times, group, count))
            pieces += self._pieces_of(item, times[group : group + count])
            group += count
        return pieces

    def _whole(self, frames: Sequence[Pixels]) -> Pixels:
        """Return frames in whole groups: the last one is repeated."""
        lacking = -len(frames) % self._depth
        return np.stack([*frames, *[frames[-1]] * lacking])

    def _target(self, video: Video, count: int, sampling: Sampling) -> tuple[int, int]:
        """Return the height and width that frames are resized to."""
        width, height = video.size
        if max(height, width) / min(height, width) > MOST_RATIO:
            raise TooOddError(
                f"is {width} x {height} pixels; the longer edge may be at most {MOST_RATIO} times the shorter one"
            )
        limit = self._limit if sampling.max_pixels is None else min(self._limit, sampling.max_pixels)
        return self._resized(height, width, count, limit)

    def _most_of(self, frames: int) -> int:
        """Return the embeddings of the largest item, where the bounds of pixels are of this number of frames."""
        count = max(self._limit, self._least) // self._edge**2 // frames
        # Edges are at least one patch, or rounded up, so frames that are long and narrow go beyond the bounds.
        return max(_TOGETHER // self._merged, count + math.ceil(math.sqrt((MOST_RATIO + 25) * count)) + 1)

    @abstractmethod
    def _resized(self, height: int, width: int, count: int, limit: int) -> tuple[int, int]:
        """Return the height and width to which `count` frames are resized, with at most `limit` pixels."""

    @abstractmethod
    def _times(self, video: Video, frames: Sequence[int]) -> Sequence[float]:
        """Return the time of each group."""

    def _place(self, times: Sequence[float], group: int, count: int) -> tuple[tuple[int, ...], int]:
        """Return the `times` and `group` of an item of some groups."""
        return (), 0

    def _pieces_of(self, item: Item, times: Sequence[float]) -> Iterator[Piece]:
        yield Run(item, 0, item.count)


class QwenVideoProcessor(NativeVideoProcessor):
    """Qwen2-VL and Qwen2.5-VL: the groups follow each other; time is an axis of positions."""

    fields = NativeVideoProcessor.fields | {"min_pixels", "max_pixels"}
    common = NativeVideoProcessor.common | {"min_pixels", "max_pixels"}
    _sizes = 128 * 28 * 28, 28 * 28 * 768
    _share = 128_000

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        super().__init__(config, processor, tokenizer)
        self._least = number(processor, "min_pixels", self._least) or self._least
        self._limit = number(processor, "max_pixels", self._limit) or self._limit
        timed = config["architectures"][0].startswith("Qwen2_5")
        self._per_second = digits(config["vision_config"], "tokens_per_second", 4) if timed else None

    @property
    def most(self) -> int:
        return self._most_of(1)

    def sampled(self, video: Video, sampling: Sampling) -> list[int]:
        total, depth = video.count, self._depth
        wanted = sampling.num_frames or (self._num_frames if sampling.fps is None else None)
        if wanted is not None:
            count = round(min(wanted, total) / depth) * depth
        else:
            most = min(self.max_frames, total) // depth * depth
            fitting = min(max(total / video.fps * (sampling.fps or self._fps or _FPS), self._min_frames), most, total)
            count = math.floor(fitting / depth) * depth
        count = min(count or 1, total)
        return [int(place) for place in np.arange(0, total, total / count).astype(np.float32) if place < total]

    def _resized(self, height: int, width: int, count: int, limit: int) -> tuple[int, int]:
        if self._caps:
            fair = int(self._share * self._edge**2 * 0.9) * self._depth // count
            limit = max(min(limit, fair), int(self._least * 1.05))
        return near(height, width, self._edge, min(self._least, limit), limit)

    def _times(self, video: Video, frames: Sequence[int]) -> Sequence[float]:
        groups = np.arange(-(-len(frames) // self._depth), dtype=np.float32)
        if self._per_second is None:
            return [float(group) for group in groups]
        # As in Transformers, in float32, since it decides where a position is rounded to.
        seconds = np.float32(self._depth / (len(frames) / video.frames_in_all * video.fps))
        return [float(time) for time in np.floor(groups * np.float32(self._per_second * seconds))]

    def _place(self, times: Sequence[float], group: int, count: int) -> tuple[tuple[int, ...], int]:
        return tuple(int(time) for time in times[group : group + count]), group


class TimedVideoProcessor(NativeVideoProcessor):
    """Qwen3-VL and Qwen3.5: each group has its time as text in front, and positions like an image."""

    _sizes = 128 * 32 * 32, 32 * 32 * 768
    _share = 768

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        super().__init__(config, processor, tokenizer)
        self._tokenizer = tokenizer

    @property
    def most(self) -> int:
        return self._most_of(self._depth)

    def sampled(self, video: Video, sampling: Sampling) -> list[int]:
        total = video.count
        count = sampling.num_frames or (self._num_frames if sampling.fps is None else None)
        if count is None:
            count = int(total / video.fps * (sampling.fps or self._fps or _FPS))
            count = min(max(count, self._min_frames), self.max_frames)
        return [int(place) for place in np.linspace(0, total - 1, min(count, total)).round()]

    def _resized(self, height: int, width: int, count: int, limit: int) -> tuple[int, int]:
        """Return a size near the frames' ratio such that the pixels of all frames are within bounds."""
        edge, count = self._edge, max(count, self._depth)
        if self._caps:
            fair = min(self._share * edge**2, limit // count)
            limit = max(fair, int(self._least * 1.05)) * count
        if height < edge or width < edge:
            scale = max(edge / height, edge / width)
            height, width = int(height * scale), int(width * scale)
        high, wide = round(height / edge) * edge, round(width / edge) * edge
        whole = round(count / self._depth) * self._depth
        if whole * high * wide > limit:
            scale = math.sqrt(count * height * width / limit)
            high = max(edge, math.floor(height / scale / edge) * edge)
            wide = max(edge, math.floor(width / scale / edge) * edge)
        elif whole * high * wide < min(self._least, limit):
            scale = math.sqrt(min(self._least, limit) / (count * height * width))
            high, wide = math.ceil(height * scale / edge) * edge, math.ceil(width * scale / edge) * edge
        return high, wide

    def _times(self, video: Video, frames: Sequence[int]) -> Sequence[float]:
        """Return the mean of the first and the last frame of each group, in seconds."""
        seconds = [video.number(frame) / video.fps for frame in frames]
        seconds += [seconds[-1]] * (-len(seconds) % self._depth)
        starts = range(0, len(seconds), self._depth)
        return [(seconds[start] + seconds[start + self._depth - 1]) / 2 for start in starts]

    def _pieces_of(self, item: Item, times: Sequence[float]) -> Iterator[Piece]:
        (begin,), (end,) = self.around
        each = item.layout[0] * item.layout[1]
        for group, time in enumerate(times):
            text = self._tokenizer().encode_after(f"<{time:.1f} seconds>")
            yield from ([*text, begin], Run(item, group * each, each), [end])
