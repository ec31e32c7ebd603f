"""GGUF files that `octavo quantize` writes: their tensors, keys and tokenizers, beside llama.cpp's own decoding."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import toy_tokenizers
from gguf_kit import gguf_files, write_model
from tiny import make_checkpoint, model_files

from octavo import LLM, SamplingParams
from octavo.cli.main import main
from octavo.core.errors import ConfigError
from octavo.hub.gguf_config import generation_config, model_config
from octavo.hub.gguf_file import read_gguf
from octavo.models.load import open_checkpoint
from octavo.models.load.arranged import arranged
from octavo.models.registry import spec_of
from octavo.models.save.gguf import STORAGES, write_gguf
from octavo.nn.weights import TensorSpec
from octavo.text.tokenizers.gguf import build_backend
from octavo.text.tokenizers.gguf_keys import tokenizer_keys

TEXT = "def f(x): return x + 41  # the dog's <tool> Grüße"
CHAT = "{{ messages[0].content }}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    make_checkpoint("quantized", folder, {"vocab_size": 470})  # a few rows more than the tokenizer has tokens
    toy_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("scheme", STORAGES)
def test_matrices_are_rounded_as_llama_cpp_does(scheme: str, source: Path, tmp_path: Path) -> None:
    storage, files = STORAGES[scheme], model_files(source)
    steps: list[tuple[int, int]] = []
    path = tmp_path / "model.gguf"
    written = write_gguf(files, storage, path, progress=lambda phase, done, total: steps.append((done, total)))
    assert steps[-1][0] == steps[-1][1] == written.before
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert stored["blk.1.ffn_down.weight"].tensor_type is storage.kind
    assert stored["output.weight"].tensor_type is stored["token_embd.weight"].tensor_type is storage.outer
    assert stored["blk.0.attn_norm.weight"].tensor_type is gguf.GGMLQuantizationType.F32
    read = gguf_files(path)
    view, original = arranged(open_checkpoint(read), spec_of(read.config)), open_checkpoint(files)
    assert view.names() == original.names()
    for name in original.names():
        spec = TensorSpec(original.shape(name) or (), torch.float32)
        values, found = original.tensor(name, spec).float().numpy(), view.tensor(name, spec).float().numpy()
        if values.ndim == 2:
            kind = storage.outer if "embed" in name or "head" in name else storage.kind
            values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind).astype(np.float32)
        np.testing.assert_array_equal(found, values)


def test_the_configuration_is_the_source_s(tmp_path: Path) -> None:
    for family in ("quantized", "llama-llama3-rope", "llama-yarn-rope", "qwen2", "qwen3"):
        folder = tmp_path / family
        make_checkpoint(family, folder)
        write_gguf(model_files(folder), STORAGES["gguf-f16"], folder / "model.gguf")
        expected, found = spec_of(model_files(folder).config), spec_of(model_config(read_gguf(folder / "model.gguf")))
        for field in ("hidden_size", "num_layers", "num_heads", "head_dim", "vocab_size", "tied", "norm", "mlps"):
            assert getattr(found, field) == getattr(expected, field), (family, field)
        if family != "llama-llama3-rope":  # recovered from its divisors
            assert found.rope == expected.rope, family


_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("more", [{"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 1.25}])
def test_numbers_of_yarn_are_written(tmp_path: Path, more: dict[str, float]) -> None:
    make_checkpoint("llama", tmp_path, {"rope_parameters": _YARN | more})
    write_gguf(model_files(tmp_path), STORAGES["gguf-f16"], tmp_path / "model.gguf")
    expected, found = spec_of(model_files(tmp_path).config), spec_of(model_config(read_gguf(tmp_path / "model.gguf")))
    assert found.rope == expected.rope


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mistral", {"sliding_window": 7}, "a sliding window of 7 tokens"),
        ("llama", {"hidden_act": "gelu"}, "the activation gelu"),
        ("llama", {"rope_parameters": _YARN | {"truncate": False}}, "YaRN whose frequencies are not rounded"),
    ],
)
def test_what_the_format_has_no_key_for_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    make_checkpoint(family, tmp_path, changes)
    with pytest.raises(ConfigError, match=rf"The model has {message}, for which .* --scheme"):
        write_gguf(model_files(tmp_path), STORAGES["gguf-f16"], tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_ends_and_sampling_of_answers_are_written(source: Path, tmp_path: Path) -> None:
    """The file names the tokenizer's end mark, and one after the other those that a reader does not know by itself."""
    keys = tokenizer_keys(source, 470)
    answers = {"eos_token_id": [2, 9, 7], "temperature": 0.6, "top_k": 20, "repetition_penalty": 1}
    files = dataclasses.replace(model_files(source), generation_config=answers)
    write_gguf(files, STORAGES["gguf-q8_0"], tmp_path / "a.gguf", tokenizer=keys)
    assert generation_config(read_gguf(tmp_path / "a.gguf")) == answers
    many = dataclasses.replace(files, generation_config={"eos_token_id": [2, 9, 7, 8]})
    with pytest.raises(ConfigError, match=r"3 further tokens that end answers \(9, 7, 8\)"):
        write_gguf(many, STORAGES["gguf-q8_0"], tmp_path / "b.gguf", tokenizer=keys)


