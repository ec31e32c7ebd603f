"""`octavo quantize` and `octavo eval`, on a tiny model and against Transformers."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import toy_tokenizers
from gguf_kit import write_model
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint, model_files

from octavo.cli.main import main
from octavo.core.errors import ConfigError
from octavo.models.load import open_checkpoint
from octavo.models.load.quantized.integers import unpack
from octavo.models.save import folder as saved
from octavo.models.save.folder import quantize
from octavo.models.save.places import new_place
from octavo.models.save.rounding import ROUNDINGS, pack
from octavo.nn.weights import TensorSpec

TEXT = "The river rose above the lower steps of the quay, and they counted the steps that were left."
WEIGHTS = "model.safetensors"
SMALL = ["--kv-cache-memory-bytes", "1M", "--threads", "1"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    make_checkpoint("quantized", folder, {"vocab_size": 464})
    toy_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", ROUNDINGS)
def test_weights_are_the_nearest_of_their_grid(name: str, source: Path, tmp_path: Path) -> None:
    scheme, original = ROUNDINGS[name], load_file(source / WEIGHTS)
    written = quantize(model_files(source), scheme, tmp_path / "out", dtype=torch.float16)
    assert written.matrices == 14
    assert written.group_size == (64 if scheme.grouped else 0)
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir() if path.name in ("config.json", WEIGHTS)}
    assert len(modes) == 1, "not all files can be read by the same users"
    read = open_checkpoint(model_files(tmp_path / "out"))
    assert read.names() == original.keys()
    for key, weight in original.items():
        found = read.tensor(key, TensorSpec(tuple(weight.shape), torch.float32)).float()
        if not key.endswith("_proj.weight"):
            torch.testing.assert_close(found, weight, rtol=1e-3, atol=1e-3)
            continue
        grid, values = (part.view(-1, 64) if scheme.grouped else part for part in (weight, found))
        largest = grid.abs().amax(1, keepdim=True)
        # Half a step: of integers, or of E4M3 with its 3 bits after the leading one. Scales are in float16.
        half_step = grid.abs() / 16 if scheme.floats else largest / ((1 << scheme.bits) - 1)
        assert bool(((values - grid).abs() <= half_step + largest * 2e-3).all())


def test_weights_are_rounded_once(source: Path, tmp_path: Path) -> None:
    """Those of a checkpoint in float32 or float16 are not rounded to the scales' dtype before."""
    quantize(model_files(source), ROUNDINGS["int8"], tmp_path / "out", dtype=torch.bfloat16)
    original, written = load_file(source / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    name = "model.layers.0.mlp.down_proj.weight"
    assert original[name].dtype == torch.float32
    scales = written[f"{name}_scale"]
    assert scales.dtype == torch.bfloat16
    assert torch.equal(written[name], (original[name] / scales.float()).round().clamp(-128, 127).to(torch.int8))


def test_words_are_completed_where_inputs_do_not_fill_them() -> None:
    integers = torch.randint(0, 256, (3, 7), dtype=torch.int32)
    assert torch.equal(unpack(pack(integers, 8), 8, 7).int(), integers)


def test_a_large_model_is_written_in_several_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "_SHARD_BYTES", 20_000)
    steps: list[tuple[int, int]] = []
    out = tmp_path / "out"
    quantize(
        model_files(source), ROUNDINGS["fp8"], out, progress=lambda phase, done, total: steps.append((done, total))
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    for name, file in index["weight_map"].items():
        assert name in load_file(out / file)
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]


