"""Other weights for a model that is loaded: afterwards it is the model that a fresh engine makes of them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_tokenizers
import transformers
from safetensors.torch import load_file, save_file
from tiny import load_model, model_files
from toy_models import behind

from octavo import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from octavo.core.errors import EngineStateError, InvalidRequestError, UnsupportedError
from octavo.models.load.weights import replace_weights, weight_layers
from octavo.nn.attention.reference import ReferenceAttention
from octavo.worker.sleep import tensors_of

FINAL = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8] * 9}, {"prompt_token_ids": [9, 10]}]
SETTINGS: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 4, "threads": 1}


def checkpoint(folder: Path, seed: int, **changes: Any) -> Path:
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 464,
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
            "tie_word_embeddings": False,
            **changes,
        }
    )
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    toy_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {name: checkpoint(root / name, seed) for seed, name in enumerate(("first", "second"))}
    made |= {f"tied {n}": checkpoint(root / f"tied {n}", n, tie_word_embeddings=True) for n in (1, 2)}
    return made | {"deeper": checkpoint(root / "deeper", 0, num_hidden_layers=3)}


def tokens(llm: LLM, prompts: list[Any] = PROMPTS, length: int = 10) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)]


def fresh(model: Path, prompts: list[Any] = PROMPTS, length: int = 10, **settings: Any) -> list[list[int]]:
    with LLM(str(model), **SETTINGS, **settings) as llm:
        return tokens(llm, prompts, length)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(("old", "new"), [("first", "second"), ("tied 1", "tied 2")])
def test_the_model_is_the_other_one_afterwards(models: dict[str, Path], old: str, new: str, backend: str) -> None:
    settings = {"attention_backend": backend, "device": "cpu"}
    before, after = fresh(models[old], **settings), fresh(models[new], **settings)
    with LLM(str(models[old]), **SETTINGS, **settings) as llm:
        assert tokens(llm) == before != after
        assert llm.stats().weight_version == "default"
        llm.update_weights_from_disk(str(models[new]), weight_version="two")
        assert tokens(llm) == after
        assert llm.stats().weight_version == "two"
        llm.update_weights_from_disk(str(models[old]))
        assert tokens(llm) == before
        assert llm.stats().weight_version == "update-2"


@pytest.mark.parametrize(
    ("old", "new"), [("first", "second"), pytest.param("tied 1", "tied 2", marks=pytest.mark.slow)]
)
def test_and_so_it_is_on_a_device_behind_its_host(
    models: dict[str, Path], old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    before, after = (fresh(models[name], length=4, device="cpu") for name in (old, new))
    with LLM(str(models[old]), **SETTINGS, dtype="float32", **behind(monkeypatch)) as llm:
        for model, expected in (old, before), (new, after), (old, before):
            llm.update_weights_from_disk(str(models[model]))
            assert tokens(llm, length=4) == expected


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("names", [("first", "second"), ("tied 1", "tied 2")])
def test_weights_stay_where_recorded_graphs_read_them(
    models: dict[str, Path], names: tuple[str, str], in_place: bool
) -> None:
    model, other = (load_model(model_files(models[name]), ReferenceAttention()) for name in names)
    weights = [list(tensors_of(layer)) for layer in weight_layers(other)]
    before = [[(tensor.data_ptr(), tensor.clone()) for tensor in tensors_of(layer)] for layer in weight_layers(model)]
    replace_weights(model, other, in_place=in_place)
    for layer, wanted, old in zip(weight_layers(model), weights, before, strict=True):
        found = list(tensors_of(layer))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        places = [tensor.data_ptr() for tensor in found]
        assert (places == [place for place, _ in old]) is in_place
    assert any(not torch.equal(tensor, weights[0][0]) for _, tensor in before[0])


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_what_runs_goes_on_with_the_new_weights(models: dict[str, Path], backend: str) -> None:
    settings = {"attention_backend": backend, "device": "cpu"}
    prompt = PROMPTS[0]["prompt_token_ids"]
    with LLM(str(models["first"]), **SETTINGS, **settings) as llm:
        stream = stream_of(llm, prompt)
        begun = [next(stream) for _ in range(5)]
        llm.update_weights_from_disk(str(models["second"]))
        rest = list(stream)
        aborted = stream_of(llm, prompt)
        next(aborted)
        llm.update_weights_from_disk(str(models["first"]), abort_all_requests=True)
        assert list(aborted) == []
        kept = stream_of(llm, prompt)
        mixed = [next(kept) for _ in range(5)]
        llm.update_weights_from_disk(str(models["second"]), flush_cache=False)
        mixed += list(kept)
    assert begun == fresh(models["first"], **settings)[0][:5]
    [expected] = fresh(models["second"], [{"prompt_token_ids": prompt + begun}], 5, **settings)
    assert rest == expected
    assert mixed[:5] == begun
    assert len(mixed) == 10


def stream_of(llm: LLM, prompt: list[int]) -> Iterator[int]:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    for output in llm.stream({"prompt_token_ids": prompt}, params):
        yield from output.outputs[0].token_ids


def test_what_is_refused_changes_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(models["second"] / "model.safetensors")
    fewer = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    bad = {
        "num_layers 3": models["deeper"],
        "of a qwen2 model": broken(
            models["second"], tmp_path / "kind", tensors, model_type="qwen2", architectures=["Qwen2ForCausalLM"]
        ),
        "needs tensor model.norm.weight": broken(models["second"], tmp_path / "a", fewer),
        "has shape": broken(models["second"], tmp_path / "b", tensors | {"model.norm.weight": torch.ones(63)}),
        "a folder or a .gguf file": tmp_path / "nowhere",
    }
    whole = (models["second"] / "model.safetensors").read_bytes()
    cut = broken(models["second"], tmp_path / "cut", tensors)
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    bad["corrupt or truncated"] = cut
    with LLM(str(models["first"]), **SETTINGS) as llm:
        before = tokens(llm)
        for message, path in bad.items():
            with pytest.raises(InvalidRequestError, match=message):
                llm.update_weights_from_disk(str(path))
            assert tokens(llm) == before
        with pytest.raises(InvalidRequestError, match="load_format"):
            llm.update_weights_from_disk(str(models["second"]), "pickle")
        assert llm.stats().weight_version == "default"
        assert not llm.stats().paused


def broken(model: Path, folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    shutil.copytree(model, folder)
    save_file(tensors, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | config))
    return folder


def test_tensors_that_are_sent_piece_by_piece(models: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(models["second"] / "model.safetensors")
    names = sorted(tensors)
    with LLM(str(models["first"]), enable_sleep_mode=True, **SETTINGS) as llm:
        before = tokens(llm)
        with pytest.raises(EngineStateError, match="start_weight_update"):
            llm.update_weights({"update_info": {"path": str(tmp_path)}})
        llm.init_weight_transfer_engine({"init_info": {}})
        llm.start_weight_update()
        for number, part in enumerate((names[:7], names[7:])):
            file = tmp_path / f"{number}.safetensors"
            save_file({name: tensors[name] for name in part}, file)
            llm.update_weights({"update_info": {"path": str(file)}})
            file.write_bytes(b"")
            if number == 0:
                assert tokens(llm) == before
        llm.finish_weight_update("sent")
        assert tokens(llm) == fresh(models["second"])
        assert llm.stats().weight_version == "sent"
        llm.sleep(2)
        with pytest.raises(EngineStateError, match="holds no weights"):
            llm.update_weights_from_disk(str(models["second"]))
        llm.wake_up()
        assert (tokens(llm), llm.stats().weight_version) == (before, "default")  # tensors are on no disk

        llm.start_weight_update()
        llm.update_weights({"update_info": {"tensors": [(name, tensors[name]) for name in names[1:]]}})
        with pytest.raises(InvalidRequestError, match=f"needs tensor {names[0]}"):
            llm.finish_weight_update()
        with pytest.raises(EngineStateError, match="start_weight_update"):
            llm.finish_weight_update()
        assert tokens(llm) == before
        llm.start_weight_update()
        with pytest.raises(UnsupportedError, match="NCCL"):
            llm.update_weights({"update_info": {"names": ["a"], "ipc_handles_pickled": "x"}})
        with pytest.raises(UnsupportedError, match="init_info"):
            llm.init_weight_transfer_engine({"init_info": {"master_port": 1}})


def test_a_server_process_takes_other_weights_while_requests_run(models: dict[str, Path]) -> None:
    async def story() -> None:
        async with await AsyncLLM.start(str(models["first"]), **SETTINGS) as llm:
            prompt = PROMPTS[0]["prompt_token_ids"]
            long = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
            stream = llm.generate(PROMPTS[0], long)
            await anext(stream)
            update = asyncio.create_task(llm.update_weights_from_disk(str(models["second"]), weight_version="two"))
            outputs = [output async for output in stream]
            await update
            assert len(outputs[-1].outputs[0].token_ids) == 80
            [final] = [one async for one in llm.generate({"prompt_token_ids": prompt}, FINAL)]
            assert list(final.outputs[0].token_ids) == fresh(models["second"])[0]
            assert await llm.get_weight_version() == "two"
            assert await llm.collective_rpc("get_weight_version") == ["two"]
            with pytest.raises(InvalidRequestError, match="num_layers 3") as refused:
                await llm.update_weights_from_disk(str(models["deeper"]))
            assert str(refused.value)
            await llm.pause_generation(mode="keep")
            await llm.start_weight_update()
            await llm.update_weights({"update_info": {"path": str(models["first"])}})
            await llm.finish_weight_update()
            assert await llm.is_paused()
            await llm.resume_generation()
            [final] = [one async for one in llm.generate({"prompt_token_ids": prompt}, FINAL)]
            assert list(final.outputs[0].token_ids) == fresh(models["first"])[0]

    asyncio.run(story())


def test_programs_reach_into_the_worker(models: dict[str, Path]) -> None:
    tensors = load_file(models["second"] / "model.safetensors")
    with LLM(str(models["first"]), attention_backend="torch", device="cpu", **SETTINGS) as llm:
        before = tokens(llm)
        assert llm.collective_rpc(lambda worker, more: worker.spec.num_layers + more, args=(1,)) == [3]
        assert llm.apply_model(lambda model: model.spec.vocab_size) == [464]
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors.items(), "weight_version": "two"})
        assert llm.collective_rpc("get_weight_version") == ["two"]
        assert tokens(llm) == fresh(models["second"], attention_backend="torch", device="cpu")
        assert llm.collective_rpc("reload_weights") == [None]
        assert tokens(llm) == before
        with pytest.raises(InvalidRequestError, match="one of check_health"):
            llm.collective_rpc("sleep")
        with pytest.raises(UnsupportedError, match="timeout"):
            llm.collective_rpc("check_health", timeout=3)
