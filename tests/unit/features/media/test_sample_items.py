"""On a GPU, a tower encodes a sample before the server is ready, for every kind of model."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import audio_kit
import image_kit
import pytest
import torch
from tiny import model_files

from octavo.features.media.settings import MediaSettings
from octavo.features.media.worker import MediaWorker
from octavo.models.load import open_checkpoint
from octavo.models.registry import spec_of
from octavo.text.tokenizers.tokenizer import load_tokenizer

IMAGES = ["llava", "llava-next", "gemma3", "smolvlm", "internvl", "pixtral", "qwen2.5-vl", "qwen3-vl"]


def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch, *, resident: bool) -> tuple[MediaWorker, list[Any]]:
    files = model_files(folder)
    worker: Any = SimpleNamespace(
        settings=SimpleNamespace(threads=1),
        dtype=torch.float32,
        device=SimpleNamespace(torch_device=torch.device("cpu"), resident=resident),
        spec=spec_of(files.config),
        checkpoint=lambda: open_checkpoint(files),
    )
    media = MediaWorker(files, MediaSettings(), lambda: load_tokenizer(files))
    ends: list[Any] = []
    advance = media._advance

    def noting(one: Any) -> str | None:
        error = advance(one)
        if error is not None:
            ends.append((error, list(media._encoded.values())))
        return error

    monkeypatch.setattr(media, "_advance", noting)
    media.prepare(worker, (8, 64))
    return media, ends


@pytest.mark.parametrize("kit", [*((image_kit, name) for name in IMAGES), *((audio_kit, n) for n in audio_kit.cases())])
def test_a_sample_is_encoded(
    kit: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, name = kit
    module.make(name, tmp_path)
    with caplog.at_level(logging.INFO, "octavo.features.media.worker"):
        media, ends = prepared(tmp_path, monkeypatch, resident=True)
    ((error, made),) = ends
    assert error == ""
    assert made[0].isfinite().all()
    assert not media._encoded
    assert "encoded a sample in" in caplog.text


def test_a_cpu_encodes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_kit.make("llava", tmp_path)
    assert prepared(tmp_path, monkeypatch, resident=False)[1] == []


def test_an_engine_starts_though_a_sample_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    image_kit.make("llava", tmp_path)

    def broken(*_: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr("octavo.features.media.worker.upload", broken)
    prepared(tmp_path, monkeypatch, resident=True)
    assert "a sample could not be encoded at the start: no kernel" in caplog.text
