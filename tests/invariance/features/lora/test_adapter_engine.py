"""The whole engine with adapters: greedy tokens are those of the model with the adapter's weights merged in."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rank_kit import CONTEXTS, PIPELINE, TWO_RANKS, ranks_in_threads
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint, model_files
from tiny_adapters import merged, save_adapter
from toy_engine import drive, tiny_config, tokens_of
from toy_models import LLAMA
from toy_models import model_files as toy_files

from octavo.build import build_core
from octavo.core.errors import InvalidRequestError, ModelFileError
from octavo.core.output import FinishReason
from octavo.core.params import SamplingParams
from octavo.core.pausing import PauseMode, SleepTag
from octavo.core.request import GenerateRequest
from octavo.device.transfer import HostCopier
from octavo.engine.loop import EngineLoop
from octavo.features.lora.payload import NAME
from octavo.features.lora.reader import Reader
from octavo.features.lora.requests import Part, encode
from octavo.models.load import open_checkpoint
from octavo.models.save.folder import quantize
from octavo.models.save.rounding import ROUNDINGS
from octavo.nn.weights import TensorSpec

RANKS = {"a": 4, "b": 8, "c": 16}
MAGNITUDES = "d"
Tokens = dict[tuple[str, int], list[int]]


def prompt_of(number: int) -> list[int]:
    return [(7 * number + 3 * place) % 199 for place in range(5 + 3 * number)]


def asking(name: str, number: int, *parts: tuple[str, float], max_tokens: int = 12) -> GenerateRequest:
    options = {NAME: encode(tuple(Part(*part) for part in parts))} if parts else {}
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(id=name, tokens=prompt_of(number), params=params, options=options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_checkpoint("llama", folder)
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    config = msgspec.json.decode((model / "config.json").read_bytes())
    root = tmp_path_factory.mktemp("adapters")
    made = {name: save_adapter(root / name, config, seed=i, rank=r) for i, (name, r) in enumerate(RANKS.items())}
    made[MAGNITUDES] = save_adapter(root / MAGNITUDES, config, seed=9, rank=4, use_dora=True)
    return made


def engine(model: Path, adapters: Mapping[str, Path], **settings: Any) -> EngineLoop:
    modules = tuple(f"{name}={path}" for name, path in adapters.items())
    asked = {"load_format": "auto", "attention_backend": "torch", "lora_modules": modules} | settings
    return build_core(tiny_config(**asked), model_files(model))[0]


@pytest.fixture(scope="module")
def expected(model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the tokens of a prompt under merged weights, computed alone."""
    loops: dict[Any, EngineLoop] = {}

    def tokens(number: int, *parts: tuple[str, float], max_tokens: int = 12) -> list[int]:
        if parts not in loops:
            folder = tmp_path_factory.mktemp("merged")
            weights = load_file(model / "model.safetensors")
            for name, weight in parts:
                weights = merged(weights, adapters[name], weight)
            save_file(weights, folder / "model.safetensors")
            (folder / "config.json").write_bytes((model / "config.json").read_bytes())
            loops[parts] = build_core(tiny_config(load_format="auto"), model_files(folder))[0]
        found = tokens_of(drive(loops[parts], [asking("x", number, max_tokens=max_tokens)]))
        return found["x", 0]

    return tokens


SELECTIONS: list[tuple[tuple[str, float], ...]] = [
    (("a", 1.0),),
    (),
    (("b", 1.0),),
    (("c", 1.0),),
    (("a", 1.0), ("b", 0.5)),
    ((MAGNITUDES, 1.0),),
    (("a", 1.0),),
    (),
    (("c", 0.25),),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "in step": {},
    "overlap and chunks": {"async_scheduling": True, "max_num_batched_tokens": 8, "max_num_seqs": 6},
    "one adapter at a time": {"async_scheduling": True, "max_loras": 1, "max_cpu_loras": 1},
    "little memory": {"async_scheduling": True, "num_blocks": 44, "max_model_len": 96},
    "native": {
        "attention_backend": "native",
        "async_scheduling": True,
        "max_num_batched_tokens": 8,
        "num_blocks": 44,
        "max_model_len": 96,
    },
    "another process": {"distributed_executor_backend": "mp", "async_scheduling": True},
    "two ranks": TWO_RANKS,
    "two stages": {**PIPELINE, "async_scheduling": True, "num_blocks": 80, "max_model_len": 96},
    "two stages of two ranks": {**PIPELINE, **TWO_RANKS},
    "two native stages": {
        **PIPELINE,
        "attention_backend": "native",
        "max_num_batched_tokens": 8,
        "num_blocks": 80,
        "max_model_len": 96,
    },
    "two ranks that divide prompts": CONTEXTS,
    "three stages, one adapter at a time": {**PIPELINE, "pipeline_parallel_size": 3, "max_loras": 1},
}


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)


