from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from toy_gguf import write_gguf

from octavo.config import ModelConfig
from octavo.core.errors import ModelFileError, ModelNotFoundError
from octavo.hub.catalogue import CATALOGUE
from octavo.hub.files import ModelFiles
from octavo.hub.resolve import eos_token_ids, resolve
from octavo.text.sources import tokenizer_files


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may ask the real hub, whatever the code does."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"w": np.ones(3, dtype=np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "eos_token_id": 2}')
    return tmp_path


def test_catalogue_name(smollm2_files: ModelFiles) -> None:
    assert smollm2_files.name == "smollm2"
    assert smollm2_files.format == "gguf"
    assert smollm2_files.weights == (smollm2_files.path,)
    assert smollm2_files.path.stat().st_size == CATALOGUE["smollm2"].num_bytes
    assert eos_token_ids(smollm2_files) == [2, 0]
    assert smollm2_files.generation_config == {
        "eos_token_id": [2, 0],
        "temperature": 0.2,
        "top_p": 0.9,
        "repetition_detection": {"max_pattern_size": 128, "min_count": 4, "min_tokens": 256},
    }


def test_what_the_catalogue_recommends_is_not_said_of_the_same_file_under_its_path(smollm2_files: ModelFiles) -> None:
    assert resolve(str(smollm2_files.path)).generation_config == {"eos_token_id": [2, 0]}


def test_folder(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "eos_token_id": [5, 2]}')
    files = resolve(str(folder))
    assert (files.name, files.path, files.format) == (str(folder), folder, "safetensors")
    assert files.weights == (folder / "model.safetensors",)
    assert files.config["architectures"] == ["LlamaForCausalLM"]
    assert files.generation_config["temperature"] == 0.7
    assert eos_token_ids(files) == [5, 2]


def test_without_an_end_token_in_the_configs_the_tokenizers_end_mark_ends_answers(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "eos_token_id": null}')
    assert eos_token_ids(resolve(str(folder))) == []
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    for content, number in (
        ({"added_tokens": [{"id": 7, "content": "<end>"}], "model": {"vocab": {"<end>": 6}}}, 7),
        ({"model": {"vocab": {"a": 0, "<end>": 6}}}, 6),
        ({"model": {"vocab": [["a", 0.0], ["<end>", -1.5]]}}, 1),
    ):
        (folder / "tokenizer.json").write_text(json.dumps(content))
        assert eos_token_ids(resolve(str(folder))) == [number]
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "eos_token_id": 2}')
    assert eos_token_ids(resolve(str(folder))) == [2]


def test_the_tokenizers_end_mark_ends_answers_beside_those_of_the_configs(folder: Path) -> None:
    """Fine-tuned models often keep the base model's configs."""
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "eos_token_id": 2}')
    decoder = {"2": {"content": "</s>"}, "9": {"content": "<|im_end|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "added_tokens_decoder": decoder})
    )
    assert eos_token_ids(resolve(str(folder))) == [2, 9]


@pytest.mark.parametrize(
    ("name", "content", "method"),
    [
        ("hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "FP8", "bits": 4}}, "modelopt"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "gptq"),
        ("quant_config.json", {"bits": 4, "version": "GEMM"}, "awq"),
    ],
)
def test_settings_of_quantization_beside_the_config(
    name: str, content: dict[str, object], method: str, folder: Path
) -> None:
    (folder / name).write_text(json.dumps(content))
    settings = resolve(str(folder)).config["quantization_config"]
    assert (settings["quant_method"], settings["bits"]) == (method, 4)
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "hqq"}}')
    assert resolve(str(folder)).config["quantization_config"] == {"quant_method": "hqq"}


def test_gguf_file_and_folder_with_one(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "toy.gguf")
    for name in (path, tmp_path):
        files = resolve(str(name))
        assert (files.path, files.format, files.weights) == (path, "gguf", (path,))
        assert files.config["hidden_size"] == 32


def test_the_tokenizer_of_an_unknown_architecture_is_still_a_tokenizer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "toy.gguf", arch="rwkv7")
    with pytest.raises(ModelFileError, match="rwkv7"):
        resolve(str(path))
    assert resolve(str(path), tokenizer_only=True).path == path


