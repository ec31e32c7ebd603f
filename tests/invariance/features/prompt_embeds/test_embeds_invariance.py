"""Given the model's own embeddings, in whole or in part, a request has the tokens that it has by token ids."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from rank_kit import CONTEXTS, PIPELINE, TWO_RANKS, ranks_in_threads
from toy_engine import device_of, drive, one_by_one, tiny_config, tokens_of
from toy_models import LLAMA, LLAMA_KV_BYTES_PER_TOKEN, QWEN3, VOCAB, behind, model_files

from octavo.build import build_core
from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.engine.fake import fake_info
from octavo.engine.loop import EngineLoop
from octavo.features.prompt_embeds.payload import NAME as OPTION
from octavo.text.prompts.prepare import Preparer
from octavo.text.tokenizers.no_tokenizer import NoTokenizer

Tokens = dict[tuple[str, int], list[int]]
SMALL = {"memory_bytes": 192 * LLAMA_KV_BYTES_PER_TOKEN, "max_model_len": 160}
SETTINGS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "overlap": {"async_scheduling": True},
    "chunked prefill": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "preemption": SMALL,
    "overlap + chunked prefill + preemption": {
        "async_scheduling": True,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 8,
        **SMALL,
    },
    "no prefix cache": {"enable_prefix_caching": False},
    "small batches": {"max_num_seqs": 3},
    "torch attention": {"attention_backend": "torch"},
    "plain attention": {"attention_backend": "reference"},
    "a process of its own": {"distributed_executor_backend": "mp"},
    "two ranks": TWO_RANKS,
    "two stages": PIPELINE,
    "two ranks that divide prompts": CONTEXTS,
    "torch attention + overlap + preemption": {
        "attention_backend": "torch",
        "async_scheduling": True,
        **SMALL,
    },
}


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)


def engine(config: dict[str, Any] = LLAMA, **settings: Any) -> EngineLoop:
    return build_core(tiny_config(**{"enable_prompt_embeds": True} | settings), model_files(config))[0]


@cache
def table(qwen: bool = False) -> torch.Tensor:
    """[VOCAB, hidden size]: the model's own."""
    loop = engine(QWEN3 if qwen else LLAMA, attention_backend="reference", device="cpu")
    weight: torch.Tensor = loop._executor._model.embedding.weight.clone()  # type: ignore[attr-defined]
    loop.close()
    return weight


def requests(count: int = 12, prefixes: tuple[int, ...] = (48, 17), tail: int = 40) -> list[GenerateRequest]:
    rng = random.Random(5)
    heads = [[rng.randrange(4, VOCAB) for _ in range(n)] for n in prefixes]
    made = []
    for i in range(count):
        prompt = rng.choice([*heads, []]) + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, tail))]
        sampled: dict[str, Any] = {"temperature": 0}
        if i % 4 == 1:
            sampled = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": i, "n": 1 + i % 3}
        if i % 4 == 2:
            sampled = {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.2, "logit_bias": {7: 1.5}}
        if i % 4 == 3:
            sampled = {"temperature": 0, "logprobs": 2}
        params = SamplingParams(max_tokens=rng.randrange(4, tail), min_tokens=3, **sampled)
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params))
    return made