LONG_TAIL = ("two ranks", "two stages", "two ranks that divide prompts", "three stages, one adapter at a time")
KINDS = [pytest.param(kind, marks=pytest.mark.slow) if kind in LONG_TAIL else kind for kind in SETTINGS]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_merged_weights(kind: str, model: Path, adapters: dict[str, Path], expected: Any) -> None:
    loop = engine(model, adapters, **SETTINGS[kind])
    asked = [asking(f"r{i}", i % 4, *parts) for i, parts in enumerate(SELECTIONS)]
    found = tokens_of(drive(loop, asked))
    stats = {one.name: one.values for one in loop.stats().features}
    for i, parts in enumerate(SELECTIONS):
        assert found[f"r{i}", 0] == expected(i % 4, *parts), f"request {i} with {parts}"
    assert stats["lora_tokens"] == {"a": 36, "b": 24, "c": 24, "d": 12}
    if kind == "one adapter at a time":
        assert stats["lora_evictions"][""] > 2
    loop.close()


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_have_the_embeddings_or_the_head(tied: bool, tmp_path: Path) -> None:
    """Low-rank changes of both, and saved ones in their place. With a tied head, the last stage has the table, too.
    Ranks that divide layers have a part of both."""
    make_checkpoint("llama", tmp_path, changes={"tie_word_embeddings": tied})
    config = msgspec.json.decode((tmp_path / "config.json").read_bytes())
    ends = ("embed_tokens", "lm_head")
    adapters = {
        "added": save_adapter(tmp_path / "added", config, seed=1, targets=("v_proj", *ends)),
        "saved": save_adapter(tmp_path / "saved", config, seed=2, targets=("q_proj",), modules_to_save=ends),
        "late": save_adapter(tmp_path / "late", config, seed=3, targets=("lm_head",), strength=3.0),
        "rows": save_adapter(
            tmp_path / "rows", config, seed=4, targets=("q_proj",), trainable_token_indices=[*range(0, 190, 3)]
        ),
        "rows of the head": save_adapter(
            tmp_path / "other", config, seed=5, targets=("q_proj",), trainable_token_indices={"lm_head": [180, 7, 90]}
        ),
    }
    asked = [asking(name, 2, (name, 1.0)) for name in adapters] + [asking("base", 2)]
    room = {"memory_bytes": 1 << 22, "max_model_len": 96, "max_lora_rank": 16}
    found = []
    for settings in ({}, PIPELINE, TWO_RANKS, PIPELINE | {"attention_backend": "native"}):
        loop = engine(tmp_path, adapters, **room | settings)
        found.append(tokens_of(drive(loop, asked)))
        loop.close()
    assert all(one == found[0] for one in found)
    assert len({tuple(tokens) for tokens in found[0].values()}) == len(asked)


