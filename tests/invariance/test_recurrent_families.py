"""Each kind of recurrent mixer in the engine: tokens do not depend on chunks, neighbours, prefix hits or preemption."""

from __future__ import annotations

import random
from typing import Any

import pytest
from toy_engine import drive, one_by_one, tiny_config, tokens_of
from toy_models import VOCAB, model_files
from toy_recurrent import FAMILIES

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop

TIGHT = {"max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 40, "async_scheduling": True}


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.slow) if name.startswith("Jamba") else name for name in FAMILIES]
)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FAMILIES[request.param] | {"architectures": [request.param], "model_type": "any", "initializer_range": 0.3}


def engine(config: dict[str, Any], **settings: Any) -> EngineLoop:
    loop, _ = build_core(tiny_config(**{"max_model_len": 128, "device": "cpu"} | settings), model_files(config))
    return loop


def requests() -> list[GenerateRequest]:
    rng = random.Random(7)
    prefix = [rng.randrange(4, VOCAB) for _ in range(70)]
    made = []
    for i, length in enumerate((0, 70, 70, 0, 0)):
        prompt = prefix[:length] + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(2, 20))]
        params = SamplingParams(max_tokens=30, top_k=1, ignore_eos=True, n=1 + (i == 2))
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params))
    return made


def test_tokens_of_a_family(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and whole, against chunks of 40 tokens beside other requests, in a cache for little more than one."""
    monkeypatch.setattr("octavo.nn.state.SNAPSHOT_TOKENS", 32)
    alone = engine(config, enable_prefix_caching=False, async_scheduling=False)
    expected = tokens_of(one_by_one(alone, requests()))
    block_size = alone.stats().block_size
    alone.close()
    attends = "num_attention_heads" in config
    tight = engine(config, **TIGHT, num_blocks=-(-128 // block_size) + 6 if attends else 9)
    found = tokens_of(drive(tight, requests(), at_once=5))
    again = tokens_of(one_by_one(tight, [request for request in requests() if request.id == "r1"]))
    stats = tight.stats()
    tight.close()
    assert found == expected
    assert again["r1", 0] == expected["r1", 0]
    assert (stats.num_preemptions > 0) == attends, "only sequences with keys and values grow"
    assert stats.prefix_cache_hits > 0


def test_a_context_may_be_shorter_than_two_blocks() -> None:
    """Where keys take few bytes, a block has room for many positions so that a state fits into it."""
    bamba = FAMILIES["BambaForCausalLM"] | {"architectures": ["BambaForCausalLM"], "model_type": "any"}
    loop = engine(bamba | {"max_position_embeddings": 64}, max_model_len=None, kv_cache_dtype="int8")
    assert loop.stats().block_size > 32
    params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    found = tokens_of(drive(loop, [GenerateRequest(id="r", tokens=[5] * 14, params=params)]))
    loop.close()
    assert len(found["r", 0]) == 50
