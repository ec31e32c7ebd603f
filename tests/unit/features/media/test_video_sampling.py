"""Frames are chosen, and resized, as Transformers' processors do it; and requests say how."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from image_kit import tokenizer
from test_image_processors import Words, config_of
from transformers.video_utils import VideoMetadata
from video_kit import CASES, class_of, film, pillow_for_torchvision

from octavo.core.errors import ConfigError, InvalidRequestError, ModelFileError
from octavo.features.media.payload import MediaItem
from octavo.features.media.positions import Positions
from octavo.features.media.preprocessing import check_fields, make_video_processor, video_fields
from octavo.features.media.processors.base import Run, TooOddError
from octavo.features.media.processors.videos import VideoProcessor
from octavo.features.media.video.given import converted_video
from octavo.features.media.video.video import Limits, Sampling, Video
from octavo.features.media.video.words import in_words

FAMILIES = ("qwen2.5-vl", "qwen3-vl", "smolvlm", "internvl", "llava-onevision")
NO_LIMITS = Limits(10**6, 1e6, 10**9, 10**12)


class MoreWords(Words):
    made = tokenizer()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self.made.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_after(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)


def processor_of(name: str, **more: Any) -> VideoProcessor:
    return make_video_processor(config_of(name), CASES[name].stated | more, MoreWords)  # type: ignore[arg-type]


def of_size(count: int, fps: float, width: int = 40, height: int = 30) -> Video:
    def read(indices: Sequence[int]) -> Any:
        raise AssertionError("no frame should be read")

    return Video(count, fps, (width, height), read)


OURS = {name: processor_of(name) for name in FAMILIES}
THEIRS: dict[str, Any] = {}
for _name in FAMILIES:
    with pillow_for_torchvision():
        THEIRS[_name] = class_of(CASES[_name].processor[1], "video_processing")(**CASES[_name].stated)


@pytest.mark.parametrize("name", FAMILIES)
@given(
    count=st.integers(1, 4000),
    fps=st.sampled_from([1.0, 5.0, 23.976, 24.0, 25.0, 29.97, 30.0, 59.94]),
    asked=st.one_of(
        st.builds(Sampling, fps=st.sampled_from([0.1, 0.5, 1.0, 2.0, 4.0])),
        st.builds(Sampling, num_frames=st.integers(1, 200)),
    ),
)
def test_the_same_frames(name: str, count: int, fps: float, asked: Sampling) -> None:
    ours = OURS[name].chosen(of_size(count, fps), asked)
    assert ours == sorted(set(ours))
    assert ours[0] >= 0
    assert ours[-1] < count
    known = VideoMetadata(total_num_frames=count, fps=fps, duration=count / fps)
    kwargs = {"num_frames": asked.num_frames, "fps": asked.fps}
    if name.startswith("qwen") and asked.num_frames is not None:
        assume(round(asked.num_frames / 2) * 2 <= count >= asked.num_frames)
    try:
        theirs = THEIRS[name].sample_frames(known, **kwargs)
    except (ValueError, ZeroDivisionError):  # too few frames for what is asked, which Octavo takes
        return
    assume(len(theirs) > 0)
    assert len(ours) <= OURS[name].max_frames or name == "qwen2.5-vl"
    if len(theirs) <= OURS[name].max_frames:
        assert ours == [int(one) for one in theirs if one < count], "rounding may add a frame that there is not"


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
@given(
    frames=st.integers(2, 60),
    width=st.integers(10, 300),
    height=st.integers(10, 300),
    caps=st.booleans(),
)
def test_the_same_sizes(name: str, frames: int, width: int, height: int, caps: bool) -> None:
    ours, theirs = CAPPED[name] if caps else (OURS[name], THEIRS[name])
    assume(max(width, height) / min(width, height) < 20)
    count, _ = ours.cost(of_size(frames, 2.0, width, height), list(range(frames)), Sampling())
    cap = {"cap_pixels_per_frame": True} if caps else {}
    with pillow_for_torchvision():
        found = theirs(
            np.zeros((frames, height, width, 3), np.uint8), do_sample_frames=False, return_tensors="pt", **cap
        )
    assert count * 4 == int(found["video_grid_thw"].prod())


CAPPED = {}
for _name, _most in (("qwen2.5-vl", 300), ("qwen3-vl", 7)):
    with pillow_for_torchvision():
        CAPPED[_name] = (
            processor_of(_name, cap_pixels_per_frame=True, max_video_tokens=_most),
            class_of(CASES[_name].processor[1], "video_processing")(**CASES[_name].stated, max_video_tokens=_most),
        )


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
@given(frames=st.integers(1, 60), width=st.integers(1, 3000), height=st.integers(1, 3000))
def test_no_item_is_larger_than_the_largest(name: str, frames: int, width: int, height: int) -> None:
    """One that is larger than the room for what is encoded would wait forever."""
    assume(max(width, height) / min(width, height) <= 200)
    count, _ = OURS[name].cost(of_size(frames, 2.0, width, height), list(range(frames)), Sampling())
    assert count // -(-frames // 2) <= OURS[name].most


def test_defaults_where_a_checkpoint_says_nothing() -> None:
    video = of_size(3000, 30.0)
    counts = {name: len(processor_of(name).chosen(video, Sampling())) for name in FAMILIES}
    assert counts == {"qwen2.5-vl": 200, "qwen3-vl": 200, "smolvlm": 5, "internvl": 32, "llava-onevision": 32}
    assert len(processor_of("qwen3-vl", fps=None, num_frames=7).chosen(video, Sampling())) == 7
    assert len(processor_of("qwen2.5-vl", max_frames=8).chosen(video, Sampling())) == 8


def test_a_sample_is_used_whole() -> None:
    for name in FAMILIES:
        video = converted_video(film(9, 40, 30), NO_LIMITS, None, "it")
        assert OURS[name].chosen(video, Sampling(fps=0.1)) == list(range(9))
        assert len(OURS[name].chosen(video, Sampling(num_frames=4))) == 4


def test_what_is_too_long_is_refused_before_it_is_decoded() -> None:
    for name in FAMILIES:
        with pytest.raises(TooOddError, match=r"has [\d,]+ tokens \(\d+ frames of .*room for 3; send fewer frames"):
            OURS[name].pieces(of_size(300, 30.0), Sampling(), 3)
    with pytest.raises(TooOddError, match="the longer edge may be at most 200 times the shorter one"):
        OURS["qwen3-vl"].pieces(of_size(300, 30.0, 1000, 4), Sampling(), 1000)


def test_items_hold_whole_groups_and_the_last_frame_is_repeated() -> None:
    video = converted_video((film(61, 30, 30), {"fps": 2.0, "do_sample_frames": False}), NO_LIMITS, None, "it")
    runs = [piece for piece in OURS["qwen2.5-vl"].pieces(video, Sampling(), 10**6) if isinstance(piece, Run)]
    assert [len(run.item.data) % 2 for run in runs] == [0] * len(runs)
    assert sum(len(run.item.data) for run in runs) == 62
    assert np.array_equal(runs[-1].item.data[-1], runs[-1].item.data[-2])
    times = [time for run in runs for time in run.item.times]
    assert times == [4 * i for i in range(31)]
    assert [run.item.group for run in runs] == list(np.cumsum([0, *(len(run.item.times) for run in runs)])[:-1])


def test_fewer_pixels_on_request() -> None:
    video = of_size(8, 2.0, 200, 100)
    for name in ("qwen2.5-vl", "qwen3-vl"):
        usual, fewer = (
            OURS[name].cost(video, list(range(8)), asked)[0]
            for asked in (Sampling(), Sampling(max_pixels=14 * 14 * 16))
        )
        assert fewer < usual
        assert OURS[name].cost(video, list(range(8)), Sampling(max_pixels=10**9))[0] == usual


# Positions


def item(start: int, count: int, layout: tuple[int, int], times: tuple[int, ...] = (), group: int = 0) -> MediaItem:
    return MediaItem(b"x", (1, 2, 2, 3), layout, count, [(start, 0, count)], memoryview(b""), "uint8", times, group)


def positions(items: list[MediaItem], count: int) -> list[list[int]]:
    found = Positions.of(items, count)
    return [[place + int(one) for one in shift] for place, shift in enumerate(found.shifts)] + [
        [count + found.after] * 3
    ]


def test_times_are_positions() -> None:
    """Two groups of two embeddings, five positions apart, in one item or two; and text after them."""
    together = [item(1, 4, (1, 2), (0, 5))]
    apart = [item(1, 2, (1, 2), (0,)), item(3, 2, (1, 2), (5,), 1)]
    expected = [[0] * 3, [1, 1, 1], [1, 1, 2], [6, 1, 1], [6, 1, 2], [7] * 3, [8] * 3]
    assert positions(together, 6) == positions(apart, 6) == expected


def test_a_video_after_another_begins_anew() -> None:
    items = [item(0, 2, (1, 2), (0,)), item(2, 2, (1, 2), (3,), 1), item(4, 2, (1, 2), (0,))]
    assert positions(items, 6) == [[0, 0, 0], [0, 0, 1], [3, 0, 0], [3, 0, 1], [4, 4, 4], [4, 4, 5], [6] * 3]


def test_groups_with_text_between_them_are_like_images() -> None:
    one = MediaItem(b"x", (4, 2, 2, 3), (1, 2), 4, [(1, 0, 2), (5, 2, 2)], memoryview(b""))
    images = [item(1, 2, (1, 2)), item(5, 2, (1, 2))]
    assert positions([one], 8) == positions(images, 8)


# What requests say


@pytest.mark.parametrize(
    ("processor", "io", "says"),
    [
        ({"fps": 0}, None, "mm_processor_kwargs.fps must be a number of frames per second"),
        ({"fps": "2"}, None, "got '2'"),
        ({"fps": float("nan")}, None, "more than 0"),
        ({"fps": 2000}, None, "at most 1000"),
        ({"num_frames": 0}, None, "mm_processor_kwargs.num_frames must be a whole number from 1"),
        ({"num_frames": True}, None, "must be a whole number"),
        ({"num_frames": 10**9}, None, "to 1,048,576"),
        ({"num_frames": 8, "fps": 1}, None, "fps and num_frames can't be combined"),
        ({"fps": 1}, {"video": {"num_frames": 8}}, "fps and num_frames can't be combined"),
        (None, {"video": {"num_frames": 1.5}}, "media_io_kwargs.video.num_frames must be"),
        (None, {"image": {"x": 1}}, "media_io_kwargs has 'image', which has no effect"),
        (None, [1], "media_io_kwargs must be an object"),
        ([1], None, "mm_processor_kwargs must be an object"),
        ({"max_pixels": 0}, None, "mm_processor_kwargs.max_pixels must be"),
        ({"size": {"longest_edge": 5}}, None, "mm_processor_kwargs.size has no effect here"),
    ],
)
def test_what_requests_may_not_say(processor: Any, io: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Sampling.of(processor, io)
    assert says in caught.value.message


def test_what_requests_say() -> None:
    assert Sampling.of(None, None) == Sampling()
    assert Sampling.of({"fps": 1, "max_pixels": 5}, {"image": {}}) == Sampling(1.0, None, 5)
    found = Sampling.of({}, {"video": {"num_frames": 16}})
    assert dataclasses.replace(found, param="") == Sampling(None, 16, param="")
    with pytest.raises(InvalidRequestError, match="max_pixels, which has no effect: this model's frames have one size"):
        OURS["internvl"].check(Sampling(max_pixels=5))


def test_fields_in_place_of_the_preprocessors() -> None:
    config, given = config_of("qwen3-vl"), {"fps": 1, "size": {}, "videos_kwargs": {"size": {"longest_edge": 9}}}
    check_fields(config, given)
    assert video_fields(config, given) == {"fps": 1, "size": {"longest_edge": 9}}
    with pytest.raises(ConfigError, match=r"videos_kwargs has 'speed', which has no effect"):
        check_fields(config, {"videos_kwargs": {"speed": 1}})
    with pytest.raises(ConfigError, match="videos_kwargs must be an object of fields"):
        check_fields(config, {"videos_kwargs": [1]})


@pytest.mark.parametrize(
    ("name", "stated", "error"),
    [
        ("qwen2.5-vl", {"patch_size": 14}, "patch_size=14, and its vision_config"),
        ("qwen2.5-vl", {"do_resize": False}, "do_resize=false"),
        ("qwen3-vl", {"fps": -1}, "fps=-1, which should be a positive number"),
        ("internvl", {"size": {"height": 56, "width": 56}}, "makes frames of"),
        ("llava-onevision", {"do_center_crop": True}, "not cropped"),
        ("smolvlm", {"max_image_size": {"longest_edge": 56}}, "makes frames of 56 pixels"),
    ],
)
def test_preprocessors_that_are_not_supported(name: str, stated: dict[str, Any], error: str) -> None:
    with pytest.raises((ConfigError, ModelFileError), match=error):
        processor_of(name, **stated)


def test_numbers_in_words() -> None:
    expected = {
        0: "zero",
        12: "twelve",
        20: "twenty",
        64: "sixty-four",
        100: "one hundred",
        115: "one hundred and fifteen",
        1001: "one thousand and one",
        12_345: "twelve thousand, three hundred and forty-five",
    }
    assert {number: in_words(number) for number in expected} == expected
