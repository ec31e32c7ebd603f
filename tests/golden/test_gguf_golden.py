"""GGUF files as llama.cpp's converter lays them out, against the Transformers model they came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_kit import write_model
from levels import ISAS, needs_isa
from paged import PagedRunner
from tiny import load_model, make_checkpoint, model_files

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.hub.gguf_file import read_gguf
from octavo.models.native import NativeDecoder
from octavo.native.build import NativeBuildError
from octavo.native.isa import activation_advice
from octavo.native.program import Pool
from octavo.nn.attention.native import NativeAttention
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.quant.blocks import BlockQuantized
from octavo.nn.quant.none import Unquantized

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95]


@pytest.mark.parametrize(
    ("family", "arch"),
    [("llama", "llama"), ("llama-llama3-rope", "llama"), ("smollm", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_a_converted_model_gives_the_same_logits(family: str, arch: str, tmp_path: Path) -> None:
    theirs = make_checkpoint(family, tmp_path)
    path = tmp_path / "model.gguf"
    files = write_model(path, theirs, arch)
    assert ("rope_freqs.weight" in read_gguf(path).tensors) == (family == "llama-llama3-rope")
    # load_model sees to it that no tensor, the rotary divisors among them, is left unread.
    runner = PagedRunner(load_model(files, ReferenceAttention()), num_blocks=20, block_size=4)
    logits = runner.step([runner.row(PROMPT, len(PROMPT))], [len(PROMPT)], all_logits=True)
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kinds",
    [[Kind.Q4_0], [Kind.Q4_1], [Kind.Q8_0], [Kind.Q5_0], [Kind.Q4_1, Kind.Q8_0, Kind.Q5_1]],
    ids=lambda kinds: "+".join(kind.name for kind in kinds),
)
@pytest.mark.parametrize(
    ("family", "arch"), [("llama", "llama"), ("smollm", "llama"), ("qwen3-biases", "qwen3"), ("phi3", "phi3")]
)
@pytest.mark.parametrize(("activations", "limit"), [("int16", 2e-3), ("bfloat16", 1e-1)])
def test_packed_weights_give_the_logits_of_dequantized_ones(
    kinds: list[Kind], family: str, arch: str, activations: str, limit: float, tmp_path: Path
) -> None:
    """Some of a layer's matrices, whose rows are no whole blocks, stay float32 beside packed ones."""
    theirs = make_checkpoint(family, tmp_path)
    path = tmp_path / "model.gguf"
    files = write_model(path, theirs, arch, kinds)
    attention = NativeAttention(native_pool())
    logits = {}
    for scheme in (Unquantized, BlockQuantized):
        model = NativeDecoder(load_model(files, attention, scheme=scheme), attention.pool, activations)
        runner = PagedRunner(model, num_blocks=20, block_size=16)
        logits[scheme] = runner.step([runner.row(PROMPT, len(PROMPT))], [len(PROMPT)], all_logits=True)
    torch.testing.assert_close(logits[BlockQuantized], logits[Unquantized], rtol=limit, atol=limit)


@pytest.mark.parametrize("activations", ["int16", "int8", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_weights_give_a_prompt_the_same_logits_in_chunks_and_beside_another(
    activations: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    files = write_model(path, make_checkpoint("llama", tmp_path), "llama", [Kind.Q4_1, Kind.Q4_1, Kind.Q8_0])
    attention = NativeAttention(native_pool())
    model = NativeDecoder(load_model(files, attention, dtype, BlockQuantized), attention.pool, activations)
    assert model.weight_form.endswith(f", multiplied with {activations} activations")
    runner = PagedRunner(model, num_blocks=20, block_size=16, dtype=dtype)
    alone = runner.step([runner.row(PROMPT, len(PROMPT))], [len(PROMPT)], all_logits=True)
    row, other = runner.row(PROMPT, len(PROMPT)), runner.row(PROMPT[::-1], len(PROMPT))
    begun = runner.step([row], [1], all_logits=True)
    ended = runner.step([other, row], [len(PROMPT), len(PROMPT) - 1], all_logits=True)
    assert torch.equal(torch.cat([begun, ended[len(PROMPT) :]]), alone)


def native_pool() -> Pool:
    try:
        return Pool(2)
    except NativeBuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")


def test_a_native_model_follows_when_its_caches_are_bound_anew(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    attention = NativeAttention(native_pool())
    model = NativeDecoder(load_model(model_files(tmp_path), attention), attention.pool)
    logits = []
    for _ in range(2):
        runner = PagedRunner(model, num_blocks=20, block_size=16)
        logits.append(runner.step([runner.row(PROMPT, len(PROMPT))], [len(PROMPT)]))
        written = [not torch.isnan(layer.cache).all() for layer in model.attention_layers]
        assert all(written)
    assert torch.equal(*logits)


def test_quantized_weights_are_converted_where_the_program_can_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine computes its first request while it is built."""
    native_pool()
    monkeypatch.setattr("octavo.models.native.PANEL", 48)
    path = tmp_path / "model.gguf"
    files = write_model(path, make_checkpoint("llama", tmp_path), "llama", [Kind.Q8_0])
    _, info = build_core(EngineConfig.of(device="cpu", memory_bytes=1 << 22, threads=1), files)
    assert "layer by layer in torch" in caplog.text
    assert "integers" not in info.weights


@pytest.mark.parametrize("activations", ["int16", "bfloat16"])
@pytest.mark.parametrize("isa", ISAS)
def test_what_computes_is_told_and_what_would_be_faster(tmp_path: Path, isa: str, activations: str) -> None:
    needs_isa(isa)
    path = tmp_path / "model.gguf"
    files = write_model(path, make_checkpoint("llama", tmp_path), "llama", [Kind.Q8_0])
    settings = {"device": "cpu", "memory_bytes": 1 << 22, "threads": 1, "cpu_isa": isa, "activation_dtype": activations}
    _, info = build_core(EngineConfig.of(**settings), files)
    assert info.kernels == f"native, {isa}"
    assert info.advice == activation_advice(isa, activations)