def embedded(request: GenerateRequest, weight: torch.Tensor) -> GenerateRequest:
    """The same, with embeddings for all of its tokens or for some stretches of them."""
    number = int(request.id[1:])
    rng = random.Random(number)
    mask = [number % 3 == 0 or (at // (1 + number % 5)) % 2 == rng.randrange(2) for at in range(len(request.tokens))]
    mask[number % len(mask)] = True
    prompt = {
        "prompt_embeds": weight[request.tokens],
        "prompt_token_ids": request.tokens,
        "prompt_is_token_ids": [not given for given in mask],
    }
    return made(request.id, prompt, request.params, weight.shape[1])


def made(name: str, prompt: dict[str, Any], params: SamplingParams, size: int) -> GenerateRequest:
    info = fake_info(features=[OPTION], hidden_size=size)
    return Preparer(NoTokenizer(VOCAB), info).prepare(prompt, params, request_id=name).request  # type: ignore[arg-type]


def results(loop: EngineLoop, asked: list[GenerateRequest]) -> tuple[Tokens, EngineStats]:
    tokens = tokens_of(drive(loop, asked))
    stats = loop.stats()
    loop.close()
    return tokens, stats


@cache
def truth(device: str) -> Tokens:
    plain = {"attention_backend": "reference", "enable_prefix_caching": False, "async_scheduling": False}
    loop = engine(**plain, device=device)
    found = tokens_of(one_by_one(loop, requests()))
    loop.close()
    return found


LONG_TAIL = {"two ranks that divide prompts", "a process of its own"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG_TAIL else name for name in SETTINGS]
)
def test_embeddings_are_as_good_as_tokens(name: str) -> None:
    plain = requests()
    both = [embedded(request, table()) for request in plain]
    both[::5] = plain[::5]  # and some beside them have tokens alone
    tokens, stats = results(engine(**SETTINGS[name]), both)
    assert tokens == truth(device_of(SETTINGS[name]))
    if "preemption" in name:
        assert stats.num_preemptions > 0


def test_equal_embeddings_share_the_cache_and_others_do_not() -> None:
    def asked(name: str, rows: torch.Tensor) -> GenerateRequest:
        return made(name, {"prompt_embeds": rows}, SamplingParams(max_tokens=4, temperature=0), 64)

    first, other = table()[4:44], table()[44:84]
    tail = torch.cat([first[:20], other[20:]])
    loop = engine()
    cached = {}
    for name, rows in {"a": first, "b": other, "c": tail, "d": first, "half": first.half()}.items():
        cached[name] = max(delta.num_cached for delta in drive(loop, [asked(name, rows)]))
    loop.close()
    assert cached == {"a": 0, "b": 0, "c": 16, "d": 32, "half": 0}


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_step_of_one_embedding_is_no_plain_decoding(backend: str) -> None:
    """Nor is one of the last of a prompt, of which the cache has all but that."""
    loop = engine(attention_backend=backend)
    params = SamplingParams(max_tokens=4, temperature=0)
    for count in (1, 33, 33):
        tokens = list(range(4, 4 + count))
        found = []
        for request in (
            made("a", {"prompt_embeds": table()[tokens]}, params, 64),
            GenerateRequest(id="a", tokens=tokens, params=params),
        ):
            found.append(tokens_of(drive(loop, [request])))
        assert found[0] == found[1]
    loop.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_embeddings_of_other_dtypes_are_rounded_to_the_models(dtype: torch.dtype, backend: str) -> None:
    request = requests()[0]
    weight = table().to(dtype)
    given = results(engine(attention_backend=backend), [embedded(request, weight)])
    assert given[0] == results(engine(attention_backend=backend), [embedded(request, weight.float())])[0]


def test_a_gpus_runner_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU on kernels in Triton's interpreter, few of them and short. What is drawn is that runner's own."""
    pytest.importorskip("triton")
    asked = [request for request in requests(4, (17,), 9) if not request.params.temperature]
    expected = results(engine(QWEN3, device="cpu", attention_backend="torch"), asked)[0]
    given = [embedded(request, table(qwen=True)) for request in asked]
    assert (
        results(engine(QWEN3, **behind(monkeypatch), max_num_batched_tokens=12, max_num_seqs=8), given)[0] == expected
    )


def test_a_step_of_one_embedding_is_no_graph_of_a_gpus_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from toy_graphs import recorded_graphs

    params = SamplingParams(max_tokens=3, temperature=0)
    plain = GenerateRequest(id="a", tokens=[9], params=params)
    expected = results(engine(QWEN3, attention_backend="torch", device="cpu"), [plain])[0]
    given = made("a", {"prompt_embeds": table(qwen=True)[[9]]}, params, 64)
    replayed = recorded_graphs(monkeypatch)
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    assert results(engine(QWEN3, **behind(monkeypatch), **settings), [given])[0] == expected
    assert replayed["forward"] > 1, "the tokens that follow"


def test_an_engine_that_can_not_take_them_does_not_start() -> None:
    with pytest.raises(ConfigError, match="--enable-prompt-embeds: tiny takes texts"):
        engine(runner="pooling")