def test_the_tokenizer_is_the_source_s(source: Path, tmp_path: Path) -> None:
    keys = tokenizer_keys(source, 470)
    path = tmp_path / "model.gguf"
    write_gguf(model_files(source), STORAGES["gguf-q8_0"], path, tokenizer=keys)
    file, theirs = read_gguf(path), toy_tokenizers.byte_level()
    backend = build_backend(file)
    assert backend.encode(TEXT).ids == theirs.encode(TEXT).ids
    assert backend.decode(theirs.encode(TEXT).ids) == theirs.decode(theirs.encode(TEXT).ids)
    assert file.metadata["tokenizer.ggml.tokens"][-1] == "[PAD469]"
    assert (file.metadata["tokenizer.ggml.pre"], file.metadata["tokenizer.chat_template"]) == ("gpt-2", CHAT)
    assert [file.metadata[f"tokenizer.ggml.{short}_token_id"] for short in ("bos", "eos")] == [1, 2]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is False


def test_a_file_is_quantized_again_with_its_keys(source: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    write_gguf(model_files(source), STORAGES["gguf-f16"], first, tokenizer=tokenizer_keys(source, 470))
    write_gguf(gguf_files(first), STORAGES["gguf-q4_0"], second)
    direct = tmp_path / "direct.gguf"
    halves = make_checkpoint("quantized", tmp_path / "again", {"vocab_size": 470}).half().float()
    write_model(direct, halves, "llama")
    before, after = read_gguf(first), read_gguf(second)
    changed = {key for key in before.metadata if before.metadata[key] != after.metadata[key]}
    assert changed == {"general.file_type"}
    assert before.metadata.keys() == after.metadata.keys()
    read, reference = gguf_files(second), open_checkpoint(gguf_files(direct))
    name, kind = "blk.0.ffn_up.weight", STORAGES["gguf-q4_0"].kind
    spec = TensorSpec((128, 64), torch.float32)
    expected = gguf.quants.quantize(reference.tensor(name, spec).numpy(), kind)
    np.testing.assert_array_equal(
        open_checkpoint(read).tensor(name, spec).numpy(), gguf.quants.dequantize(expected, kind)
    )


def test_the_command_writes_a_file_that_is_served(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "model.gguf"
    assert main(["quantize", str(source), "--scheme", "gguf-q8_0", "-o", str(path), "--no-eval"]) == 0
    assert "matrices in gguf-q8_0" in capsys.readouterr().err
    with LLM(str(path), kv_cache_memory_bytes=1 << 20, threads=1) as llm:
        assert llm.generate("The dog", SamplingParams(max_tokens=2, temperature=0))[0].outputs[0].token_ids


def test_what_can_not_be_written(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["quantize", str(source), "--scheme", "gguf-q4_0", "--no-eval", "-o"]
    assert main([*command, str(tmp_path / "folder")]) == 1
    assert "Name it with the end .gguf" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "a.gguf"), "--ignore", "x"]) == 1
    assert "no effect on gguf-q4_0" in capsys.readouterr().err
    (tmp_path / "there.gguf").touch()
    with pytest.raises(ConfigError, match="exists"):
        write_gguf(model_files(source), STORAGES["gguf-q4_0"], tmp_path / "there.gguf")
    make_checkpoint("bloom", tmp_path / "bloom")
    with pytest.raises(ConfigError, match=r"not of BloomForCausalLM.*convert_hf_to_gguf"):
        write_gguf(model_files(tmp_path / "bloom"), STORAGES["gguf-q4_0"], tmp_path / "a.gguf")
    toy_tokenizers.sentencepiece().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"BPE over pieces.*convert_hf_to_gguf"):
        tokenizer_keys(tmp_path, 10)
    with pytest.raises(ConfigError, match=r"has no tokenizer.json"):
        tokenizer_keys(tmp_path / "bloom", 10)
    odd = toy_tokenizers.byte_level()
    odd.normalizer = toy_tokenizers.normalizers.Lowercase()
    odd.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"cuts texts by rules"):
        tokenizer_keys(tmp_path, 10)
