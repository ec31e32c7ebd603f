"""Adapters with an int8 KV cache: as near to merged weights with the same cache as rounding allows.

An adapter's keys and values differ from those of merged weights by float32's rounding, which can move a number to the
next integer. That is one step of those that rounding the cache itself takes everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint, model_files
from tiny_adapters import merged, save_adapter
from toy_engine import drive, tiny_config

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.features.lora.payload import NAME
from octavo.features.lora.requests import Part, encode

ADAPTERS: dict[str, dict[str, Any]] = {
    "low": {"rank": 4},
    "high": {"rank": 32},
    "keys": {"rank": 8, "targets": ("k_proj", "v_proj"), "strength": 1.0},
    "gains": {"rank": 8, "use_dora": True},
}
PROMPT = [(7 * place) % 199 for place in range(40)]
Logprobs = dict[str, list[float]]


def logprobs(folder: Path, adapters: dict[str, Path], *names: str, cache: str | None = None) -> Logprobs:
    """Return the log-probabilities of the prompt's tokens, by request. "base" has no adapter."""
    modules = tuple(f"{name}={path}" for name, path in adapters.items())
    settings: dict[str, Any] = {"lora_modules": modules} if modules else {}
    settings |= {"device": "cpu", "attention_backend": "native", "load_format": "auto"}
    settings |= {} if cache is None else {"kv_cache_dtype": cache}
    loop = build_core(tiny_config(**settings), model_files(folder))[0]
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=0)
    asked = [
        GenerateRequest(
            id=name,
            tokens=PROMPT,
            params=params,
            options={NAME: encode((Part(name),))} if name in adapters else {},
        )
        for name in names
    ]
    found: Logprobs = {name: [] for name in names}
    for delta in drive(loop, asked):
        assert delta.error is None, delta.error
        found[delta.id] += [entry.logprob for entry in delta.prompt_logprobs or () if entry is not None]
    loop.close()
    assert {len(one) for one in found.values()} == {len(PROMPT) - 1}
    return found


def distance(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path], dict[str, Path]]:
    """The base model, the adapters, and the models with one of them merged in."""
    root = tmp_path_factory.mktemp("caches")
    make_checkpoint("llama", root / "base")
    config = msgspec.json.decode((root / "base" / "config.json").read_bytes())
    weights = load_file(root / "base" / "model.safetensors")
    adapters, whole = {}, {}
    for seed, (name, how) in enumerate(ADAPTERS.items()):
        adapters[name] = save_adapter(root / name, config, seed=seed, **how)
        whole[name] = root / f"{name}-merged"
        whole[name].mkdir()
        save_file(merged(weights, adapters[name]), whole[name] / "model.safetensors")
        (whole[name] / "config.json").write_bytes((root / "base" / "config.json").read_bytes())
    return root / "base", adapters, whole


def test_adapters_are_as_near_to_merged_weights_as_rounding_allows(
    folders: tuple[Path, dict[str, Path], dict[str, Path]],
) -> None:
    base, adapters, whole = folders
    found = logprobs(base, adapters, "base", *ADAPTERS, cache="int8")
    assert found["base"] == logprobs(base, {}, "base", cache="int8")["base"], "the base is the same to the bit"
    for name in ADAPTERS:
        rounded = logprobs(whole[name], {}, name, cache="int8")[name]
        exact = logprobs(whole[name], {}, name)[name]
        assert distance(found[name], rounded) < distance(rounded, exact) / 50
        assert distance(found[name], found["base"]) > distance(rounded, exact)
