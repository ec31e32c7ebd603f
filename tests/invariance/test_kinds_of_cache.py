"""On every kind of cache group, what a request gets does not depend on how the engine got to it: choices, beams,
grammars, log-probabilities and embeddings, in chunks beside each other, preempted and with prefix hits, against each
request alone and whole."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from toy_engine import drive, one_by_one, tiny_config
from toy_models import LATENT, LLAMA, model_files
from toy_tokenizers import byte_level

from octavo.build import build_core
from octavo.core.output import TokenDelta, TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.structured import StructuredOutputsParams
from octavo.hub.files import ModelFiles

TOKENIZER = byte_level()
VOCAB = TOKENIZER.get_vocab_size()
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
KINDS: dict[str, dict[str, Any]] = {
    "latent": LATENT,
    "recurrent": {
        "architectures": ["BambaForCausalLM"],
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
    },
    "windows": {
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "windows and sinks": {"architectures": ["GptOssForCausalLM"], "sliding_window": 20, **_EXPERTS},
    "heads of two sizes": {
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 20,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 600,
        "rope_parameters": None,
        "rope_scaling": None,
    },
    "chunks": {
        "architectures": ["Llama4ForCausalLM"],
        "attention_chunk_size": 24,
        "no_rope_layer_interval": 2,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96,
        "floor_scale": 16,
        **_EXPERTS,
    },
}
QUICK = ("recurrent", "windows and sinks", "heads of two sizes")
LONGEST = 128
TIGHT = {"max_num_seqs": 8, "max_num_batched_tokens": 40, "async_scheduling": True}


def requests() -> list[GenerateRequest]:
    """Two of three prompts have a common beginning."""
    rng = random.Random(5)
    prefix = [rng.randrange(4, VOCAB) for _ in range(70)]

    def request(name: str, option: dict[str, Any] | None = None, *, prompt_only: bool = False, **params: Any) -> Any:
        tokens = prefix[: rng.choice([0, 70, 70])] + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(2, 20))]
        options = {key: msgspec.Raw(msgspec.msgpack.encode(value)) for key, value in (option or {}).items()}
        chosen = SamplingParams(**{"max_tokens": 12, "temperature": 0, "ignore_eos": True} | params)
        whole = name == "mean"  # it needs the states of all tokens, so it can't skip those in the cache
        return GenerateRequest(
            id=name, tokens=tokens, params=chosen, options=options, prompt_only=prompt_only, reads_cache=not whole
        )

    def form(**fields: Any) -> dict[str, Any]:
        return {"grammar": StructuredOutputsParams(**fields)}

    return [
        request("choices", n=3, temperature=0.9, seed=4, logprobs=2),
        request("reported", logprobs=3, prompt_logprobs=1),
        request("beams", {"beams": [2, 1.0]}, n=2, temperature=1, ignore_eos=False),
        request("pattern", form(regex="[a-f]{5,10}"), n=2, temperature=0.8, seed=1, ignore_eos=False),
        request("json", form(json={"type": "array", "items": {"type": "integer"}, "maxItems": 5}), ignore_eos=False),
        request("mean", {"pooling": {"pooling": "mean", "task": "embed"}}, prompt_only=True, max_tokens=1),
        request("last", {"pooling": {"pooling": "last", "task": "embed"}}, prompt_only=True, max_tokens=1),
        *(request(f"long {i}", max_tokens=30) for i in range(3)),
    ]


@pytest.mark.features("beams", "grammar", "pooling")
@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_features_on_a_kind_of_cache(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.nn.state.SNAPSHOT_TOKENS", 32)
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    config = LLAMA | {"model_type": "any"} | KINDS[kind] | {"vocab_size": VOCAB, "eos_token_id": 2}
    files = model_files(config, tmp_path)
    expected, block_size, groups, _ = run(files, alone=True, enable_prefix_caching=False, async_scheduling=False)
    growing = 1 if kind == "recurrent" else groups
    blocks = -(-LONGEST // block_size) * growing + 6
    found, _, _, stats = run(files, alone=False, **TIGHT, num_blocks=blocks)
    assert stats.prefix_cache_hits > 0
    assert stats.num_preemptions > 0
    assert found.keys() == expected.keys()
    for name, one in found.items():
        assert one.tokens == expected[name].tokens, name
        torch.testing.assert_close(one.numbers, expected[name].numbers, rtol=2e-3, atol=2e-3)


class Answer(msgspec.Struct):
    """What a choice of a request got.

    Attributes:
        numbers: log-probabilities, or a vector.
    """

    tokens: list[int]
    numbers: Any


def run(files: ModelFiles, *, alone: bool, **settings: Any) -> tuple[dict[tuple[str, int], Answer], int, int, Any]:
    """Return the answers, the block size, the number of cache groups, and the engine's statistics."""
    loop, info = build_core(tiny_config(device="cpu", max_model_len=LONGEST, **settings), files)
    asked = requests()
    news = list(one_by_one(loop, asked) if alone else drive(loop, asked, at_once=len(asked)))
    found, stats = answers(news), loop.stats()
    loop.close()
    return found, stats.block_size, info.kv_groups, stats


def answers(news: Iterable[TokenDelta]) -> dict[tuple[str, int], Answer]:
    from octavo.features.pooling.requests import pooled_output  # not there without the feature

    found: dict[tuple[str, int], Answer] = {}
    for delta in news:
        assert delta.error is None, delta.error
        one = found.setdefault((delta.id, delta.index), Answer([], torch.zeros(0)))
        if delta.id in ("mean", "last"):
            one.numbers = torch.tensor(pooled_output(delta).pooled.values())
            continue
        one.tokens.extend(delta.tokens)
        reported = [*numbers(delta.prompt_logprobs or []), *numbers(delta.logprobs or [])]
        one.numbers = torch.cat([one.numbers, torch.tensor(reported)])
    return found


def numbers(reported: Iterable[TokenLogprobs]) -> list[float]:
    return [value for one in reported for value in one.top_logprobs]
