"""Models whose checkpoints have static scales of activations, on a GPU's kernels, against Transformers' with inputs of
projections rounded as the scales say."""

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

pytest.importorskip("triton")

from octavo.models.attention import attention_spec
from octavo.models.load.quantized.table import rounds_activations
from octavo.models.mixers.attention import Attention
from octavo.models.registry import spec_of
from octavo.nn.attention.triton import TritonAttention
from octavo.nn.linear import Projection
from octavo.nn.quant.packed_gpu import PackedOnGpu
from octavo.nn.rounded import Rounded

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels of a GPU in Triton's interpreter")

STATIC = ("fp8-static", "fp8-compressed-static", "fp8-modelopt-static")
PROMPT = [i * i * 7 % 199 for i in range(70)]
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def quantize(folder: Path, theirs: Any, name: str) -> dict[str, float]:
    """Rewrite a checkpoint, give its model the values, and return each projection's scale of inputs."""
    example, weights = EXAMPLES[name], load_file(folder / "model.safetensors")
    parameters, scales = dict(theirs.named_parameters()), {}
    for key in [key for key in weights if key.endswith("_proj.weight")]:
        module = key.removesuffix(".weight")
        stored, exact = example.write(weights.pop(key).float())
        scales[module] = float(torch.rand(()) * 0.02 + 0.005)
        stored["input_scale"] = torch.tensor([scales[module]])
        weights |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
        parameters[key].data.copy_(exact)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": example.settings}))
    return scales


def round_inputs(theirs: Any, scales: dict[str, float]) -> None:
    """Let projections round their inputs, fused ones with the largest of their scales."""
    for module, own in scales.items():
        path, _, name = module.rpartition(".")
        partners = next((names for names in FUSED if name in names), (name,))
        scale = max(scales[f"{path}.{partner}"] for partner in partners)
        assert scale >= own

        def rounded(_: Any, inputs: tuple[Tensor], scale: float = scale) -> tuple[Tensor]:
            return ((inputs[0] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale,)

        theirs.get_submodule(module).register_forward_pre_hook(rounded)


class RoundsActivations(PackedOnGpu):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, rounds=True)


def loaded(folder: Path) -> Any:
    files = model_files(folder)
    assert rounds_activations(files.config)
    attention = TritonAttention(torch.float32, attention_spec(spec_of(files.config), 0))
    return load_model(files, attention, scheme=RoundsActivations)


def logits_of(model: Any, tokens: int = len(PROMPT)) -> Tensor:
    runner = PagedRunner(model, num_blocks=20, block_size=16)
    return runner.step([runner.row(PROMPT[:tokens], tokens)], [tokens], all_logits=True)


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", [STATIC[0], *(pytest.param(name, marks=pytest.mark.slow) for name in STATIC[1:])])
def test_logits_are_those_of_rounded_inputs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(len(name))
    theirs = make_checkpoint("quantized", tmp_path)
    scales = quantize(tmp_path, theirs, name)
    with torch.no_grad():
        plain = theirs(torch.tensor([PROMPT])).logits[0]
        round_inputs(theirs, scales)
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    model = loaded(tmp_path)
    found = logits_of(model)
    # Numbers between two others may be rounded the other way. What isn't rounded so is farther away.
    limit = apart(plain, expected) / 4
    assert limit > 1e-3
    assert apart(found, expected) < limit
    assert apart(logits_of(model, 16), plain[:16]) < 1e-4  # few rows are not rounded
    taken = rounded_by_attention(model, monkeypatch)
    assert torch.equal(logits_of(model), found)
    assert len(taken) == len(model.layers)
    monkeypatch.setattr(Projection, "rounds_by", lambda self, rows: None)  # so that the projection rounds
    assert torch.equal(logits_of(model), found)
    assert len(taken) == len(model.layers)


def rounded_by_attention(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Rounded]:
    """What attention has rounded from now on."""
    taken: list[Rounded] = []
    whole = Attention.activations

    def noted(self: Attention, *args: Any) -> Any:
        made = whole(self, *args)
        if isinstance(made, Rounded):
            taken.append(made)
        return made

    monkeypatch.setattr(Attention, "activations", noted)
    return taken


def test_a_gated_mixer_rounds_nothing(tmp_path: Path) -> None:
    """As the gate comes between attention and its projection."""
    theirs = make_checkpoint("quantized", tmp_path)
    quantize(tmp_path, theirs, "fp8-static")
    model = loaded(tmp_path)
    mixer, stream = model.layers[0].mixer, type("Rows", (), {"rows": 100})()
    assert mixer.out.rounds_by(100) is not None
    called: list[Any] = []
    mixer.gate, mixer.forward = mixer.qkv, lambda *args: called.append(args)
    mixer.activations(stream, None, None)
    assert called == [(stream, None, None)]


def test_the_last_layer_attends_unrounded_for_few_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its projection computes the tokens with logits only, which are too few to be rounded."""
    theirs = make_checkpoint("quantized", tmp_path)
    quantize(tmp_path, theirs, "fp8-static")
    model = loaded(tmp_path)
    taken = rounded_by_attention(model, monkeypatch)
    runner = PagedRunner(model, num_blocks=20, block_size=16)
    step = runner.input([runner.row(PROMPT, len(PROMPT))], [len(PROMPT)])
    step.hidden_rows = step.logit_rows
    with torch.inference_mode():
        hidden = model.forward(model.embed(step), step)
    assert hidden.shape[0] == 1
    assert len(taken) == len(model.layers) - 1