def test_a_gguf_file_is_written_with_the_names_that_others_read(source: Path, tmp_path: Path) -> None:
    theirs = make_checkpoint("quantized", tmp_path / "again", {"vocab_size": 464})
    answers = {"eos_token_id": [2, 9], "temperature": 0.5}
    files = replace(write_model(tmp_path / "tiny.gguf", theirs, "llama"), generation_config=answers)
    assert quantize(files, ROUNDINGS["w8a16"], tmp_path / "out").matrices == 14
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == answers
    written = load_file(tmp_path / "out" / WEIGHTS)
    read = open_checkpoint(model_files(tmp_path / "out"))
    assert read.names() == theirs.state_dict().keys()
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(written[key], theirs.state_dict()[key].bfloat16())
    key = "model.layers.1.self_attn.q_proj.weight"  # whose rows llama.cpp stores in another order
    expected = theirs.state_dict()[key]
    found = read.tensor(key, TensorSpec(tuple(expected.shape), torch.float32))
    torch.testing.assert_close(found, expected, rtol=0, atol=float(expected.abs().max()) / 150)
    bloom = write_model(tmp_path / "bloom.gguf", make_checkpoint("bloom", tmp_path / "bloom"), "bloom")
    with pytest.raises(ConfigError, match=r"GGUF file of BloomForCausalLM.*original safetensors"):
        quantize(bloom, ROUNDINGS["w8a16"], tmp_path / "b")


def test_what_can_not_be_quantized(source: Path, tmp_path: Path) -> None:
    files = model_files(source)
    with pytest.raises(ConfigError, match=r"which groups of 96 don't divide.*--group-size.*--ignore"):
        quantize(files, ROUNDINGS["w4a16"], tmp_path / "a", group_size=96)
    with pytest.raises(ConfigError, match=r"--group-size 64: this scheme has a scale for each output"):
        quantize(files, ROUNDINGS["fp8"], tmp_path / "a", group_size=64)
    with pytest.raises(ConfigError, match=r"no matrices of linear layers, or --ignore"):
        quantize(files, ROUNDINGS["fp8"], tmp_path / "a", ignore=["*"])
    assert not (tmp_path / "a").exists()
    quantize(files, ROUNDINGS["w4a16"], tmp_path / "b", ignore=["*.down_proj"])
    config = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    with pytest.raises(ConfigError, match="is quantized already"):
        quantize(model_files(tmp_path / "b"), ROUNDINGS["fp8"], tmp_path / "c")
    with pytest.raises(ConfigError, match="not empty"):
        quantize(files, ROUNDINGS["fp8"], tmp_path / "b")


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("cohere", ["embed_tokens", "self_attn.k_norm", "self_attn.q_norm"]),
        ("mixtral", ["block_sparse_moe.gate", "embed_tokens", "lm_head"]),
        ("lfm2-moe", ["embed_tokens", "feed_forward.gate"]),
        ("nemotron-h-moe", ["embeddings", "lm_head", "mixer.gate"]),
    ],
)
def test_routers_and_norms_of_heads_are_kept(family: str, kept: list[str], tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path / "model")
    assert kept_matrices(tmp_path / "model", tmp_path / "out") == kept


def test_internlm2_has_another_name_of_the_head(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "model")
    tensors = load_file(source / WEIGHTS)
    head = tensors.pop("lm_head.weight")
    save_file({**tensors, "output.weight": head}, tmp_path / "model" / WEIGHTS)
    assert kept_matrices(tmp_path / "model", tmp_path / "out") == ["embed_tokens", "output"]


