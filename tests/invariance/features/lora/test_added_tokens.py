"""Adapters that add tokens to the vocabulary: tokens are those of a model with the adapter's tables and weights merged
in, and those of other requests are as without adapters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from adapter_kit import kernels_on_any_machine
from rank_kit import TWO_RANKS, ranks_in_threads
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint, model_files
from tiny_adapters import PREFIX, merged, save_adapter
from torch import Tensor
from toy_engine import GPU, drive, tiny_config
from toy_graphs import recorded_graphs
from toy_models import behind

from octavo.build import build_core
from octavo.core.errors import ConfigError, InvalidRequestError, ModelFileError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.features.lora.payload import NAME
from octavo.features.lora.requests import Part, encode
from octavo.sampling.allowed import Allowed, num_words, words_of
from octavo.worker.hooks import Hooks

TABLES = ("model.embed_tokens", "lm_head")
FORMS = {"saved": 5, "copies": 3, "trained alone": 4}
"""Forms in which PEFT saves added tokens -> how many there are."""
MOST = 6


@pytest.fixture(
    scope="module",
    params=[{}, pytest.param({"tie_word_embeddings": True}, marks=pytest.mark.slow)],
    ids=["own head", "tied head"],
)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_checkpoint("llama", folder, changes=request.param)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((folder / "config.json").read_bytes())
    return found


def with_added(base: Path, folder: Path, form: str, seed: int) -> Path:
    """Write an adapter in one of the forms, and the model with all of it merged in, in `merged`; return the adapter."""
    config, count = config_of(base), FORMS[form]
    size, tied = config["vocab_size"], config.get("tie_word_embeddings", False)
    adapter = save_adapter(folder / "adapter", config, seed=seed, targets=("q_proj", "up_proj"))
    weights = load_file(base / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    made = torch.Generator().manual_seed(seed)

    def random(rows: int, strength: float) -> Tensor:
        return torch.randn(rows, config["hidden_size"], generator=made) * strength

    tables = {name: weights.get(f"{name}.weight", weights[f"{TABLES[0]}.weight"]) for name in TABLES}
    if form == "saved":
        tables = {name: table + random(size, 0.05) for name, table in tables.items()}
    added = {name: random(count, strength) for name, strength in zip(TABLES, (1.0, 0.4), strict=True)}
    if tied and form == "trained alone":
        added = dict.fromkeys(TABLES, added["lm_head"])
    tables = {name: torch.cat([table, added[name]]) for name, table in tables.items()}
    stated: dict[str, Any] = {"modules_to_save": ["embed_tokens", "lm_head"]} if form == "saved" else {}
    if form == "trained alone":
        ids, rows = [size + 2, 7, size], random(3, 0.4)
        stated = {"trainable_token_indices": ids}
        for name in TABLES if tied else TABLES[:1]:
            tensors[f"{PREFIX}{name}.token_adapter.base_layer.weight"] = tables[name]
            tables[name] = tables[name].index_copy(0, torch.tensor(ids), rows)
            tensors[f"{PREFIX}{name}.token_adapter.trainable_tokens_delta"] = rows
    if form != "trained alone" or not tied:
        for name in TABLES if form != "trained alone" else TABLES[1:]:
            tensors[f"{PREFIX}{name}.weight"] = tables[name]
    save_file({name: one.clone() for name, one in tensors.items()}, adapter / "adapter_model.safetensors")
    given = json.loads((adapter / "adapter_config.json").read_text())
    whole = merged(weights, adapter_of_layers(adapter, folder)) | {
        f"{name}.weight": one for name, one in tables.items()
    }
    (adapter / "adapter_config.json").write_text(json.dumps(given | stated))
    (folder / "merged").mkdir()
    save_file({name: one.clone() for name, one in whole.items()}, folder / "merged" / "model.safetensors")
    changed = config | {"vocab_size": size + count, "tie_word_embeddings": False}
    (folder / "merged" / "config.json").write_text(json.dumps(changed))
    return adapter


def adapter_of_layers(adapter: Path, folder: Path) -> Path:
    """Write the adapter without its tables."""
    only = folder / "layers"
    only.mkdir()
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: one for name, one in tensors.items() if ".lora_" in name}, only / "adapter_model.safetensors")
    (only / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    return only


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {form: with_added(base, root / form, form, seed) for seed, form in enumerate(FORMS)}


def engine(model: Path, adapters: dict[str, Path], **settings: Any) -> EngineLoop:
    modules = tuple(f"{name}={path}" for name, path in adapters.items())
    asked = {"load_format": "auto", "attention_backend": "torch", "max_model_len": 96, "memory_bytes": 1 << 23}
    return build_core(tiny_config(**asked | {"lora_modules": modules} | settings), model_files(model))[0]


def ways(size: int, some: Sequence[int]) -> list[SamplingParams]:
    """Ways of sampling from a vocabulary: `some` tokens of it get a bias, or are the only ones."""
    common: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True}
    bias = dict.fromkeys(some, 2.0)
    return [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0, logprobs=4, prompt_logprobs=2, **common),
        SamplingParams(temperature=1.0, seed=3, top_k=size - 1, logprobs=-1, **common),
        SamplingParams(temperature=0.8, seed=5, top_p=0.9, repetition_penalty=1.2, logit_bias=bias, **common),
        SamplingParams(temperature=0, frequency_penalty=1.5, presence_penalty=0.5, **common),
        SamplingParams(temperature=1.0, seed=7, allowed_token_ids=list(some), **common),
    ]


Found = tuple[list[int], list[float], list[list[int]]]


def found(loop: EngineLoop, asked: Sequence[GenerateRequest]) -> dict[str, Found]:
    """Return each request's tokens, their log-probabilities, and the ids of those that are reported beside."""
    told: dict[str, Found] = {one.id: ([], [], []) for one in asked}
    for delta in drive(loop, asked):
        assert delta.error is None, delta.error
        tokens, logprobs, ids = told[delta.id]
        tokens += delta.tokens
        for entry in (*(delta.prompt_logprobs or ()), *(delta.logprobs or ())):
            logprobs.append(entry.logprob)
            ids.append(sorted(entry.top_ids))
    return told


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_tokens_are_those_of_the_extended_model(backend: str, base: Path, adapters: dict[str, Path]) -> None:
    """In steps shared with requests of the base model, of a low-rank adapter, and of fewer added tokens."""
    size = config_of(base)["vocab_size"]
    low = save_adapter(base / "low", config_of(base), seed=9)
    loop = engine(base, {**adapters, "low": low}, lora_extra_vocab_size=MOST, attention_backend=backend)
    asked: dict[str, list[GenerateRequest]] = {form: [] for form in (*adapters, "", "low")}
    for form, requests in asked.items():
        count = FORMS.get(form, 0)
        prompt = [(11 * place) % 199 for place in range(9)] + [size + place for place in range(count)] + [4, 7]
        for number, params in enumerate(ways(size + count, [3, 50, size + count - 1])):
            options = {NAME: encode((Part(form),))} if form else {}
            name = f"{form} {number}"
            requests.append(GenerateRequest(id=name, tokens=prompt[number:], params=params, options=options))
    mixed = [one for several in zip(*asked.values(), strict=True) for one in several]
    together = found(loop, mixed)
    loop.close()
    seen: set[int] = set()
    for form, requests in asked.items():
        model = adapters[form].parent / "merged" if form in adapters else base
        alone = engine(model, {"low": low} if form == "low" else {}, attention_backend=backend)
        plain = requests if form == "low" else [msgspec.structs.replace(one, options={}) for one in requests]
        for name, (tokens, logprobs, ids) in found(alone, plain).items():
            assert together[name][0] == tokens, name
            assert together[name][1] == pytest.approx(logprobs, abs=1e-3), name
            assert together[name][2] == ids, name
            if form in adapters:
                seen.update(token for token in tokens if token >= size)
        alone.close()
    assert len(seen) > 3, "added tokens are hardly generated"


