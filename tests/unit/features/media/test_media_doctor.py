"""What `octavo doctor` says about models that read audio."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.doctor.check import Result, Wish
from octavo.config import EngineConfig, ModelConfig, ServerConfig
from octavo.features.media import doctor


def wish(folder: Path, **config: Any) -> Wish:
    (folder / "config.json").write_text(json.dumps(config))
    model = ModelConfig(model=str(folder))
    return Wish(engine=EngineConfig(model=model), server=ServerConfig(), has_model=True)


AUDIO = {"architectures": ["Qwen2AudioForConditionalGeneration"]}


def test_the_library_for_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wished = wish(tmp_path, **AUDIO)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = doctor.read(wished)
    assert found is not None
    judged = doctor.judge(found)
    assert judged.result is Result.WARNING
    assert "octavo[audio]" in judged.remedy
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    found = doctor.read(wished)
    assert found is not None
    assert doctor.judge(found).result is Result.FINE


def test_other_models_need_none(tmp_path: Path) -> None:
    assert doctor.read(wish(tmp_path, architectures=["LlamaForCausalLM"])) is None
    assert doctor.read(wish(tmp_path, architectures=["Gemma3ForConditionalGeneration"])) is None
    (tmp_path / "config.json").write_text("{")
    model = ModelConfig(model=str(tmp_path))
    assert doctor.read(Wish(engine=EngineConfig(model=model), server=ServerConfig(), has_model=True)) is None
    assert doctor.read(Wish(engine=EngineConfig(), server=ServerConfig())) is None