def kept_matrices(model: Path, out: Path) -> list[str]:
    """Quantize a model; return the modules of layers, and those outside, whose matrices stay as they are."""
    quantize(model_files(model), ROUNDINGS["w8a16"], out)
    tensors = load_file(out / WEIGHTS).items()
    kept = [name.removesuffix(".weight") for name, one in tensors if name.endswith(".weight") and one.dim() == 2]
    return sorted({re.sub(r"^(model|backbone)\.(layers\.\d+\.)?", "", name) for name in kept})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scheme", "w8a16", "--no-eval", "--text", "t"], "--text t is for the comparison, which --no-eval leaves"),
        (["--scheme", "w8a16", "--text", "missing"], "--text missing can't be read"),
        (["--scheme", "gguf-q8_0", "--dtype", "float16"], "--dtype float16 has no effect on gguf-q8_0"),
        (["--scheme", "gguf-q8_0", "--ignore", "*.nothing"], "--ignore have no effect on gguf-q8_0"),
        (["--scheme", "w8a16", "--ignore", "*.nothing"], "--ignore *.nothing: the model has no module of this name"),
        (["--scheme", "w8a16", "-o", __file__], "exists and is not a folder. Name a new folder"),
    ],
)
def test_nothing_is_written_if_a_flag_is_wrong(
    flags: list[str], message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.gguf"
    assert main(["quantize", str(source), "-o", str(out), *flags]) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("scheme", ["w8a16", "gguf-q8_0"])
def test_a_full_disk_leaves_nothing_behind(
    scheme: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*given: object, **further: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved, "_copy_small_files", full)
    monkeypatch.setattr("gguf.GGUFWriter.write_tensor_data", full)
    out = tmp_path / "out.gguf"
    assert main(["quantize", str(source), "--scheme", scheme, "-o", str(out), "--no-eval"]) == 1
    assert f"{out} can't be written: [Errno 28] No space left on device. Free space there" in capsys.readouterr().err
    assert not out.exists()


def test_a_source_that_is_rounded_itself(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    assert main(["quantize", str(source), "--scheme", "gguf-q8_0", "-o", str(first), "--no-eval"]) == 0
    assert "quantized before" not in capsys.readouterr().err
    assert main(["quantize", str(first), "--scheme", "gguf-q8_0", "-o", str(second), "--no-eval"]) == 0
    said = capsys.readouterr().err
    assert "first.gguf was quantized before (Q8_0): its own rounding errors remain" in said
    assert "--tokenizer" not in said
    folder = tmp_path / "folder"
    assert main(["quantize", str(first), "--scheme", "w8a16", "-o", str(folder), "--no-eval"]) == 0
    said = capsys.readouterr().err
    assert f"the tokenizer stays in {first}: serve {folder} with --tokenizer {first}" in said


def test_models_that_make_embeddings_are_refused(source: Path, tmp_path: Path) -> None:
    files = replace(model_files(source), config={"architectures": ["BertModel"], "model_type": "bert"})
    with pytest.raises(ConfigError, match="makes embeddings"):
        quantize(files, ROUNDINGS["w8a16"], tmp_path / "out")


def test_perplexity_is_that_of_transformers(source: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    context = 24
    command = ["eval", str(source), "--text", str(text), "--context", str(context), "--dtype", "float32", *SMALL]
    assert main([*command, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    theirs = make_checkpoint("quantized", tmp_path / "again", {"vocab_size": 464})
    ids = toy_tokenizers.byte_level().encode(TEXT).ids
    loss, count = 0.0, 0
    for first in range(0, len(ids), context):
        part = torch.tensor([ids[first : first + context]])
        with torch.no_grad():
            logits = theirs(part).logits[0].log_softmax(-1)
        loss -= float(logits[:-1].gather(1, part[0, 1:, None]).sum())
        count += part.shape[1] - 1
    assert figures["tokens"] == count
    assert figures["perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-4)


def test_the_command_compares_with_the_original(
    source: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    command = ["quantize", str(source), "--scheme", "w8a16", "-o", str(tmp_path / "out"), "--text", str(text)]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "14 matrices in w8a16" in printed.err
    figures = dict(line.split(": ") for line in printed.out.splitlines())
    if not torch.cuda.is_available():  # whose kernels need larger matrices
        assert "8-bit integers" in figures["weights"]
    assert float(figures["divergence, nats per token"]) < 1e-3
    assert float(figures["perplexity"]) == pytest.approx(float(figures["reference perplexity"]), rel=0.02)


@pytest.mark.features("pooling")
def test_only_models_that_generate_are_judged(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(source), "--runner", "pooling", *SMALL]) == 1
    assert "makes embeddings; octavo eval judges models that generate text" in capsys.readouterr().err


def test_questions(source: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    lines = [{"prompt": "The steps", "choices": [" of the quay", " zq"], "answer": i} for i in (0, 1, 0)]
    questions.write_text("\n".join(json.dumps(line) for line in lines))
    assert main(["eval", str(source), "--choices", str(questions), "--limit", "40", "--json", *SMALL]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["questions"] == 3
    assert figures["accuracy"] in (0.3333, 0.6667)
    questions.write_text('{"prompt": "a", "choices": ["b"], "answer": 0}\n')
    assert main(["eval", str(source), "--choices", str(questions), *SMALL]) == 1
    assert "line 1: a question has a prompt" in capsys.readouterr().err
    assert main(["eval", str(source), "--choices", str(tmp_path / "missing"), *SMALL]) == 1
    assert "missing can't be read" in capsys.readouterr().err


class Calls(dict[str, object]):
    """llm-compressor's `oneshot`, which only keeps what it is given."""

    def __call__(self, **given: object) -> None:
        self.update(given)


def matched(name: str, patterns: list[str]) -> bool:
    """Whether compressed-tensors would find one of these patterns in a module's name."""
    return any(re.match(pattern.removeprefix("re:"), f"model.layers.0.{name}") for pattern in patterns)


def test_calibration_is_left_to_llm_compressor(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, oneshot = tmp_path / "text", Calls()
    text.write_text("One sample.\n\nAnother\none.\n")
    command = ["quantize", str(source), "--no-eval", "-o", str(tmp_path / "out"), "--scheme"]
    assert main([*command, "gptq", "--calibration", str(text)]) == 1
    assert "pip install llmcompressor. --scheme w4a16 rounds" in capsys.readouterr().err
    for module, contents in {
        "llmcompressor": {"oneshot": oneshot},
        "llmcompressor.modifiers.gptq": {"GPTQModifier": dict},
        "llmcompressor.modifiers.transform.awq": {"AWQModifier": dict},
        "llmcompressor.modifiers.quantization": {"QuantizationModifier": dict},
        "datasets": {"Dataset": SimpleNamespace(from_dict=dict)},
    }.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**contents))
    assert main([*command, "gptq", "--calibration", str(text), "--ignore", "*.down_proj"]) == 0
    assert (oneshot["model"], oneshot["output_dir"]) == (str(source), str(tmp_path / "out"))
    assert oneshot["dataset"] == {"text": ["One sample.", "Another\none."]}
    assert isinstance(oneshot["recipe"], list)
    (recipe,) = oneshot["recipe"]
    head, *patterns = recipe["ignore"]
    modules = ("mlp.down_proj", "mlp.gate", "mlp.gate_proj", "mlp.router.layer")
    kept = [name for name in modules if matched(name, patterns)]
    assert (head, kept) == ("lm_head", ["mlp.down_proj", "mlp.gate", "mlp.router.layer"])
    assert recipe["config_groups"]["group_0"]["weights"]["group_size"] == 64
    assert main([*command, "gptq"]) == 1
    assert "gptq needs --calibration FILE. --scheme w4a16" in capsys.readouterr().err
    assert main([*command, "w4a16", "--calibration", str(text)]) == 1
    assert "w4a16 rounds without data. Leave it out, or take --scheme gptq or awq" in capsys.readouterr().err
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert (
        main(["quantize", str(source), "--scheme", "awq", "--calibration", str(text), "-o", str(tmp_path / "b")]) == 1
    )
    assert "--scheme awq: llm-compressor needs a GPU" in capsys.readouterr().err
    text.write_text(" ")
    assert main([*command, "gptq", "--calibration", str(text)]) == 1
    assert "has no text" in capsys.readouterr().err


@pytest.mark.parametrize("folder", [True, False])
def test_a_terminated_run_leaves_nothing(tmp_path: Path, folder: bool) -> None:
    """As one that is interrupted; a container ends its processes so."""
    path, before = tmp_path / "out", signal.getsignal(signal.SIGTERM)

    def write() -> None:
        with new_place(path, folder=folder):
            (path / "part" if folder else path).write_text("x")
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        write()
    assert ended.value.code == 128 + signal.SIGTERM
    assert not path.exists()
    assert signal.getsignal(signal.SIGTERM) is before
