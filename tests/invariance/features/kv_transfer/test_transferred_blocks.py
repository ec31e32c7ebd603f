"""Blocks that another engine computed give the tokens that computing them gives, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from rank_kit import PIPELINE, TWO_RANKS, ranks_in_threads
from toy_engine import RENEWALS, drive, renew, tiny_config, tokens_of
from toy_models import LATENT, LLAMA, QWEN3, VOCAB, behind, model_files
from toy_recurrent import Hybrid

from octavo.build import build_core
from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.engine.loop import EngineLoop
from octavo.features.kv_transfer.offer import NAME, Ask, Fetch, Offer, Send

WINDOWED = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24}
MIXED = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 24,
    "max_window_layers": 1,
}
"""Full and windowed layers."""
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fastest": (LLAMA, {}),
    "fastest, windowed": (WINDOWED, {}),
    "three groups": (MIXED, {"num_blocks": 96, "attention_backend": "torch"}),
    "int8": (LLAMA, {"kv_cache_dtype": "int8"}),
    "latent": (LATENT, {}),
}
Tokens = dict[tuple[str, int], list[int]]


@contextmanager
def engine(config: dict[str, Any] = LLAMA, role: str | None = None, **settings: Any) -> Iterator[EngineLoop]:
    limits = {"max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_blocks": 48}
    keys = settings.pop("keys", {})
    transfer = {} if role is None else {"kv_transfer_config": {"kv_role": role, "kv_buffer_size": "8M", **keys}}
    loop = build_core(tiny_config(**limits | settings | transfer), model_files(config))[0]
    try:
        loop.idle()
        yield loop
    finally:
        loop.close()


def prompts(count: int = 4) -> list[list[int]]:
    """Prompts with a beginning in common."""
    rng = random.Random(3)
    common = [rng.randrange(4, VOCAB) for _ in range(40)]
    return [common + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 60))] for _ in range(count)]


def request(name: str, tokens: list[int], option: object = None, **params: Any) -> GenerateRequest:
    sampling = SamplingParams(**{"max_tokens": 12, "temperature": 0, "ignore_eos": True, **params})
    options = {} if option is None else {NAME: msgspec.Raw(msgspec.msgpack.encode(option))}
    return GenerateRequest(id=name, tokens=list(tokens), params=sampling, options=options)


def offers(loop: EngineLoop, asked: list[list[int]]) -> list[Offer]:
    """Have an engine compute prompts for others; return what it answers."""
    ends = [
        delta
        for delta in drive(loop, [request(str(i), tokens, Send(), max_tokens=1) for i, tokens in enumerate(asked)])
        if delta.finish is not None
    ]
    found = {delta.id: msgspec.msgpack.decode((delta.found or {})[NAME]) for delta in ends}
    return [msgspec.convert(found[str(i)], Offer) for i in range(len(asked))]


def settle(loop: EngineLoop) -> None:
    """Wait until nothing is on its way to the worker half, and it has dropped what it was to drop."""
    while loop._scheduler.storing:
        loop.idle()
    loop.idle()


def alone(config: dict[str, Any], asked: list[list[int]], **settings: Any) -> Tokens:
    with engine(config, **settings) as loop:
        return tokens_of(drive(loop, [request(str(i), tokens) for i, tokens in enumerate(asked)], at_once=1))


def fetched(loop: EngineLoop, asked: list[list[int]], found: list[Offer]) -> tuple[Tokens, EngineStats]:
    requests = [request(str(i), tokens, Fetch(one)) for i, (tokens, one) in enumerate(zip(asked, found, strict=True))]
    return tokens_of(drive(loop, requests, at_once=1)), loop.stats()


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_another_engine(name: str) -> None:
    """All of a prompt is fetched but the rest of its last block; prompts after the first only what differs."""
    config, settings = MODELS[name]
    asked = prompts()
    expected = alone(config, asked, **settings)
    with (
        engine(config, "kv_producer", **settings) as producer,
        engine(config, "kv_consumer", **settings) as consumer,
    ):
        found = offers(producer, asked)
        tokens, stats = fetched(consumer, asked, found)
        assert tokens == expected
        assert stats.loads_failed == stats.loads_late == 0
        assert stats.prompt_tokens_computed <= sum(1 + (len(one) - 1) % 16 for one in asked)
        assert consumer.stats().blocks_stored == 0


def test_states_of_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.models.implementation.CausalLM", Hybrid)
    config = LLAMA | {"num_hidden_layers": 4}
    settings = {"attention_backend": "torch", "num_blocks": 96}
    asked = prompts()
    expected = alone(config, asked, **settings)
    with (
        engine(config, "kv_producer", **settings) as producer,
        engine(config, "kv_consumer", **settings) as consumer,
    ):
        tokens, stats = fetched(consumer, asked, offers(producer, asked))
        assert tokens == expected
        assert stats.blocks_loaded > 0
        assert stats.loads_failed == 0


@pytest.mark.parametrize(
    "settings", [pytest.param(TWO_RANKS, id="tp"), pytest.param(PIPELINE, id="pp", marks=pytest.mark.slow)]
)
def test_each_rank_fetches_its_part(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)
    config = LLAMA | {"vocab_size": VOCAB + 1}
    asked = prompts(2)
    expected = alone(config, asked, device="cpu")
    with engine(config, "kv_producer", **settings) as producer, engine(config, "kv_consumer", **settings) as consumer:
        found = offers(producer, asked)
        assert len(set(found[0].remote_ranks)) == 2
        tokens, stats = fetched(consumer, asked, found)
        assert tokens == expected
        assert stats.blocks_loaded > 0
        assert stats.loads_failed == 0


def test_where_the_state_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's runner, in Triton's interpreter without one."""
    pytest.importorskip("triton")
    small = {"max_num_seqs": 1, "max_num_batched_tokens": 32, "num_blocks": 8, "max_model_len": 48}
    small |= behind(monkeypatch)
    asked = [list(range(4, 40))]
    with engine(QWEN3, "kv_both", **small) as producer, engine(QWEN3, "kv_both", **small) as consumer:
        found = offers(producer, asked)
        expected = tokens_of(drive(producer, [request("0", asked[0], max_tokens=4)]))
        tokens = tokens_of(drive(consumer, [request("0", asked[0], Fetch(found[0]), max_tokens=4)]))
        assert tokens == expected
        assert consumer.stats().blocks_loaded == 2


