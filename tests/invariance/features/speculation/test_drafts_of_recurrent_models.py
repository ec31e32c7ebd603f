"""Drafts by lookup and by heads change no token of models with recurrent layers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from draft_models import NEAR, folder_of
from toy_drafter import check_same, news_of
from toy_engine import drive, one_by_one
from toy_models import LLAMA, VOCAB
from toy_recurrent import FAMILIES, engine

from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.features.speculation.payload import NAME, SpeculationOption

FIXED = {"adaptive": False, "prompt_lookup_min": 1, "num_speculative_tokens": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "ngram": {"speculative_config": FIXED | {"method": "ngram"}},
    "suffix, tight": {
        "speculative_config": FIXED | {"method": "suffix"},
        "max_num_batched_tokens": 40,
        "max_num_seqs": 6,
        "async_scheduling": True,
    },
    "auto": {"speculative_config": {"method": "auto", "prompt_lookup_min": 1}},
}


@pytest.fixture(params=[*FAMILIES])
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FAMILIES[request.param] | {"architectures": [request.param], "model_type": "any", "initializer_range": 0.3}


def requests() -> list[GenerateRequest]:
    """Prompts that repeat themselves, with a common beginning."""
    rng = random.Random(7)
    prefix = [rng.randrange(4, VOCAB) for _ in range(35)]
    made = []
    for i in range(6):
        phrase = [rng.randrange(4, VOCAB) for _ in range(rng.randrange(2, 7))]
        prompt = prefix[: 35 * (i % 2)] + phrase * 3
        ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.4, "top_k": 3, "seed": i, "logprobs": 2}]
        params = SamplingParams(max_tokens=30, ignore_eos=True, n=1 + (i == 3), **ways[i % 2])
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params))
    return made


def predicted(request: GenerateRequest, output: list[int]) -> GenerateRequest:
    """The request with its output as the prediction, every fifth token wrong."""
    prediction = [token if i % 5 else 7 for i, token in enumerate(output, 1)]
    option = SpeculationOption(prediction=prediction, num_prompt=len(request.tokens))
    return msgspec.structs.replace(request, options={NAME: msgspec.Raw(msgspec.msgpack.encode(option))})


def test_lookup_changes_nothing(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.nn.state.SNAPSHOT_TOKENS", 32)
    plain = engine(config, enable_prefix_caching=False, async_scheduling=False)
    expected = news_of(list(one_by_one(plain, requests())))
    plain.close()
    asked = [predicted(one, expected[one.id, 0][0]) for one in requests()]
    for name, settings in SETTINGS.items():
        loop = engine(config, **settings)
        check_same(news_of(list(drive(loop, asked))), expected)
        found = {one.name: sum(one.values.values()) for one in loop.stats().features}
        loop.close()
        drafts, accepted = found["spec_decode_num_draft_tokens"], found["spec_decode_num_accepted_tokens"]
        assert accepted > 0, name
        assert drafts - accepted > 0, name


HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"num_hidden_layers": 1},
    "eagle3": {"num_hidden_layers": 1, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
    "medusa": {"medusa_num_heads": 2, "medusa_num_layers": 1},
}
AROUND_HEADS: dict[str, dict[str, Any]] = {
    "": {},
    "chunked prefill": {"max_num_batched_tokens": 24, "max_num_seqs": 6, "async_scheduling": True},
    "preemption": {"num_blocks": 12},
}
SLOW = ("BambaForCausalLM", "JambaForCausalLM", "Lfm2ForCausalLM")


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in FAMILIES]
)
def test_heads_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Medusa's heads also draft for models without any attention."""
    monkeypatch.setattr("octavo.nn.state.SNAPSHOT_TOKENS", 32)
    config = FAMILIES[family] | {"architectures": [family], "model_type": "any", "initializer_range": 0.3}
    asked = [few_tokens(one) for one in requests()]
    plain = engine(config, enable_prefix_caching=False, async_scheduling=False)
    expected = news_of(list(one_by_one(plain, asked)))
    plain.close()
    for kind, fields in HEADS.items() if family != "Mamba2ForCausalLM" else [("medusa", HEADS["medusa"])]:
        head = folder_of(LLAMA | fields, tmp_path / kind)
        own = {"method": kind, "model": head, "num_speculative_tokens": 3, "adaptive": False}
        own |= {} if kind == "medusa" else {"prompt_lookup_min": 0}
        for name, settings in AROUND_HEADS.items():
            loop = engine(config, speculative_config=own, **settings)
            check_same(news_of(list(drive(loop, asked))), expected)
            found = {one.name: sum(one.values.values()) for one in loop.stats().features}
            assert (loop.stats().num_preemptions > 0) == (name == "preemption")
            loop.close()
            drafts, accepted = found["spec_decode_num_draft_tokens"], found["spec_decode_num_accepted_tokens"]
            assert accepted > 5 or kind == "medusa", (kind, name)
            assert drafts - accepted > 20, (kind, name)


def few_tokens(request: GenerateRequest) -> GenerateRequest:
    """The request with so few tokens allowed that a random head is sometimes right, unless it drafts the likeliest of
    all tokens, as Medusa does."""
    params = request.params.replace(allowed_token_ids=[20, 50, 90])
    return msgspec.structs.replace(request, params=params)


@pytest.mark.parametrize(("method", "model"), [("draft_model", NEAR), ("eagle", LLAMA | HEADS["eagle"])])
def test_what_has_keys_of_its_own_needs_attention_in_the_target(
    method: str, model: dict[str, Any], tmp_path: Path
) -> None:
    own = {"method": method, "model": folder_of(model, tmp_path / "drafting")}
    config = FAMILIES["Mamba2ForCausalLM"] | {"architectures": ["Mamba2ForCausalLM"], "model_type": "any"}
    with pytest.raises(ConfigError, match=rf"method={method} does not work with .* only recurrent layers"):
        engine(config, speculative_config=own)
