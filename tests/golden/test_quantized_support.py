"""Every format on ranks, in experts and beside adapters: docs/quantization.md's table rests on these tests.

Each is compared with the same model in float32 with the values that the format stands for: those of its specification,
or of a GGUF file expanded by Octavo, which `tests/unit/models/test_gguf_checkpoint.py` compares with gguf-py. `ALWAYS`
has an example of each kind of storage; the others are tested nightly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_kit import gguf_files, random_rows, write_model
from quantized_kit import EXAMPLES
from rank_kit import ranks_in_threads
from safetensors.torch import load_file, save_file
from test_quantized_golden import PROMPT, logits_of
from tiny import load_model, make_checkpoint, model_files
from tiny_adapters import merged, save_adapter
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.config import ModelConfig
from octavo.hub.files import ModelFiles
from octavo.models.load import open_checkpoint
from octavo.models.load.arranged import arranged
from octavo.models.load.gguf_blocks import CODES, INTEGERS
from octavo.models.load.quantized.table import rounds_activations
from octavo.models.load.weights import plain_bytes, wanted_bytes, weight_layers
from octavo.models.native import NativeDecoder
from octavo.models.registry import spec_of
from octavo.native.bindings import Dtype
from octavo.native.program import Pool
from octavo.nn.attention.native import NativeAttention
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.experts import ExpertLayer
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.quant.blocks import BlockQuantized
from octavo.nn.quant.experts import ExpertsScheme
from octavo.nn.quant.gpu_packed_experts import PackedStack
from octavo.nn.quant.none import Unquantized
from octavo.nn.quant.packed_gpu import PackedOnGpu
from octavo.nn.rope import Rope
from octavo.nn.weights import TensorSpec
from octavo.parallel.mesh import Mesh
from octavo.worker.schemes import needed_bytes

ALWAYS = ("awq-gemm", "fp8-tiles", "nvfp4", "Q6_K")
KINDS = {kind.name: kind for kind in sorted(CODES.keys() | INTEGERS.keys())}
NAMES = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in (*EXAMPLES, *KINDS)]
EXPANDED = ("w4a16-act-order", "gptq-4-act-order", "gptq-3-act-order")
SETTINGS: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 1 << 22, "threads": 1}
SETTINGS |= {"skip_tokenizer_init": True}
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "tie_word_embeddings": False}
EXPERTS = {**SIZES, "num_local_experts": 3}
GRANITE = {"attention__scale": 0.2, "embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0}
COUNTS = {"expert_count": 3, "expert_used_count": 2}


@dataclass(frozen=True)
class Model:
    """A model in a format, and in float32 with the values that the format stands for."""

    path: Path
    plain: Path
    config: dict[str, Any]

    @property
    def files(self) -> ModelFiles:
        return gguf_files(self.path) if self.path.is_file() else model_files(self.path)


def make(name: str, folder: Path, *, experts: bool = False, adapter: Path | None = None) -> Model:
    """Write a model in a format.

    Args:
        adapter: is merged into the model in float32.
    """
    changes = EXPERTS if experts else SIZES
    if name in KINDS:
        theirs = make_checkpoint("granite-moe" if experts else "llama", folder, changes)
        arch, metadata = ("granitemoe", GRANITE | COUNTS) if experts else ("llama", {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gguf.quants, "quantize", lambda values, kind: random_rows(kind, values.shape))
            files = write_model(folder / "model.gguf", theirs, arch, [KINDS[name]], **metadata)
        path, config = files.path, dict(files.config)
        spec = spec_of(config)
        stored = arranged(open_checkpoint(files), spec)
        shapes = {key: stored.shape(key) or () for key in stored.names()}
        tensors = {key: stored.tensor(key, TensorSpec(shape, torch.float32)).float() for key, shape in shapes.items()}
    else:
        make_checkpoint("mixtral" if experts else "quantized", folder, changes)
        path, tensors, config = folder, store(folder, name), json.loads((folder / "config.json").read_text())
    if adapter is not None:
        save_adapter(adapter, config, seed=1, rank=4)
        tensors = merged(tensors, adapter)
    plain = folder / "plain"
    plain.mkdir()
    settings = {key: value for key, value in config.items() if key != "quantization_config"}
    (plain / "config.json").write_text(json.dumps(settings))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, plain / "model.safetensors")
    return Model(path, plain, config)


def store(folder: Path, name: str) -> dict[str, Tensor]:
    """Rewrite a checkpoint with all its matrices in a format, but for tables and routers; return the tensors of the
    model that has their values."""
    example, weights = EXAMPLES[name], load_file(folder / "model.safetensors")
    plain = dict(weights)
    for key, weight in plain.items():
        if weight.dim() == 2 and not any(part in key for part in ("embed", "lm_head", ".gate.")):
            stored, exact = example.write(weights.pop(key).float())
            plain[key] = exact.float()
            weights |= {f"{key.removesuffix('weight')}{suffix}": part.contiguous() for suffix, part in stored.items()}
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": example.settings}))
    return plain


def packs(name: str) -> bool:
    return name in KINDS or EXAMPLES[name].packs or EXAMPLES[name].codes


def read(path: Path, adapter: Path | None = None, *, is_packed: bool = False, **settings: Any) -> Tensor:
    """The log-probabilities of a prompt's tokens, by an engine whose layers are packed or not."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    request = None
    if adapter is not None:
        from octavo.lora.request import LoRARequest  # the feature may be absent

        request = LoRARequest("adapter", 1, str(adapter))
    with LLM(str(path), **SETTINGS, **settings) as llm:
        assert (llm.info.weights != "float32") == is_packed
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False, lora_request=request)
    return torch.tensor([next(iter(place.values())).logprob for place in output.prompt_logprobs[1:]])


