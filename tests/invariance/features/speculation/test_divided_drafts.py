"""What drafts is divided over ranks as the model is, and all ranks propose the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draft_models import folder_of
from rank_kit import CONTEXTS, ranks_in_threads
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


DIVISIONS: dict[str, dict[str, Any]] = {
    "ranks": {"tensor_parallel_size": 2},
    "ranks, torch attention": {"tensor_parallel_size": 2, "attention_backend": "torch"},
    "stages": {"pipeline_parallel_size": 2},
    "prompts": CONTEXTS,
    "stages of ranks": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}
SLOW = pytest.mark.slow
CASES = [
    ("ranks", "draft_model"),
    ("ranks", "eagle3"),
    ("ranks, torch attention", "eagle3"),
    pytest.param("ranks", "eagle", marks=SLOW),
    pytest.param("stages", "draft_model", marks=SLOW),
    ("stages", "eagle"),
    ("stages", "ngram"),
    pytest.param("stages of ranks", "draft_model", marks=SLOW),
    *(pytest.param("prompts", method, marks=SLOW) for method in ("draft_model", "eagle3", "ngram")),
    pytest.param("stages of ranks", "suffix", marks=SLOW),
]


@pytest.mark.parametrize(("division", "method"), CASES)
def test_what_drafts_is_divided(division: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over ranks as the model is, and of a pipeline in the last stage alone."""
    ranks_in_threads(monkeypatch)
    settings: dict[str, Any] = {"device": "cpu", "cpu_bind": "nobind", **DIVISIONS[division]}
    loop = build_core(tiny_config(**settings), model_files())[0]
    expected = news_of(list(drive(loop, ASKED)))
    loop.close()
    own: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if method in METHODS:
        own["model"] = folder_of(METHODS[method], tmp_path / "x")
    else:
        own["prompt_lookup_min"] = 1
    settings["speculative_config"] = own
    loop = build_core(tiny_config(**settings), model_files())[0]
    check_same(news_of(list(drive(loop, ASKED))), expected)
    counts = {one.name: sum(one.values.values()) for one in loop.stats().features}
    drafts, accepted = counts["spec_decode_num_draft_tokens"], counts["spec_decode_num_accepted_tokens"]
    assert drafts > 30
    if method == "draft_model":
        assert accepted == drafts
    loop.close()


def test_a_stage_can_not_read_the_states_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)
    own = {"method": "eagle3", "model": folder_of(METHODS["eagle3"], tmp_path / "x")}
    config = tiny_config(device="cpu", cpu_bind="nobind", pipeline_parallel_size=2, speculative_config=own)
    with pytest.raises(ConfigError, match="method=eagle3 reads the input of layer 0, but in a pipeline the last stage"):
        build_core(config, model_files())
