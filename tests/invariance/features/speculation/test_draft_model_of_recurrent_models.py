"""A model that drafts for one with recurrent layers changes no token. It draws what it would draw by itself, so its
cache holds what it must, whatever was rejected and computed again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from draft_models import NEAR, folder_of
from rank_kit import ranks_in_threads
from toy_drafter import check_same, news_of, runner_of
from toy_engine import drive, one_by_one, tokens_of
from toy_models import VOCAB
from toy_recurrent import FAMILIES, engine

from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.features.speculation.draft_model import ModelDrafter
from octavo.worker.drafts import Drafting, Drafts

WIDE = {"initializer_range": 0.3}
FEW: dict[str, Any] = {"allowed_token_ids": [20, 50, 90], "ignore_eos": True}
"""So few tokens that both models often choose the same one, and often not."""
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "chunked prefill": {"max_num_batched_tokens": 24, "max_num_seqs": 6, "async_scheduling": True},
    "preemption": {"num_blocks": 16},
    "no prefix cache": {"enable_prefix_caching": False},
    "torch": {"attention_backend": "torch", "max_num_batched_tokens": 40, "max_num_seqs": 6},
    "adaptive": {},
}
HYBRID = [
    pytest.param(name, marks=pytest.mark.slow) if name.startswith(("Bamba", "Jamba", "Lfm2")) else name
    for name in FAMILIES
    if name != "Mamba2ForCausalLM"
]
"""Those with attention."""


def requests() -> list[GenerateRequest]:
    """Prompts with common beginnings."""
    rng = random.Random(7)
    prefix = [rng.randrange(4, VOCAB) for _ in range(35)]
    made = []
    for i in range(8):
        prompt = prefix[: 35 * (i % 2)] + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 40))]
        ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.4, "top_k": 3, "seed": i, "logprobs": 2}]
        params = SamplingParams(max_tokens=30, n=1 + (i in (3, 5)), **FEW, **ways[i % 2])
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params))
    return made


def watched(loop: EngineLoop) -> dict[tuple[int, ...], list[int]]:
    """Return a table that is filled while the loop runs: the known tokens of greedy requests -> their drafts."""
    (hook,) = (one for one in runner_of(loop).hooks._hooks if isinstance(one, ModelDrafter))
    found: dict[tuple[int, ...], list[int]] = {}
    propose = hook.propose

    def proposed(drafting: Drafting, payload: Any) -> Drafts | None:
        drafts = propose(drafting, payload)
        if drafts is not None:
            params = runner_of(loop).slots.params(drafting.slots.tolist())
            for row, slot in enumerate(drafting.slots.tolist()):
                one, count = params[row], min(int(drafts.counts[row]), int(drafting.limits[row]))
                if one is not None and one.greedy and count:
                    known = drafting.tokens[slot, : int(drafting.length[slot])].tolist()
                    found[tuple(known)] = drafts.tokens[row, :count].tolist()
        return drafts

    hook.propose = proposed  # type: ignore[method-assign]
    return found


def alone(model: dict[str, Any], drafts: dict[tuple[int, ...], list[int]]) -> dict[tuple[int, ...], list[int]]:
    """Return what the drafting model draws after the same tokens by itself."""
    asked = [
        GenerateRequest(
            id=str(i), tokens=list(known), params=SamplingParams(temperature=0, max_tokens=len(drawn), **FEW)
        )
        for i, (known, drawn) in enumerate(drafts.items())
    ]
    loop = engine(model, enable_prefix_caching=False)
    tokens = tokens_of(drive(loop, asked, at_once=16))
    loop.close()
    return {known: tokens[str(i), 0] for i, known in enumerate(drafts)}


@pytest.mark.parametrize("family", HYBRID)
def test_a_model_that_drafts_changes_nothing(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("octavo.nn.state.SNAPSHOT_TOKENS", 32)
    config = FAMILIES[family] | WIDE | {"architectures": [family], "model_type": "any"}
    plain = engine(config, enable_prefix_caching=False, async_scheduling=False)
    expected = news_of(list(one_by_one(plain, requests())))
    plain.close()
    drafting = NEAR | WIDE
    own = {"method": "draft_model", "model": folder_of(drafting, tmp_path / "drafting"), "num_speculative_tokens": 4}
    for name, settings in SETTINGS.items():
        loop = engine(config, speculative_config=own | {"adaptive": name == "adaptive"}, **settings)
        drawn = watched(loop)
        check_same(news_of(list(drive(loop, requests()))), expected)
        found = {one.name: sum(one.values.values()) for one in loop.stats().features}
        assert (loop.stats().num_preemptions > 0) == (name == "preemption")
        loop.close()
        drafts, accepted = found["spec_decode_num_draft_tokens"], found["spec_decode_num_accepted_tokens"]
        if name != "adaptive":
            assert accepted > 20, name
            assert drafts - accepted > 20, name
        assert drawn == alone(drafting, drawn), name


def test_ranks_compute_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks_in_threads(monkeypatch)
    config = FAMILIES["Lfm2ForCausalLM"] | WIDE | {"architectures": ["Lfm2ForCausalLM"], "model_type": "any"}
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "cpu_bind": "nobind"}
    own = {"method": "draft_model", "model": folder_of(NEAR | WIDE, tmp_path / "drafting"), "adaptive": False}
    plain = engine(config, **settings)
    loop = engine(config, **settings, speculative_config=own)
    check_same(news_of(list(drive(loop, requests()))), news_of(list(drive(plain, requests()))))
    found = {one.name: sum(one.values.values()) for one in loop.stats().features}
    assert 20 < found["spec_decode_num_accepted_tokens"] < found["spec_decode_num_draft_tokens"] - 20
    plain.close()
    loop.close()
