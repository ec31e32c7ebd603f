"""What drafts is divided over ranks as the model is, and all ranks propose the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draft_models import folder_of
from rank_kit import ranks_in_threads
from toy_drafter import check_same, news_of
from toy_engine import drive, tiny_config
from toy_models import LLAMA, model_files

from octavo.build import build_core
from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest

ASKED = [
    GenerateRequest(
        id=str(number),
        tokens=list(range(5 + number, 20 + 3 * number)),
        params=SamplingParams(max_tokens=20, temperature=0.7 * (number % 2), seed=number, ignore_eos=True),
    )
    for number in range(4)
]
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": LLAMA,
    "eagle": LLAMA | {"num_hidden_layers": 1},
    "eagle3": LLAMA
    | {
        "num_hidden_layers": 1,
        "draft_vocab_size": 60,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_ranks_draft_together(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)
    settings: dict[str, Any] = {"device": "cpu", "cpu_bind": "nobind", "tensor_parallel_size": 2}
    loop = build_core(tiny_config(**settings), model_files())[0]
    expected = news_of(list(drive(loop, ASKED)))
    loop.close()
    own = {"method": method, "model": folder_of(METHODS[method], tmp_path / "x"), "num_speculative_tokens": 3}
    settings["speculative_config"] = own | {"adaptive": False}
    loop = build_core(tiny_config(**settings), model_files())[0]
    check_same(news_of(list(drive(loop, ASKED))), expected)
    counts = {one.name: sum(one.values.values()) for one in loop.stats().features}
    drafts, accepted = counts["spec_decode_num_draft_tokens"], counts["spec_decode_num_accepted_tokens"]
    assert drafts > 30
    if method == "draft_model":
        assert accepted == drafts
    loop.close()


def test_a_pipeline_has_no_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)
    own = {"method": "draft_model", "model": folder_of(LLAMA, tmp_path / "x")}
    config = tiny_config(device="cpu", cpu_bind="nobind", pipeline_parallel_size=2, speculative_config=own)
    with pytest.raises(ConfigError, match="only the last stage of a pipeline"):
        build_core(config, model_files())
