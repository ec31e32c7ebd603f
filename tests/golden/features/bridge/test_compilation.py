"""`--compilation`: the modules of transformers compiled by torch give the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from bridge_kit import save
from tiny import model_files
from toy_engine import drive, tiny_config, tokens_of
from toy_models import LLAMA
from toy_models import model_files as llama_files

from octavo.build import build_core
from octavo.build_worker import implementation_of
from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest

PROMPTS = ([5, 6, 7, 8] * 5, [9], [10, 11, 12])


@pytest.fixture(autouse=True)
def counters() -> Iterator[Any]:
    """What torch compiled in this test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def run(folder: Path, **settings: Any) -> dict[Any, list[int]]:
    config = tiny_config(
        load_format="auto", memory_bytes=1 << 21, model_impl="transformers", max_num_batched_tokens=16, **settings
    )
    loop, _ = build_core(config, model_files(folder))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    asked = [GenerateRequest(id=f"r{i}", tokens=prompt, params=params) for i, prompt in enumerate(PROMPTS)]
    tokens = tokens_of(drive(loop, asked))
    loop.close()
    return tokens


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_modules_give_the_same_tokens(
    backend: str, counters: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows in all layers; prompts in chunks, and single tokens."""
    monkeypatch.setattr("octavo.features.bridge.compilation._BACKEND", backend)
    save("ministral", tmp_path, num_hidden_layers=1)
    expected = run(tmp_path)
    assert not counters["frames"]
    assert run(tmp_path, compilation=True) == expected
    assert counters["frames"]["ok"]


@pytest.mark.slow
def test_layers_of_one_kind_share_their_code(counters: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.features.bridge.compilation._BACKEND", "eager")
    compiled = []
    for layers in (1, 3):
        torch._dynamo.reset()
        counters.clear()
        folder = tmp_path / str(layers)
        save("llama", folder, num_hidden_layers=layers)
        run(folder, compilation=True)
        compiled.append(counters["frames"]["ok"])
    assert compiled[1] <= compiled[0] + 4  # the sum of residuals between two layers is new


def test_own_layers_are_not_compiled() -> None:
    with pytest.raises(ConfigError, match=r"--compilation: .* is computed by Octavo's own layers.* Leave it out"):
        implementation_of(tiny_config(compilation=True), llama_files(LLAMA))
