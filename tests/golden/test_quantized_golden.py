"""Models with quantized weights, against Transformers' model with the values that the stored tensors stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedRunner
from quantized_kit import EXAMPLES
from safetensors.torch import load_file, save_file
from tiny import load_model, make_checkpoint, model_files
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.device import host
from octavo.models.decoder import CausalLM
from octavo.models.native import NativeDecoder
from octavo.native.program import Pool
from octavo.nn.attention.native import NativeAttention
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.linear import Projection
from octavo.nn.quant.blocks import BlockQuantized
from octavo.nn.quant.none import Unquantized

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95]
SERVED = ("gptq-4-asymmetric", "awq-gemm", "w8a8", "fp8-tiles", "bnb-nf4")
PACKED = [name for name, example in EXAMPLES.items() if example.packs]


def quantize(folder: Path, theirs: Any, name: str) -> None:
    """Rewrite a checkpoint with quantized projections, and give its model their values."""
    example, weights = EXAMPLES[name], load_file(folder / "model.safetensors")
    parameters = dict(theirs.named_parameters())
    for key in [key for key in weights if key.endswith("_proj.weight")]:
        stored, exact = example.write(weights.pop(key).float())
        weights |= {f"{key.removesuffix('weight')}{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
        parameters[key].data.copy_(exact)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": example.settings}))


def logits_of(model: Any) -> Tensor:
    runner = PagedRunner(model, num_blocks=20, block_size=16)
    return runner.step([runner.row(PROMPT, len(PROMPT))], [len(PROMPT)], all_logits=True)


@pytest.mark.parametrize("name", EXAMPLES)
def test_logits_are_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    theirs = make_checkpoint("quantized", tmp_path)
    quantize(tmp_path, theirs, name)
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    files = model_files(tmp_path)
    torch.testing.assert_close(logits_of(load_model(files, ReferenceAttention())), expected, rtol=1e-4, atol=1e-4)
    attention = NativeAttention(Pool(1))
    model = NativeDecoder(load_model(files, attention, scheme=BlockQuantized), attention.pool)
    packs = name in PACKED or EXAMPLES[name].codes
    assert model.has_integers == (name in PACKED)
    forms = {layer.matrix.form for layer in projections(model.source)}
    assert ("float32" not in forms) == packs
    limit = 2e-2 if packs else 1e-3
    torch.testing.assert_close(logits_of(model), expected, rtol=limit, atol=limit)


def test_packed_weights_take_the_memory_of_their_integers(tmp_path: Path) -> None:
    sizes = {}
    theirs = make_checkpoint("quantized", tmp_path)
    quantize(tmp_path, theirs, "gptq-4")
    for scheme in (Unquantized, BlockQuantized):
        attention = NativeAttention(Pool(1))
        model = load_model(model_files(tmp_path), attention, torch.bfloat16, scheme=scheme)
        sizes[scheme] = sum(layer.mixer.qkv.nbytes + layer.mlp.out.nbytes for layer in model.layers)
    # 4 bits and a scale of 16 for each 32 inputs, in place of 16 bits.
    assert sizes[BlockQuantized] == sizes[Unquantized] * (4 + 16 / 32) / 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests a CPU without bfloat16 instructions")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_16_bits_keep_them_and_their_values(
    dtype: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors without instructions for bfloat16."""
    monkeypatch.setattr(host, "has_fast_bfloat16", lambda: False)
    make_checkpoint("llama", tmp_path, {"tie_word_embeddings": tied})
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: one.to(getattr(torch, dtype)) for name, one in weights.items()}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    settings = {"kv_cache_memory_bytes": 1 << 22, "threads": 1, "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0, logprobs=0)
    found, sizes = {}, {}
    for wanted in ("auto", "float32"):
        with LLM(str(tmp_path), **settings, dtype=wanted) as llm:
            (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
            found[wanted] = output.prompt_logprobs, output.outputs[0].token_ids, output.outputs[0].logprobs
            sizes[wanted] = llm.info.memory["weights"]
            assert llm.info.weights == (dtype if wanted == "auto" else wanted)
    assert found["auto"] == found["float32"]
    assert sizes["auto"] < 0.55 * sizes["float32"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="--head-dtype int8 is for CPUs only")
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_rounded_to_8_bits(tied: bool, tmp_path: Path) -> None:
    theirs = make_checkpoint("quantized", tmp_path, {"tie_word_embeddings": tied})
    quantize(tmp_path, theirs, "gptq-4")
    settings = {"kv_cache_memory_bytes": 1 << 22, "threads": 1, "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found, sizes = {}, {}
    for head in ("auto", "int8"):
        with LLM(str(tmp_path), **settings, head_dtype=head) as llm:
            (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
            found[head] = [next(iter(place.values())).logprob for place in output.prompt_logprobs[1:]]
            sizes[head] = llm.info.memory["weights"]
    assert found["auto"] != found["int8"]
    assert found["int8"] == pytest.approx(found["auto"], abs=6e-2)
    # 8 bits and a scale of 16 for each 32 inputs, in place of 16 or 32 bits, in whole panels of 16 rows.
    table = theirs.get_output_embeddings().weight
    assert sizes["auto"] - sizes["int8"] > table.numel() * 0.9


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, "octavo") for name in SERVED),
        *(pytest.param(name, "octavo", marks=pytest.mark.slow) for name in EXAMPLES if name not in SERVED),
        pytest.param("awq-gemm", "transformers", marks=pytest.mark.features("bridge")),
    ],
)
def test_the_engine_serves_it(name: str, implementation: str, tmp_path: Path) -> None:
    """In the form that its defaults choose, with the greedy tokens of the dequantized model."""
    theirs = make_checkpoint("quantized", tmp_path)
    quantize(tmp_path, theirs, name)
    with torch.no_grad():
        expected = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0, len(PROMPT) :]
    settings = {"kv_cache_memory_bytes": 1 << 22, "threads": 1, "skip_tokenizer_init": True}
    with LLM(str(tmp_path), **settings, model_impl=implementation) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels of a GPU on a CPU, in Triton's interpreter")
@pytest.mark.parametrize("name", ["gptq-4-act-order", "awq-gemm"])
def test_a_gpus_packed_model_has_the_logits_of_the_dequantized_one(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from octavo.nn.quant.packed_gpu import PackedOnGpu

    theirs = make_checkpoint("quantized", tmp_path)
    quantize(tmp_path, theirs, name)
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    model = load_model(model_files(tmp_path), ReferenceAttention(), scheme=PackedOnGpu)
    assert all(isinstance(layer.scheme, PackedOnGpu) and layer.scheme.matrix for layer in projections(model))
    # A minimum has the precision of float16.
    torch.testing.assert_close(logits_of(model), expected, rtol=2e-2, atol=2e-2)


def projections(model: CausalLM) -> list[Projection]:
    """All but the head, which is not quantized."""
    return [one for one in model.modules() if isinstance(one, Projection) and one is not model.head]
