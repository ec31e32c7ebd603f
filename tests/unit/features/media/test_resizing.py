"""Resizing in several threads changes no pixel."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from octavo.features.media.processors import resize as module
from octavo.features.media.processors.resize import resize

EDGES = st.integers(1, 60)


def reference(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling(resample)))


@given(EDGES, EDGES, EDGES, EDGES, st.sampled_from(Image.Resampling), st.integers(1, 2), st.integers(0, 99))
def test_pixels_are_those_of_one_thread(
    height: int, width: int, to_height: int, to_width: int, resample: int, threads: int, seed: int
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "processors", lambda: threads)
        patch.setattr(module, "LEAST_PIXELS", 1)
        found = resize(pixels, to_height, to_width, resample)
    assert found.shape == (to_height, to_width, 3)
    assert np.array_equal(found, reference(pixels, to_height, to_width, resample))


def test_large_images_are_resized_by_as_many_threads_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several images at once share them."""
    barrier, names = threading.Barrier(2, timeout=60), set[str]()  # two images have six channels
    resized = module._resized

    def noting(*given: object) -> np.ndarray:
        barrier.wait()
        names.add(threading.current_thread().name)
        return resized(*given)  # type: ignore[arg-type]

    with ThreadPoolExecutor(2, thread_name_prefix="of-two") as pool:
        monkeypatch.setattr(module, "processors", lambda: 2)
        monkeypatch.setattr(module, "_pool", lambda: pool)
        monkeypatch.setattr(module, "_resized", noting)
        pixels = np.random.default_rng(0).integers(0, 256, (900, 700, 3), dtype=np.uint8)
        expected = reference(pixels, 640, 512, Image.Resampling.LANCZOS)
        with ThreadPoolExecutor(2) as requests:
            ask = partial(resize, pixels, 640, 512, Image.Resampling.LANCZOS)
            found = [one.result() for one in [requests.submit(ask) for _ in range(2)]]
    assert all(np.array_equal(one, expected) for one in found)
    assert names == {"of-two_0", "of-two_1"}


def test_small_images_take_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "processors", lambda: 4)
    monkeypatch.setattr(module, "_pool", lambda: pytest.fail("a thread"))
    pixels = np.zeros((300, 300, 3), dtype=np.uint8)
    assert resize(pixels, 448, 448, Image.Resampling.BICUBIC).shape == (448, 448, 3)
