"""Videos are read from files, within limits, whatever the files hold."""

from __future__ import annotations

import dataclasses
import io
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image
from video_kit import Frames, data_url, film, gif, jpegs, mp4

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.features.media.parts import VideoParts
from octavo.features.media.payload import MediaInfo
from octavo.features.media.video.decode import decoded_video
from octavo.features.media.video.video import Limits, Video
from octavo.text.prompts.message_parts import GivenPart

LIMITS = Limits(frames=100, seconds=60.0, frame_pixels=10_000, pixels=200_000)
FRAMES = film(10, 48, 32)
OWN = MediaInfo(
    modality="video",
    limit=4,
    timeout_s=1.0,
    max_bytes=1 << 20,
    max_pixels=LIMITS.pixels,
    max_frame_pixels=LIMITS.frame_pixels,
    max_seconds=LIMITS.seconds,
    max_frames=LIMITS.frames,
)


def pixels(video: Video, indices: list[int]) -> Frames:
    return np.stack([np.asarray(image) for image in video.read(indices)])


def opened(given: Any, kind: str = "video_url", fps: float | None = None, **own: Any) -> Video:
    data = {"url": given} if kind == "video_url" else given
    part = GivenPart(f"messages.0.content.0.{kind}", kind, data, {"type": kind, kind: data})
    return VideoParts(OWN if not own else msgspec_replaced(own)).open(part, fps)


def msgspec_replaced(changes: dict[str, Any]) -> MediaInfo:
    import msgspec

    return msgspec.structs.replace(OWN, **changes)


def refusal(data: bytes, **limits: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        list(decoded_video(data, dataclasses.replace(LIMITS, **limits), "it").read([0, 9]))
    return caught.value.message


@pytest.mark.parametrize(
    ("form", "codec"),
    [("mp4", "libx264"), ("mov", "mpeg4"), ("matroska", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4")],
)
def test_files_of_video(form: str, codec: str) -> None:
    video = decoded_video(mp4(FRAMES, 4, form=form, codec=codec), LIMITS, "it")
    assert (video.count, video.fps, video.size, video.is_sample) == (10, 4.0, (48, 32), False)
    found = pixels(video, [0, 3, 9])
    assert found.shape == (3, 32, 48, 3)
    for one, other in ((0, 0), (1, 3), (2, 9)):
        away = [np.abs(found[one].astype(int) - frame).mean() for frame in FRAMES.astype(int)]
        assert int(np.argmin(away)) == other, away


def test_frames_are_turned_as_a_player_turns_them() -> None:
    """The matrix in the header of a track says a quarter turn."""
    data = mp4(FRAMES, 4)
    upright = b"".join(one.to_bytes(4, "big") for one in (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30))
    turned = b"".join(one.to_bytes(4, "big") for one in (0, 1 << 16, 0, 0xFFFF0000, 0, 0, 0, 0, 1 << 30))
    before, after = data.rsplit(upright, 1)
    video = decoded_video(before + turned + after, LIMITS, "it")
    assert video.size == (32, 48)
    (found,), (plain,) = pixels(video, [4]), pixels(decoded_video(data, LIMITS, "it"), [4])
    assert np.array_equal(found, np.rot90(plain, k=-1)), "with the clock"


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_animations(form: str) -> None:
    file = io.BytesIO()
    pictures = [Image.new("RGB", (20, 10), (25 * i, 0, 0)) for i in range(10)]
    pictures[0].save(file, form, save_all=True, append_images=pictures[1:], duration=250, lossless=True)
    video = decoded_video(file.getvalue(), LIMITS, "it")
    assert (video.count, video.size) == (10, (20, 10))
    assert [int(frame[0, 0, 0]) for frame in pixels(video, [1, 4, 9])] == pytest.approx([25, 100, 225], abs=3)
    if form != "WEBP":  # whose durations are known only frame by frame
        assert video.fps == pytest.approx(4.0)


def test_frames_as_jpeg() -> None:
    video = opened(jpegs(FRAMES[:3]), fps=1.0)
    assert (video.count, video.fps, video.size, video.is_sample) == (3, 1.0, (48, 32), True)
    assert np.abs(pixels(video, [0, 1, 2]).astype(int) - FRAMES[:3]).mean() < 20
    assert opened(jpegs(FRAMES[:3])).fps == 2.0


def test_frames_of_python() -> None:
    for given in (FRAMES, list(FRAMES), [Image.fromarray(frame) for frame in FRAMES]):
        video = opened(given, "video")
        assert (video.count, video.size, video.is_sample) == (10, (48, 32), True)
        assert np.array_equal(pixels(video, [2, 5]), FRAMES[[2, 5]])
    whole = opened((FRAMES, {"fps": 5.0}), "video")
    assert (whole.fps, whole.is_sample, whole.seconds) == (5.0, False, 2.0)
    known = {"fps": 30.0, "total_num_frames": 300, "frames_indices": list(range(0, 300, 30))}
    sample = opened((FRAMES, known), "video")
    assert (sample.is_sample, sample.seconds, sample.number(3)) == (True, 10.0, 90)
    assert opened((FRAMES, {"fps": 5.0, "do_sample_frames": False}), "video").is_sample


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (5, "must be a NumPy array [frames, height, width, 3] of uint8"),
        (FRAMES.astype(np.float32), "got [10, 32, 48, 3] of float32"),
        ([], "has no frames"),
        (["a.png"], "must be frames"),
        ((FRAMES, {"speed": 2}), "has 'speed', which is not known of videos"),
        ((FRAMES, {"fps": "fast"}), "has fps='fast', which must be a number"),
        ((FRAMES, {"fps": 0}), "has 0 frames per second"),
        ((FRAMES, {"fps": float("nan")}), "has nan frames per second"),
        ((FRAMES, {"frames_indices": [1, 2]}), "has 10 frames and 2 frames_indices"),
        ((FRAMES, {"frames_indices": list(range(10)), "total_num_frames": 5}), "has total_num_frames=5"),
    ],
)
def test_what_is_no_video_of_python(given: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        opened(given, "video")
    assert says in caught.value.message
    assert caught.value.param == "messages.0.content.0.video"


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"frames": 9}, "has 10 frames; video may have 9 (--max-video-frames)"),
        ({"seconds": 2.0}, "has 2.5 seconds; video may have 2.0 (--max-video-seconds)"),
        ({"frame_pixels": 1000}, "has 1,536 pixels in a frame; video may have 1,000 (--max-image-pixels)"),
        ({"pixels": 15_000}, "has 15,360 pixels in all frames; video may have 15,000 (--max-video-pixels)"),
    ],
)
@pytest.mark.parametrize("form", ["gif", "mp4"])
def test_limits(limits: dict[str, Any], says: str, form: str) -> None:
    data = mp4(FRAMES, 4) if form == "mp4" else gif(FRAMES, 250)
    assert says in refusal(data, **limits)