@pytest.mark.parametrize("name", NAMES)
def test_ranks_on_cpus(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank packs its part."""
    ranks_in_threads(monkeypatch)
    model = make(name, tmp_path)
    found = read(model.path, is_packed=packs(name), tensor_parallel_size=2)
    torch.testing.assert_close(found, read(model.plain, dtype="float32"), rtol=1e-2, atol=6e-2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is loaded into host memory")
@pytest.mark.parametrize(
    "name",
    ["gptq-4", "gptq-3", "awq-gemm", "fp8-channel", "bnb-nf4", "bnb-fp4-nested", "torchao-float8", "mxfp8", "Q4_0"],
)
def test_the_memory_that_a_rank_on_a_gpu_needs(name: str, tmp_path: Path) -> None:
    """The estimate before the weights are loaded is that of the rank's part, and at least what they take then."""
    made, dtype = make(name, tmp_path), torch.bfloat16
    whole = partial(plain_bytes, open_checkpoint(made.files), dtype)

    def sizes(mesh: Mesh) -> tuple[int, int]:
        scheme = partial(PackedOnGpu, rounds=rounds_activations(made.config))
        model = load_model(made.files, ReferenceAttention(), dtype, scheme, mesh)
        kept = sum(layer.nbytes for layer in weight_layers(model) if not isinstance(layer, Rope))
        return kept, needed_bytes(wanted_bytes(model), whole, ModelConfig(), made.files, resident=True)

    (kept, needed), (kept_by_one, needed_by_one) = sizes(Mesh(1, 2)), sizes(Mesh())
    assert kept <= needed < 0.65 * needed_by_one  # both ranks have the only head of keys and values
    assert kept_by_one <= needed_by_one < whole()


@pytest.mark.parametrize("name", NAMES)
def test_experts(name: str, tmp_path: Path) -> None:
    """Expanded in torch; in the native program in the form of other layers."""
    written = make(name, tmp_path, experts=True)
    expected = logits_of(load_model(written.files, ReferenceAttention()))
    if name in EXAMPLES:
        plain = logits_of(load_model(model_files(written.plain), ReferenceAttention()))
        torch.testing.assert_close(expected, plain, rtol=1e-4, atol=1e-4)
    attention = NativeAttention(Pool(1))
    model = NativeDecoder(load_model(written.files, attention, scheme=BlockQuantized), attention.pool)
    (experts,) = [layer.packed for layer in model.source.modules() if isinstance(layer, ExpertLayer)]
    assert (Dtype.FLOAT not in experts.dtypes) == packs(name)
    assert (logits_of(model) - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels in Triton's interpreter")
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("awq-gemm", "bnb-nf4") else pytest.param(name, marks=pytest.mark.slow)
        for name in (*EXAMPLES, *KINDS)
    ],
)
def test_experts_on_a_gpu(name: str, tmp_path: Path) -> None:
    """By the kernels of a GPU, which read what is packed."""
    written = make(name, tmp_path, experts=True)
    expected = logits_of(load_model(written.files, ReferenceAttention()))
    rounds = rounds_activations(written.config)

    class PackedExpertsOnly(Unquantized):
        def experts(self, form: ExpertsForm) -> ExpertsScheme:
            return PackedOnGpu(self.dtype, self.device, rounds=rounds).experts(form)

    model = load_model(written.files, ReferenceAttention(), scheme=PackedExpertsOnly)
    (layer,) = [layer for layer in model.modules() if isinstance(layer, ExpertLayer)]
    assert isinstance(layer.scheme, PackedStack)
    kept = {product.packed_as is not None for product in (layer.scheme.gate_up, layer.scheme.down)}
    assert kept == {packed_on_gpu(name)}
    assert (logits_of(model) - expected).norm() < 1e-2 * expected.norm()


def packed_on_gpu(name: str) -> bool:
    """Whether experts of a format stay packed on a GPU: not in the order of activations."""
    return packs(name) and name not in EXPANDED


@pytest.mark.features("lora")
@pytest.mark.parametrize("name", NAMES)
def test_adapters(name: str, tmp_path: Path) -> None:
    """Added to the products of the packed weights."""
    adapter = tmp_path / "adapter"
    model = make(name, tmp_path, adapter=adapter)
    found = read(model.path, adapter, is_packed=packs(name), enable_lora=True, max_lora_rank=8)
    expected = read(model.plain, dtype="float32")
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=6e-2)
    assert not torch.allclose(read(model.path, is_packed=packs(name)), expected, rtol=1e-2, atol=6e-2)