@pytest.mark.slow
def test_native_stages_of_two_ranks(tmp_path: Path) -> None:
    """Each rank's part of a feed-forward is in whole panels, which the kernels need for adapters."""
    make_checkpoint("llama", tmp_path, changes={"intermediate_size": 128, "vocab_size": 200})
    config = msgspec.json.decode((tmp_path / "config.json").read_bytes())
    adapters = {name: save_adapter(tmp_path / name, config, seed=i, rank=4 + i) for i, name in enumerate("ab")}
    asked = [asking(f"{name}{i}", i, (name, 1.0)) for i, name in enumerate("abab")] + [asking("base", 2)]
    native = {"attention_backend": "native", "device": "cpu", "max_num_batched_tokens": 8, "max_num_seqs": 6}
    found = []
    for settings in ({}, {**PIPELINE, **TWO_RANKS}):
        loop = engine(tmp_path, adapters, **native | settings)
        found.append(tokens_of(drive(loop, asked)))
        loop.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_single_tokens_are_those_of_merged_weights(tied: bool, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "base", changes={"tie_word_embeddings": tied})
    config = msgspec.json.decode((tmp_path / "base" / "config.json").read_bytes())
    adapter = save_adapter(tmp_path / "mine", config, seed=4, strength=1.0, trainable_token_indices=[*range(0, 190, 3)])
    weights = load_file(tmp_path / "base" / "model.safetensors")
    (tmp_path / "merged").mkdir()
    save_file(merged(weights, adapter), tmp_path / "merged" / "model.safetensors")
    (tmp_path / "merged" / "config.json").write_bytes((tmp_path / "base" / "config.json").read_bytes())
    parts = (("mine", 1.0),)
    loop, plain = engine(tmp_path / "base", {"mine": adapter}), engine(tmp_path / "merged", {})
    asked = [asking(f"r{i}", i, *parts) for i in range(4)]
    found = tokens_of(drive(loop, [*asked, asking("base", 2)]))
    expected = tokens_of(drive(plain, [asking(f"r{i}", i) for i in range(4)]))
    assert {key: tokens for key, tokens in found.items() if key[0] != "base"} == expected
    assert found["base", 0] != found["r2", 0]
    loop.close()
    plain.close()


@pytest.mark.parametrize("form", ["w4a16", "w8a16", "fp8"])
def test_quantized_bases(form: str, tmp_path: Path) -> None:
    """The addition is not quantized: tokens are those of the dequantized weights with the adapter merged in."""
    make_checkpoint("quantized", tmp_path / "base")
    quantize(model_files(tmp_path / "base"), ROUNDINGS[form], tmp_path / "rounded", dtype=torch.float32)
    rounded = open_checkpoint(model_files(tmp_path / "rounded"))
    config = msgspec.json.decode((tmp_path / "base" / "config.json").read_bytes())
    adapter = save_adapter(tmp_path / "adapter", config, seed=1, rank=6)
    weights = {
        name: rounded.tensor(name, TensorSpec(tuple(one.shape), torch.float32)).float().clone()
        for name, one in load_file(tmp_path / "base" / "model.safetensors").items()
    }
    (tmp_path / "merged").mkdir()
    save_file(merged(weights, adapter), tmp_path / "merged" / "model.safetensors")
    (tmp_path / "merged" / "config.json").write_bytes((tmp_path / "base" / "config.json").read_bytes())
    found = {}
    for name, modules, parts in (("rounded", {"a": adapter}, (("a", 1.0),)), ("merged", {}, ())):
        loop = engine(tmp_path / name, modules, dtype="float32")
        found[name] = tokens_of(drive(loop, [asking("x", 2, *parts)]))
        loop.close()
    assert found["rounded"] == found["merged"]