def test_a_file_that_lies_about_its_size() -> None:
    """The size of the frames counts, whatever the file's header says."""
    data = mp4(film(10, 400, 400), 4)
    lying = data.replace((400).to_bytes(2, "big") + b"\0\0" + (400).to_bytes(2, "big"), b"\0\x10\0\0\0\x10")
    assert lying != data
    assert "has 160,000 pixels in a frame; video may have 10,000" in refusal(lying)


MP4 = mp4(FRAMES, 4)
PLAYLIST = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is not video: its 0 bytes"),
        (b"hello world, this is text", "is not video"),
        (PLAYLIST, "is not video"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "is not video"),
        (MP4[: len(MP4) // 2], "is a damaged video"),
        (MP4[:40], "is a damaged video"),
        (MP4[:40] + PLAYLIST * 20, "is a damaged video"),
        (b"\x1aE\xdf\xa3" + b"\0" * 500, "is a damaged video"),
        (b"RIFF\xff\xff\xff\xffAVI LIST" + b"\xff" * 300, "has no video"),
        (b"GIF89a\x10\0\x10\0" + b"\xff" * 100, "damaged"),
        (gif(FRAMES)[:1500], "damaged"),
    ],
)
def test_damaged_and_hostile_files(data: bytes, says: str) -> None:
    assert says in refusal(data)


def test_noise_in_a_file_ends_in_an_error_or_in_frames() -> None:
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(40):
        noisy = bytearray(MP4)
        for place in rng.integers(0, len(noisy), 12):
            noisy[place] = int(rng.integers(256))
        try:
            video = decoded_video(bytes(noisy), LIMITS, "it")
            found = list(video.read([0, video.count - 1]))
            assert len(found) == 2
        except InvalidRequestError:
            refused += 1
    assert refused < 40


def test_sound_alone_is_no_video() -> None:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert "has no video, only 1 other streams" in refusal(file.getvalue())


def test_other_decoders_are_not_used() -> None:
    data = mp4(FRAMES, 4, form="matroska", codec="ffv1")
    with pytest.raises(UnsupportedError, match=r"has video 'ffv1', which is not read; convert it to H\.264"):
        decoded_video(data, LIMITS, "it")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert decoded_video(gif(FRAMES), LIMITS, "it").count == 10
    with pytest.raises(UnsupportedError, match=r"Install octavo\[video\] there, or send frames as data:video/jpeg"):
        decoded_video(MP4, LIMITS, "it")


@pytest.mark.parametrize(
    ("url", "says", "own"),
    [
        (jpegs(FRAMES), "has 10 frames; video may have 4", {"max_frames": 4}),
        (jpegs(FRAMES), "is larger than 100 bytes (--max-video-bytes)", {"max_bytes": 100}),
        (data_url(MP4), "is larger than 100 bytes (--max-video-bytes)", {"max_bytes": 100}),
        ("data:video/jpeg;base64,", "frame 0 is not an image", {}),
        (jpegs(FRAMES[:2]) + ",", "frame 2 is not an image", {}),
        (jpegs(FRAMES[:1]) + ",%%", "is not valid base64", {}),
        (5, "must be a URL, such as data:video/mp4", {}),
        ("ftp://a/b.mp4", "must be a URL that begins with data:", {}),
        ("http://127.0.0.1/a.mp4", "has an address that is not public", {}),
        ("file:///etc/passwd", "this server reads no files", {}),
    ],
)
def test_urls_that_are_refused(url: Any, says: str, own: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        list(opened(url, **own).read([0, 1, 2]))
    assert says in caught.value.message
    assert str(caught.value.param).startswith("messages.0.content.0.video_url")