def on_a_device(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """Return settings for slots on the device, whose kernels may be interpreted and so are slow."""
    pytest.importorskip("triton")
    kernels_on_any_machine(monkeypatch, folder)
    return (
        {"attention_backend": None} | behind(monkeypatch) | {"max_model_len": 32, "max_num_seqs": 7, "num_blocks": 200}
    )


@pytest.mark.parametrize("base", [{}], indirect=True, ids=["own head"])
def test_slots_on_the_device(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched ahead: added tokens stay on the device from one step to the next. Draws are that device's own."""
    few = on_a_device(monkeypatch, tmp_path)
    size, form = config_of(base)["vocab_size"], "saved"
    adapter = with_added(base, tmp_path / form, form, 1)
    count = FORMS[form]
    prompt = [3, 50, *range(size, size + count), 7]

    def asked(name: str, **options: Any) -> list[GenerateRequest]:
        shorter = [msgspec.structs.replace(one, max_tokens=4) for one in ways(size + count, [3, size + count - 1])]
        return [GenerateRequest(id=f"{name}{i}", tokens=prompt, params=one, **options) for i, one in enumerate(shorter)]

    replayed = recorded_graphs(monkeypatch)
    eager = {"enforce_eager": not GPU}  # recording takes the interpreter minutes
    loop = engine(base, {form: adapter}, lora_extra_vocab_size=MOST, async_scheduling=True, **few, **eager)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    plain = GenerateRequest(id="base", tokens=[3, 50, 7], params=params)
    options = {NAME: encode((Part(form),))}
    together = found(loop, [*asked("a", options=options), plain])
    loop.close()
    assert not GPU or replayed["sample"] > 0, "steps without requests of the adapter"
    few["enforce_eager"] = True
    alone = engine(tmp_path / form / "merged", {}, async_scheduling=False, **few)
    expected = found(alone, asked("a"))
    alone.close()
    unadapted = engine(base, {}, **few)
    expected |= found(unadapted, [plain])
    unadapted.close()
    for name, (tokens, logprobs, ids) in expected.items():
        assert together[name][0] == tokens, name
        assert together[name][1] == pytest.approx(logprobs, abs=1e-3), name
        assert together[name][2] == ids, name
    assert any(token >= size for name in together for token in together[name][0])


@pytest.mark.parametrize("backend", ["torch", "native", "slots on the device"])
def test_masks_of_features_leave_added_tokens_out(
    backend: str, base: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They have bits for the model's vocabulary, and any bits after it in the last word."""
    size = config_of(base)["vocab_size"]
    words = words_of([5, 6, *range(size, 32 * num_words(size))], 32 * num_words(size))

    def allowed(hooks: Hooks, slots: Sequence[int], payload: Any) -> Allowed:
        return Allowed(range(len(slots)), np.tile(words, (len(slots), 1)))

    monkeypatch.setattr(Hooks, "allowed", allowed)
    on_device = backend == "slots on the device"
    settings = on_a_device(monkeypatch, tmp_path) if on_device else {"attention_backend": backend}
    loop = engine(base, adapters, lora_extra_vocab_size=MOST, enforce_eager=on_device, **settings)
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
    asked = [
        GenerateRequest(id=f"{form} {i}", tokens=[3 + i, size], params=params, options={NAME: encode((Part(form),))})
        for form in adapters
        for i in range(3)
    ]
    told = found(loop, [*asked, GenerateRequest(id="base", tokens=[3], params=params)])
    loop.close()
    assert {token for form in adapters for i in range(3) for token in told[f"{form} {i}"][0]} == {5, 6}


def test_tokens_that_an_adapter_lacks_are_refused(base: Path, adapters: dict[str, Path]) -> None:
    size = config_of(base)["vocab_size"]
    loop = engine(base, adapters, lora_extra_vocab_size=MOST)
    options = {NAME: encode((Part("copies"),))}
    request = GenerateRequest(id="x", tokens=[size + 3], params=SamplingParams(max_tokens=2), options=options)
    with pytest.raises(
        InvalidRequestError, match=rf"{size + 3} is out of vocabulary: with this .* from 0 to {size + 2}"
    ):
        loop.add(request)
    fine = msgspec.structs.replace(request, tokens=[size + 2])
    with pytest.raises(InvalidRequestError, match="out of vocabulary"):
        loop.add(msgspec.structs.replace(fine, params=SamplingParams(max_tokens=2, stop_token_ids=[size + 3])))
    found(loop, [fine])
    loop.close()


def test_what_is_refused_says_why(base: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for form, path in adapters.items():
        with pytest.raises(ModelFileError, match=rf"adds {FORMS[form]}, and this engine takes up to 2 \(--lora-extra-"):
            engine(base, {form: path}, lora_extra_vocab_size=2)
    ranks_in_threads(monkeypatch)
    with pytest.raises(
        ConfigError, match="--lora-extra-vocab-size can't be used here: the model is divided over ranks"
    ):
        engine(base, {}, lora_extra_vocab_size=2, enable_lora=True, **TWO_RANKS)
    ngram = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    with pytest.raises(ConfigError, match="drafters have the model's vocabulary"):
        engine(base, {}, lora_extra_vocab_size=2, enable_lora=True, **ngram)