def test_what_the_sender_has_shared_or_computed_before_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prefix cache has all of the prompt, but nothing of it is kept for others yet."""
    asked = prompts(1)
    with engine(role="kv_producer") as producer, engine(role="kv_consumer") as consumer:
        expected = tokens_of(drive(producer, [request("0", asked[0])]))
        assert producer.stats().blocks_stored == 0
        (offer,) = offers(producer, asked)
        assert offer.blocks == [[(0, len(asked[0]) // 16)]]
        tokens, stats = fetched(consumer, asked, [offer])
        assert tokens == expected
        assert stats.blocks_loaded == (len(asked[0]) - 1) // 16


def test_several_choices_fetch_once() -> None:
    asked = prompts(1)[0]
    with engine(role="kv_producer") as producer, engine(role="kv_consumer") as consumer:
        drawn: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 4}
        expected = tokens_of(drive(producer, [request("0", asked, **drawn)]))
        (offer,) = offers(producer, [asked])
        assert tokens_of(drive(consumer, [request("0", asked, Fetch(offer), **drawn)])) == expected
        assert consumer.stats().blocks_loaded == (len(asked) - 1) // 16


def test_a_little_buffer_keeps_what_was_computed_last() -> None:
    """What is gone is computed again, and no answer is wrong."""
    asked = prompts(6)
    expected = alone(LLAMA, asked)
    with engine(role="kv_producer", keys={"kv_buffer_size": 1 << 17}) as producer:
        (places,) = producer.worker.call_hook(NAME, "places", {}).result(60)
        with engine(role="kv_consumer") as consumer:
            found = [offers(producer, [tokens])[0] for tokens in asked]
            settle(producer)
            metrics = {one.name: sum(one.values.values()) for one in producer.stats().features}
            assert metrics["kv_transfer_blocks"] <= places
            assert metrics["kv_transfer_blocks_dropped"] > 0
            tokens, stats = fetched(consumer, asked, found)
            assert tokens == expected
            assert stats.loads_failed > 0


@pytest.mark.parametrize("what", ["weights", "prompt", "form"])
def test_blocks_of_another_model_or_prompt_are_not_taken(what: str) -> None:
    asked = prompts(1)
    settings: dict[str, Any] = {"weights": {"seed": 9}, "form": {"kv_cache_dtype": "int8"}}.get(what, {})
    given = [[5, *asked[0][1:]]] if what == "prompt" else asked
    expected = alone(LLAMA, given, **settings)
    with engine(role="kv_producer") as producer, engine(role="kv_consumer", **settings) as consumer:
        tokens, stats = fetched(consumer, given, offers(producer, asked))
        assert tokens == expected
        assert stats.blocks_loaded == stats.loads_failed == 0
        assert {one.name: sum(one.values.values()) for one in stats.features}["kv_transfer_refused"] == 1


@pytest.mark.parametrize("how", RENEWALS)
def test_what_may_be_of_other_weights_is_not_offered(how: str) -> None:
    asked = prompts(1)
    expected = alone(LLAMA, asked)
    with (
        engine(role="kv_producer", enable_sleep_mode=True) as producer,
        engine(role="kv_consumer") as consumer,
    ):
        (before,) = offers(producer, asked)
        renew(producer, how)
        settle(producer)
        tokens, stats = fetched(consumer, asked, [before])
        assert tokens == expected
        assert stats.blocks_loaded == 0
        (after,) = offers(producer, asked)
        assert after.blocks == before.blocks


def test_a_sender_that_is_gone() -> None:
    asked = prompts(2)
    expected = alone(LLAMA, asked)
    with engine(role="kv_producer") as producer:
        found = offers(producer, asked)
    with engine(role="kv_consumer") as consumer:
        tokens, stats = fetched(consumer, asked, found)
        assert tokens == expected
        assert stats.blocks_loaded == 0


def test_a_request_that_ends_while_it_fetches_leaves_nothing_behind() -> None:
    asked = prompts(2)
    expected = alone(LLAMA, asked)
    with engine(role="kv_producer") as producer, engine(role="kv_consumer") as consumer:
        found = offers(producer, asked)
        consumer.add(request("gone", asked[0], Fetch(found[0])))
        consumer.step()
        consumer.abort("gone")
        tokens, _ = fetched(consumer, asked, found)
        assert tokens == expected
        hook = next(hook for hook in consumer._scheduler._hooks if hook.name == NAME)
        assert not hook.tier._offered
        assert not hook.tier._of
        assert not hook._options
        assert not hook._alive


def test_a_prompt_is_computed_here_if_no_server_is_named() -> None:
    """`Ask` is an option of front ends whose engine has prefill servers; without them it changes nothing."""
    asked = prompts(1)
    with engine(role="kv_consumer") as consumer:
        tokens = tokens_of(drive(consumer, [request("0", asked[0], Ask())]))
    assert tokens == alone(LLAMA, asked)


def test_settings_that_a_model_can_not_have() -> None:
    with (
        pytest.raises(ConfigError, match="--kv-transfer-config needs prefix caching"),
        engine(role="kv_both", enable_prefix_caching=False),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="kv_buffer_size=100 is too small"),
        engine(role="kv_both", keys={"kv_buffer_size": 100}),
    ):
        pass
