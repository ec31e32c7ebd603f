"""The whole engine with activated adapters: greedy tokens are those of a model whose layers add the adapter to the
tokens behind the invocation only, and what comes before shares KV with the base model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rank_kit import CONTEXTS, PIPELINE, TWO_RANKS, ranks_in_threads
from safetensors.torch import load_file
from tiny import make_checkpoint, model_files
from tiny_adapters import PREFIX, save_adapter
from torch import Tensor, nn
from toy_engine import drive, one_by_one, tiny_config, tokens_of
from transformers import AutoModelForCausalLM

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.features.lora.payload import NAME
from octavo.features.lora.requests import Part, encode

INVOCATION = [7, 40, 7]
HEAD = [(3 * i + 1) % 190 for i in range(37)]
PROMPTS = {
    "in the middle": [*HEAD, *INVOCATION, 5, 9],
    "at the end": [*HEAD[:20], *INVOCATION, *HEAD[20:], *INVOCATION],
    "at the start": [*INVOCATION, 11, 12, 13],
    "nowhere": [*HEAD, 7, 40],
}
STARTS = {"in the middle": 37, "at the end": 40, "at the start": 0, "nowhere": None}
SCALE = 2.0
COUNT = 10
SETTINGS: dict[str, dict[str, Any]] = {
    "in step": {},
    "overlap and chunks": {"async_scheduling": True, "max_num_batched_tokens": 8, "max_num_seqs": 6},
    "little memory": {"async_scheduling": True, "num_blocks": 100, "max_model_len": 64, "block_size": 4},
    "native": {"attention_backend": "native", "async_scheduling": True, "max_num_batched_tokens": 8},
    "no shared prefixes": {"enable_prefix_caching": False},
    "another process": {"distributed_executor_backend": "mp", "async_scheduling": True},
    "two ranks": TWO_RANKS,
    "two stages": PIPELINE,
    "two native stages": PIPELINE | {"attention_backend": "native", "max_num_batched_tokens": 8},
    "two ranks that divide prompts": CONTEXTS,
}
LONG_TAIL = (
    "no shared prefixes",
    "another process",
    "two ranks",
    "two stages",
    "two native stages",
    "two ranks that divide prompts",
)
KINDS = [pytest.param(kind, marks=pytest.mark.slow) if kind in LONG_TAIL else kind for kind in SETTINGS]


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_checkpoint("llama", folder)
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    config = msgspec.json.decode((model / "config.json").read_bytes())
    root = tmp_path_factory.mktemp("adapters")
    called = {"alora_invocation_tokens": INVOCATION}
    return {
        "called": save_adapter(root / "called", config, seed=1, rank=4, strength=0.5, **called),
        "other": save_adapter(root / "other", config, seed=2, rank=8, strength=0.5, **called),
        "always": save_adapter(root / "always", config, seed=1, rank=4, strength=0.5),
    }


@pytest.fixture(scope="module")
def expected(model: Path, adapters: dict[str, Path]) -> Callable[[str, str], list[int]]:
    """Return the tokens after a prompt, computed from its beginning for each token."""

    @functools.cache
    def tokens(prompt: str, adapter: str) -> list[int]:
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        start = 0 if adapter == "always" else STARTS[prompt]
        if adapter and start is not None:
            add_from(reference, adapters[adapter], start)
        found = list(PROMPTS[prompt])
        with torch.inference_mode():
            for _ in range(COUNT):
                found.append(int(reference(torch.tensor([found])).logits[0, -1].argmax()))
        return found[-COUNT:]

    return tokens


def add_from(model: nn.Module, adapter: Path, start: int) -> None:
    """Have the model's layers add an adapter to all tokens from a position on."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, layer in model.named_modules():
        a = tensors.get(f"{PREFIX}{name}.lora_A.weight")
        if a is not None:
            b = tensors[f"{PREFIX}{name}.lora_B.weight"]

            def add(_: nn.Module, given: tuple[Tensor, ...], out: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
                out[:, start:] += SCALE * given[0][:, start:] @ a.T @ b.T
                return out

            layer.register_forward_hook(add)


def engine(model: Path, adapters: dict[str, Path], **settings: Any) -> EngineLoop:
    modules = tuple(f"{name}={path}" for name, path in adapters.items())
    asked = {"load_format": "auto", "attention_backend": "torch", "lora_modules": modules} | settings
    return build_core(tiny_config(**asked), model_files(model))[0]


def asking(prompt: str, adapter: str, *, name: str = "") -> GenerateRequest:
    options = {NAME: encode((Part(adapter),))} if adapter else {}
    params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
    return GenerateRequest(id=name or f"{prompt}/{adapter}", tokens=PROMPTS[prompt], params=params, options=options)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_layers_that_add_from_the_invocation_on(
    kind: str, model: Path, adapters: dict[str, Path], expected: Callable[[str, str], list[int]]
) -> None:
    loop = engine(model, adapters, **SETTINGS[kind])
    asked = [asking(prompt, adapter) for prompt in PROMPTS for adapter in ("", *adapters)]
    found = tokens_of(drive(loop, asked))
    again = tokens_of(one_by_one(loop, asked[::-1]))  # most of them share what the first ones computed
    for prompt in PROMPTS:
        for adapter in ("", *adapters):
            name = f"{prompt}/{adapter}"
            assert found[name, 0] == again[name, 0] == expected(prompt, adapter), name
    inactive = {one.name: one.values for one in loop.stats().features}["lora_inactive_requests"]
    assert inactive == {"": 4}  # two adapters, twice
    loop.close()


def cached(loop: EngineLoop, request: GenerateRequest) -> int:
    """Run a request; return how many tokens of its prompt were found in the cache."""
    return max(delta.num_cached for delta in drive(loop, [request]))


@pytest.fixture
def loop(model: Path, adapters: dict[str, Path]) -> Iterator[EngineLoop]:
    loop = engine(model, adapters, block_size=4, max_model_len=64)
    yield loop
    loop.close()


def test_what_comes_before_the_invocation_is_shared(loop: EngineLoop) -> None:
    """Blocks have 4 tokens; 36 of the 37 before the invocation fill blocks, and the last token is always computed."""
    prompt = "in the middle"
    assert cached(loop, asking(prompt, "", name="base")) == 0
    assert cached(loop, asking(prompt, "called", name="a")) == 36  # from the base
    assert cached(loop, asking(prompt, "called", name="b")) == 40  # from itself, behind the invocation, too
    assert cached(loop, asking(prompt, "other", name="c")) == 36  # another adapter shares the base's part only
    assert cached(loop, asking(prompt, "", name="d")) == 40
    assert cached(loop, asking(prompt, "always", name="e")) == 0


def test_the_base_shares_what_an_activated_adapter_computed(loop: EngineLoop) -> None:
    assert cached(loop, asking("in the middle", "called", name="a")) == 0
    assert cached(loop, asking("in the middle", "", name="b")) == 36
    assert cached(loop, asking("nowhere", "other", name="c")) == 36


def test_an_adapter_that_comes_again_shares_nothing_behind_the_invocation(
    loop: EngineLoop, adapters: dict[str, Path]
) -> None:
    assert cached(loop, asking("in the middle", "called", name="a")) == 0
    args = {"name": "called", "path": str(adapters["called"]), "in_place": True}
    future = loop.call(NAME, "load", args)
    while not future.done():
        loop.idle()
    assert cached(loop, asking("in the middle", "called", name="b")) == 36