def test_keys_and_values_in_int8(model: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    """The model's form of the adapters' rows is not that of the cache."""
    (tmp_path / "merged").mkdir()
    save_file(merged(load_file(model / "model.safetensors"), adapters["b"]), tmp_path / "merged" / "model.safetensors")
    (tmp_path / "merged" / "config.json").write_bytes((model / "config.json").read_bytes())
    settings = {"attention_backend": "native", "kv_cache_dtype": "int8"}
    adapted, plain = engine(model, adapters, **settings), engine(tmp_path / "merged", {}, **settings)
    found = tokens_of(drive(adapted, [asking("x", 2, ("b", 1.0)), asking("y", 1, ("c", 1.0)), asking("z", 3)]))
    assert found["x", 0] == tokens_of(drive(plain, [asking("x", 2)]))["x", 0]
    adapted.close()
    plain.close()


@pytest.mark.parametrize("held", [(Reader, "open"), (HostCopier, "room")], ids=["reading", "allocating"])
def test_no_step_waits_for_a_cold_adapter(
    held: tuple[type, str], model: Path, adapters: dict[str, Path], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of the base model begins and ends while an adapter is read, or memory for it is allocated."""
    owner, name = held
    ordinary, began, go = getattr(owner, name), threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        began.set()
        assert go.wait(10), "no step is computed meanwhile"
        return ordinary(*args)

    monkeypatch.setattr(owner, name, slow)
    loop = engine(model, adapters)
    loop.add(asking("cold", 1, ("a", 1.0)))
    while not began.wait(0.001):
        loop.step()
    loop.add(asking("base", 2))
    found: dict[str, list[int]] = {"base": [], "cold": []}
    for _ in range(20):
        for delta in loop.step():
            found[delta.id] += delta.tokens
    assert found == {"base": expected(2), "cold": []}
    go.set()
    while loop.busy:
        for delta in loop.step():
            found[delta.id] += delta.tokens
    assert found["cold"] == expected(1, ("a", 1.0))
    loop.close()


def test_a_sleep_and_new_weights_bring_adapters_back(model: Path, adapters: dict[str, Path], expected: Any) -> None:
    loop = engine(model, adapters, enable_sleep_mode=True)
    asked = [asking(f"r{i}", i % 4, *parts) for i, parts in enumerate(SELECTIONS[:6])]
    before = tokens_of(drive(loop, asked))
    loop.pause(PauseMode.KEEP)
    loop.sleep(1)
    loop.wake_up(list(SleepTag))
    assert tokens_of(drive(loop, asked)) == before
    loads = {one.name: one.values for one in loop.stats().features}["lora_loads"][""]
    loop.pause(PauseMode.KEEP)
    loop.update_weights(loop.check_weights().stage_weights(None, None))
    loop.resume()
    assert tokens_of(drive(loop, asked)) == before
    assert {one.name: one.values for one in loop.stats().features}["lora_loads"][""] > loads
    loop.close()


def test_the_native_program_computes_decodes_with_adapters(model: Path, adapters: dict[str, Path]) -> None:
    loop = engine(model, adapters, attention_backend="native")
    drive_all = list(drive(loop, [asking("x", 1, ("a", 1.0)), asking("y", 2), asking("z", 0, (MAGNITUDES, 1.0))]))
    assert drive_all
    assert loop._executor.replay.count >= 11  # type: ignore[attr-defined]
    loop.close()


def test_twelve_adapters_of_mixed_ranks_in_one_native_step(model: Path, tmp_path: Path) -> None:
    config = msgspec.json.decode((model / "config.json").read_bytes())
    ranks = (4, 8, 16, 64) * 3
    adapters = {f"a{i}": save_adapter(tmp_path / f"a{i}", config, seed=i, rank=r) for i, r in enumerate(ranks)}
    settings = {"max_num_seqs": 13, "max_loras": 12, "max_lora_rank": 64, "num_blocks": 700}
    settings |= {"memory_bytes": 1 << 24, "dtype": "float32"}
    asked = [asking("base", 1), *(asking(name, i % 4, (name, 1.0)) for i, name in enumerate(adapters))]
    alone = engine(model, adapters, **settings)
    expected = {one.id: tokens_of(drive(alone, [one]))[one.id, 0] for one in asked}
    alone.close()
    loop = engine(model, adapters, **(settings | {"attention_backend": "native"}))
    list(drive(loop, asked))  # brings all of them into memory, one after the other
    for one in asked:
        loop.add(one)
    sizes: list[int] = []
    found: dict[str, list[int]] = {one.id: [] for one in asked}
    while loop.busy:
        deltas = loop.step()
        sizes.append(len(deltas))
        for delta in deltas:
            found[delta.id] += delta.tokens
    assert found == expected
    assert max(sizes) == len(asked)
    loop.close()


def test_gains_are_those_of_the_new_weights(
    model: Path, adapters: dict[str, Path], expected: Any, tmp_path: Path
) -> None:
    """Packed weights can't be read back: the norms are computed from the files, or refused if there are none."""
    changed = tmp_path / "changed"
    changed.mkdir()
    made = torch.Generator().manual_seed(1)
    weights = load_file(model / "model.safetensors")
    weights = {name: one + 0.05 * torch.randn(one.shape, generator=made) for name, one in weights.items()}
    save_file(weights, changed / "model.safetensors")
    (changed / "config.json").write_bytes((model / "config.json").read_bytes())
    asked = [asking("gains", 1, (MAGNITUDES, 1.0)), asking("plain", 1, ("a", 1.0))]
    fresh = engine(changed, adapters, attention_backend="native")
    wanted = tokens_of(drive(fresh, asked))
    fresh.close()
    loop = engine(model, adapters, attention_backend="native")
    assert tokens_of(drive(loop, asked))["gains", 0] == expected(1, (MAGNITUDES, 1.0)) != wanted["gains", 0]
    loop.pause(PauseMode.KEEP)
    loop.update_weights(loop.check_weights().stage_weights(str(changed), None))
    loop.resume()
    assert tokens_of(drive(loop, asked)) == wanted
    loop.pause(PauseMode.KEEP)
    loop.check_weights().begin_weights()
    loop.check_weights().take_weights(weights.items())
    loop.update_weights(loop.check_weights().stage_received())
    loop.resume()
    ends = {delta.id: delta for delta in drive(loop, asked) if delta.finish is not None}
    assert ends["gains"].finish is FinishReason.ERROR
    assert "received as tensors" in (ends["gains"].error or "")
    assert ends["plain"].finish is FinishReason.LENGTH
    loop.close()


ENDS: dict[str, dict[str, Any]] = {
    "rows of both": {"trainable_token_indices": {"embed_tokens": [*range(0, 190, 3)], "lm_head": [*range(5, 90, 4)]}},
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "added": {"targets": ("embed_tokens", "v_proj", "lm_head")},
    "gains and a saved head": {"use_dora": True, "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}], ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_and_logits_change_around_a_native_program(
    changes: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    """The tokens are those of torch, and log-probabilities nearly, also of prompts; others' steps are not changed."""
    make_checkpoint("llama", tmp_path, changes=changes)
    config = msgspec.json.decode((tmp_path / "config.json").read_bytes())
    adapters = {
        name: save_adapter(tmp_path / name, config, seed=i, rank=4, **{"targets": ("q_proj", "up_proj")} | kind)
        for i, (name, kind) in enumerate(ENDS.items())
    }
    adapters["low"] = save_adapter(tmp_path / "low", config, seed=9)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    names = [*adapters, "saved", "low"]
    asked = [
        msgspec.structs.replace(asking(f"{name} {i}", i % 4, (name, 1.0), max_tokens=8), params=params)
        for i, name in enumerate(names)
    ]
    asked += [asking("base", 1), asking("plain", 2, ("saved", 1.0))]
    room = {"memory_bytes": 1 << 23, "max_model_len": 96, "dtype": dtype}
    found: list[dict[str, tuple[list[int], list[float]]]] = []
    for backend in ("torch", "native"):
        loop = engine(tmp_path, adapters, **room, attention_backend=backend)
        told: dict[str, tuple[list[int], list[float]]] = {one.id: ([], []) for one in asked}
        for delta in drive(loop, asked):
            told[delta.id][0].extend(delta.tokens)
            told[delta.id][1].extend(
                entry.logprob for entry in (*(delta.prompt_logprobs or ()), *(delta.logprobs or ()))
            )
        found.append(told)
        loop.close()
    for name, (tokens, logprobs) in found[0].items():
        others = found[1][name]
        if dtype == "float32":
            assert others[0] == tokens, name
            assert others[1] == pytest.approx(logprobs, abs=1e-3), name
        else:  # torch rounds hidden states, and the program does not, so that later tokens may differ
            count = len(prompt_of(int(name[-1]) % 4)) - 1 if name[-1].isdigit() else 0
            assert others[1][:count] == pytest.approx(logprobs[:count], abs=0.3), name
    assert len({tuple(tokens) for tokens, _ in found[1].values()}) >= len(asked) - 2


def test_ranks_of_native_programs_refuse_saved_modules(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, changes={"intermediate_size": 128})
    config = msgspec.json.decode((tmp_path / "config.json").read_bytes())
    for kind in ({"modules_to_save": ["lm_head"]}, {"trainable_token_indices": {"lm_head": [3]}}):
        saved = save_adapter(tmp_path / next(iter(kind)), config, seed=1, **kind)
        with pytest.raises(ModelFileError, match="replaces lm_head, which several ranks can't do"):
            engine(tmp_path, {"saved": saved}, attention_backend="native", **TWO_RANKS)


def called(loop: EngineLoop, method: str, **args: Any) -> Any:
    value = loop.call(NAME, method, args)
    while hasattr(value, "done") and not value.done():
        loop.step() if loop.busy else loop.idle()
    return value.result() if hasattr(value, "done") else value


def test_names_are_loaded_replaced_and_unloaded(
    model: Path, adapters: dict[str, Path], expected: Any, tmp_path: Path
) -> None:
    loop = engine(model, {}, lora_dir=str(adapters["a"].parent))

    call = partial(called, loop)

    def tokens(name: str) -> list[int]:
        return tokens_of(drive(loop, [asking("x", 1, (name, 1.0))]))["x", 0]

    with pytest.raises(InvalidRequestError, match="The model `mine` does not exist"):
        loop.add(asking("x", 1, ("mine", 1.0)))
    call("load", name="mine", path=str(adapters["a"]))
    assert tokens("mine") == expected(1, ("a", 1.0))
    with pytest.raises(InvalidRequestError, match="has already been loaded"):
        call("load", name="mine", path=str(adapters["b"]))
    call("load", name="mine", path=str(adapters["b"]), in_place=True)
    assert tokens("mine") == expected(1, ("b", 1.0))
    call("pin", name="mine", pinned=True)
    assert [(one["name"], one["state"], one["pinned"]) for one in call("list")["adapters"]] == [
        ("mine", "device", True)
    ]
    call("unload", name="mine")
    with pytest.raises(InvalidRequestError, match="The model `mine` does not exist"):
        loop.add(asking("x", 1, ("mine", 1.0)))
    assert call("find", name="../a") == call("find", name="absent") == {"adapter": None}
    assert call("find", name="c")["adapter"]["rank"] == 16
    assert tokens("c") == expected(1, ("c", 1.0))
    with pytest.raises(ModelFileError, match=r"has no adapter_config\.json"):
        call("load", name="odd", path=str(tmp_path))
    loop.close()


def test_a_file_that_is_gone_ends_the_requests_that_need_it_and_no_others(
    model: Path, adapters: dict[str, Path], expected: Any, tmp_path: Path
) -> None:
    config = msgspec.json.decode((model / "config.json").read_bytes())
    mine = save_adapter(tmp_path / "mine", config, seed=0, rank=4)
    loop = engine(model, {**adapters, "mine": mine})
    weights = mine / "adapter_model.safetensors"
    weights.rename(tmp_path / "away")
    ends = {
        delta.id: delta
        for delta in drive(loop, [asking("bad", 1, ("mine", 1.0)), asking("good", 1, ("a", 1.0))])
        if delta.finish is not None
    }
    assert ends["bad"].finish is FinishReason.ERROR
    assert "adapter_model.safetensors" in (ends["bad"].error or "")
    assert ends["good"].finish is FinishReason.LENGTH
    (tmp_path / "away").rename(weights)
    assert tokens_of(drive(loop, [asking("x", 1, ("mine", 1.0))]))["x", 0] == expected(1, ("a", 1.0))
    loop.close()


def swap(folder: Path, other: Path) -> None:
    """Put other files in place of an adapter's."""
    for file in other.iterdir():
        copy = folder / f"{file.name}.new"
        copy.write_bytes(file.read_bytes())
        copy.replace(folder / file.name)


def test_prefixes_are_those_of_the_files_that_are_read_now(
    model: Path, adapters: dict[str, Path], expected: Any, tmp_path: Path
) -> None:
    """Keys and values that former files of a name computed are not found; those of the same files are, after an
    eviction, too."""
    config = msgspec.json.decode((model / "config.json").read_bytes())
    names = ("a", "other")
    made = {name: save_adapter(tmp_path / name, config, seed=i, rank=4) for i, name in enumerate(names)}
    mine = save_adapter(tmp_path / "mine", config, seed=0, rank=4)
    loop = engine(model, {**adapters, "mine": mine}, max_loras=1, max_cpu_loras=1)
    fresh = engine(model, made)
    long = [(5 * place) % 199 for place in range(40)]

    def ask(loop: EngineLoop, name: str) -> tuple[list[int], int]:
        request = msgspec.structs.replace(asking("x", 3, (name, 1.0)), tokens=long)
        news = list(drive(loop, [request]))
        return tokens_of(news)["x", 0], max(delta.num_cached for delta in news)

    right = {name: ask(fresh, name)[0] for name in names}
    assert right["a"] != right["other"]
    assert ask(loop, "mine") == (right["a"], 0)
    found, shared = ask(loop, "mine")
    assert (found, shared > 16) == (right["a"], True)
    ask(loop, "b")  # evicts it
    assert ask(loop, "mine") == (right["a"], shared)
    ask(loop, "b")
    swap(mine, made["other"])
    assert ask(loop, "mine") == (right["other"], 0)
    assert ask(loop, "mine") == (right["other"], shared)
    swap(mine, made["a"])
    called(loop, "load", name="mine", path=str(mine), in_place=True)
    assert ask(loop, "mine") == (right["a"], 0)
    loop.close()
    fresh.close()


def test_a_prompts_log_probabilities_are_those_of_its_own_adapter(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Those of a head's adapter, for prompts that share a step with another row, in chunks."""
    config = msgspec.json.decode((model / "config.json").read_bytes())
    head = save_adapter(tmp_path / "head", config, seed=5, rank=4, targets=("lm_head",))
    (tmp_path / "merged").mkdir()
    save_file(merged(load_file(model / "model.safetensors"), head), tmp_path / "merged" / "model.safetensors")
    (tmp_path / "merged" / "config.json").write_bytes((model / "config.json").read_bytes())
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, prompt_logprobs=0)

    def reported(loop: EngineLoop, *asked: GenerateRequest) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {one.id: [] for one in asked}
        for delta in drive(loop, asked):
            found[delta.id] += [entry.logprob for entry in delta.prompt_logprobs or ()]
        loop.close()
        return found

    def request(name: str, *parts: tuple[str, float]) -> GenerateRequest:
        return msgspec.structs.replace(asking(name, 3, *parts), tokens=[*range(1, 14)] * 3, params=params)

    limits = {"max_num_batched_tokens": 24}
    found = reported(engine(model, {"head": head}, **limits), request("with", ("head", 1.0)), request("without"))
    plain = reported(engine(model, {}, **limits), request("without"))
    changed = reported(engine(tmp_path / "merged", {}, **limits), request("with"))
    assert found["with"] == pytest.approx(changed["with"], abs=1e-4)
    assert found["without"] == pytest.approx(plain["without"], abs=1e-4)
    assert found["with"] != pytest.approx(found["without"], abs=1e-2)


@pytest.mark.slow
def test_recurrent_layers_on_two_ranks(tmp_path: Path) -> None:
    """A rank has several ranges of the rows of their first projection, with magnitudes, too."""
    kind: dict[str, Any] = {"architectures": ["BambaForCausalLM"], "model_type": "any", "attn_layer_indices": [1]}
    kind |= {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
    adapters = {}
    for seed, name in enumerate("ab"):
        made, folder = torch.Generator().manual_seed(seed), tmp_path / name
        stated = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ["in_proj", "out_proj"]}
        tensors = {}
        for module, (outputs, inputs) in {"in_proj": (296, 64), "out_proj": (64, 128)}.items():
            path = f"base_model.model.model.layers.0.mamba.{module}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(4, inputs, generator=made)
            tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, 4, generator=made)
            if name == "b":
                tensors[f"{path}.lora_magnitude_vector"] = torch.rand(outputs, generator=made) + 0.5
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(stated | {"use_dora": name == "b"}))
        save_file(tensors, folder / "adapter_model.safetensors")
        adapters[name] = folder
    asked = [asking("base", 2), asking("a", 2, ("a", 1.0)), asking("b", 2, ("b", 1.0))]
    found = []
    for ranks in ({}, TWO_RANKS):
        given = {"lora_modules": tuple(f"{name}={path}" for name, path in adapters.items()), "max_model_len": 128}
        files = toy_files(LLAMA | kind | {"initializer_range": 0.3})
        loop = build_core(tiny_config(max_num_seqs=4, **given, **ranks), files)[0]
        found.append(tokens_of(drive(loop, asked)))
        loop.close()
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0].values()}) == 3