def test_folder_with_several_gguf_files(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(ModelFileError, match=r"2 \.gguf files: a\.gguf, b\.gguf"):
        resolve(str(tmp_path))


def test_config_alone_will_do_for_random_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert resolve(str(folder), weights=False).weights == ()
    with pytest.raises(ModelFileError, match=r"no weights.*--load-format dummy"):
        resolve(str(folder))


def test_weights_of_another_form_are_pointed_out(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(
        ModelFileError, match=r"pytorch_model\.bin, which Octavo does not read.*pickle.*run code.*safetensors"
    ):
        resolve(str(folder))


def test_tokenizer_alone(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no tokenizer"):
        resolve(str(tmp_path), tokenizer_only=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve(str(tmp_path), tokenizer_only=True).path == tmp_path
    with pytest.raises(ModelFileError, match=r"neither config\.json nor a \.gguf"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[1]", "\ufffd"])
def test_an_invalid_config_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"config\.json"):
        resolve(str(folder))


def test_corrupt_files_are_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"12345")
    with pytest.raises(ModelFileError, match=r"model\.safetensors is corrupt or truncated"):
        resolve(str(folder))
    (folder / "x.gguf").write_bytes(b"GGUF\x03")
    with pytest.raises(ModelFileError, match=r"x\.gguf is corrupt or truncated"):
        resolve(str(folder / "x.gguf"))


def test_files_that_are_no_models(folder: Path) -> None:
    with pytest.raises(ModelFileError, match="Give its folder"):
        resolve(str(folder / "model.safetensors"))
    with pytest.raises(ModelFileError, match="is not a model file"):
        resolve(str(folder / "config.json"))


@pytest.mark.parametrize("name", ["./none", "/none/x", "~/none", "a/b/c", "none.gguf", "none/", ".\\none"])
def test_a_name_that_looks_like_a_path_gives_a_path_error(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"There is no file or folder"):
        resolve(name)


def test_a_typing_error_is_answered_with_the_name_that_was_meant() -> None:
    with pytest.raises(ModelNotFoundError, match=r"Did you mean 'smollm2'\?"):
        resolve("smolm2")


@pytest.mark.parametrize("name", ["owner/name", "gpt2"])
def test_offline_says_what_was_asked_and_how_to_get_it(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(name)
    text = str(caught.value)
    for part in (repr(name), "the catalogue (smollm2", "HF_HUB_OFFLINE is set", "HF_HOME", "folder or .gguf file"):
        assert part in text


RESOLVE = """
from octavo.hub import repository
from octavo.hub.resolve import resolve
repository._LOOKUP_TIMEOUT_S = 0.2
resolve("owner/name")
"""


def resolve_elsewhere(endpoint: str, home: Path) -> str:
    """The last line of a process's complaint; its own process, since the hub's library reads its settings once."""
    environment = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "NO_PROXY": "*",
        "PATH": "",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    command = [sys.executable, "-c", RESOLVE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    return done.stderr.strip().splitlines()[-1]


def check_unreachable(complaint: str, home: Path) -> None:
    assert complaint.startswith("octavo.core.errors.ModelNotFoundError")
    for part in ("can't be reached", "check the network", "HF_HOME", str(home)):
        assert part in complaint


def test_a_hub_that_refuses_connections(tmp_path: Path) -> None:
    check_unreachable(resolve_elsewhere("http://127.0.0.1:9", tmp_path), tmp_path)


def test_a_hub_that_never_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_unreachable(resolve_elsewhere(f"http://127.0.0.1:{port}", tmp_path), tmp_path)


def test_a_downloaded_model_is_used_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    save_file({"w": np.ones(3, dtype=np.float32)}, snapshot / "model.safetensors")
    files = resolve("owner/name")
    assert files.name == "owner/name"
    assert files.weights == (snapshot / "model.safetensors",)


def downloaded(cache: Path, revision: str, text: str) -> None:
    """A repository as the hub's library keeps it, with a tokenizer alone."""
    commit = revision.encode().hex().ljust(40, "0")
    snapshot = cache / "models--owner--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (cache / "models--owner--name" / "refs").mkdir(exist_ok=True)
    (cache / "models--owner--name" / "refs" / revision).write_text(commit)
    (snapshot / "tokenizer.json").write_text(text)


def test_a_revision_of_what_has_none_is_refused(folder: Path) -> None:
    for name, why in (("smollm2", "it is in the catalogue"), (str(folder), f"it is {folder}")):
        with pytest.raises(ModelNotFoundError, match=f"has no revision 'v2': {why}"):
            resolve(name, revision="v2")
    assert resolve(str(folder), revision="main").path == folder


def test_a_folder_for_downloads_and_another_revision_of_the_tokenizer(tmp_path: Path) -> None:
    downloaded(tmp_path, "main", "{}")
    downloaded(tmp_path, "v2", '{"two": 2}')
    model = ModelFiles(name="owner/name", path=tmp_path / "elsewhere", format="safetensors", weights=(), config={})

    def tokenizer(**settings: str) -> Path:
        config = ModelConfig(model="owner/name", download_dir=str(tmp_path), **settings)  # type: ignore[arg-type]
        return tokenizer_files(config, model).path

    assert tokenizer() == model.path
    assert tokenizer(tokenizer_revision="v2", revision="v2") == model.path
    assert (tokenizer(tokenizer_revision="v2") / "tokenizer.json").read_text() == '{"two": 2}'
    assert (tokenizer(tokenizer="owner/name") / "tokenizer.json").read_text() == "{}"
    with pytest.raises(ModelNotFoundError, match=f"{tmp_path}: name another one"):
        resolve("owner/other", download_dir=str(tmp_path))


@pytest.mark.parametrize("name", ["we ird", "", "a..b/c", "-x/y", "x" * 300, "x\0y", "~nobody-here/x"])
def test_names_of_no_form(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve(name)
