"""Weights that are quantized when they are loaded, in recorded steps: the same tokens whatever the batch."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from toy_engine import drive, tiny_config, tokens_of
from toy_graphs import recorded_graphs
from toy_models import QWEN3, behind, model_files

from octavo.build import build_core
from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.nn.quant.online import ONLINE
from octavo.worker.schemes import AT_LOAD

ASKED = [
    GenerateRequest(
        id=f"r{i}", tokens=[7 + i, 11, 5, 9 * i][: 2 + i], params=SamplingParams(max_tokens=3, temperature=0)
    )
    for i in range(2)
]


def run(settings: dict[str, Any], config: dict[str, Any] = QWEN3) -> tuple[dict[Any, list[int]], int]:
    loop, info = build_core(tiny_config(memory_bytes=1 << 21, **settings), model_files(config))
    tokens = tokens_of(drive(loop, ASKED))
    loop.close()
    return tokens, info.memory["weights"]


# Rows of padding hold unwritten memory, whose squares may overflow; a GPU doesn't warn, and nothing uses their results.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fp8", "w8a16", "w4a16"])
def test_tokens_do_not_depend_on_the_batch(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = recorded_graphs(monkeypatch)
    settings = {**behind(monkeypatch), "quantization": method, "max_num_seqs": 4}
    together, size = run(settings)
    assert replayed["forward"]
    alone, _ = run({**settings, "async_scheduling": False, "max_num_seqs": 1, "enforce_eager": True})
    assert together == alone
    _, plain = run({**settings, "quantization": None})
    assert size < plain


@pytest.mark.parametrize(
    ("method", "stored", "says"),
    [
        ("int3", None, "weights can be quantized by fp8, w8a8, w8a16, w4a16"),
        ("awq", None, "the checkpoint's quantization is none"),
        ("awq", "gptq", "the checkpoint's quantization is gptq"),
        ("w4a16", "gptq", "the weights are quantized already, by gptq"),
    ],
)
def test_settings_that_do_not_fit(method: str, stored: str | None, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**QWEN3, "quantization_config": {"quant_method": stored, "bits": 4}} if stored else QWEN3
    with pytest.raises(ConfigError, match=says):
        run({**behind(monkeypatch), "quantization": method}, config)


def test_unknown_methods_are_named_before_the_device() -> None:
    assert tuple(ONLINE) == AT_LOAD
    with pytest.raises(ConfigError, match=f"fp3: there is no such method.* by {', '.join(AT_LOAD)}"):
        run({"device": "cpu", "quantization": "fp3"})


def test_a_cpu_quantizes_nothing_at_load() -> None:
    with pytest.raises(ConfigError, match="on an NVIDIA GPU"):
        run({"device": "cpu", "quantization": "fp8"})
