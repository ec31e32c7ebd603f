"""Heads draft for models with recurrent layers on a CPU: what they draft is a slow reference's, also after a row whose
accepted drafts were computed again, and no token changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from test_draft_heads import CONFIG, LAYERS, SIZE, VOCAB, greedy, random_head, reference, spied
from toy_engine import drive, strict, tiny_config, tokens_of

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.features.speculation.engine import SpeculationEngine
from octavo.features.speculation.heads.drafter import HeadDrafter
from octavo.features.speculation.heads.medusa import MedusaDrafter
from octavo.hub.resolve import resolve

HYBRID = {
    "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
    "head_dim": 8,
    "num_experts": 0,
    "partial_rotary_factor": 1.0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
PROMPTS = (1, 7, 25)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(4)
    config = transformers.Qwen3NextConfig(
        num_hidden_layers=LAYERS, initializer_range=0.2, tie_word_embeddings=False, **CONFIG, **HYBRID
    )
    model = transformers.Qwen3NextForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return folder, model


def run(
    folder: Path, own: dict[str, Any], count: int, **settings: Any
) -> tuple[dict[str, list[int]], dict[str, float]]:
    """Return the tokens of some requests, and what was drafted."""
    given = {"load_format": "auto", "max_num_batched_tokens": 16, "max_num_seqs": 3, "device": "cpu"} | settings
    config = {"num_speculative_tokens": 3, "adaptive": False} | own
    loop, _ = build_core(tiny_config(**given, speculative_config=config), resolve(str(folder)))
    strict(loop)
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    asked = [GenerateRequest(id=str(n), tokens=list(range(3 + n, 3 + 2 * n)), params=params) for n in PROMPTS]
    found = {name: tokens for (name, _), tokens in tokens_of(drive(loop, asked)).items()}
    counts = {one.name: sum(one.values.values()) for one in loop.stats().features}
    loop.close()
    return found, counts


def check_tokens(model: Any, found: dict[str, list[int]]) -> None:
    for name, tokens in found.items():
        assert tokens == greedy(model)(list(range(3 + int(name), 3 + 2 * int(name))), len(tokens))


@pytest.mark.parametrize("accepted", [False, True], ids=["rejected", "accepted"])
@pytest.mark.parametrize(
    ("kind", "backend"), [("eagle", None), pytest.param("eagle", "torch", marks=pytest.mark.slow), ("eagle3", None)]
)
def test_drafts_are_the_references(
    kind: str, backend: str | None, accepted: bool, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = target
    head, weights = random_head(kind, tmp_path / "head")
    if kind == "eagle":
        weights["lm_head.weight"] = model.lm_head.weight.detach()
    proposed = spied(monkeypatch, HeadDrafter, greedy(model) if accepted else None)
    own = {"method": kind, "model": str(head), "prompt_lookup_min": 0}
    found, counts = run(folder, own, 12 if accepted else 9, attention_backend=backend)
    assert len(proposed) > (6 if accepted else 15)
    assert counts["spec_decode_num_accepted_tokens"] > 8 or not accepted
    for known, drafts in proposed:
        assert drafts == reference(kind, model, weights, known, len(drafts))
    check_tokens(model, found)


def test_drafts_after_steps_without_any_are_the_references(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = target
    head, weights = random_head("eagle", tmp_path / "head")
    weights["lm_head.weight"] = model.lm_head.weight.detach()
    monkeypatch.setattr("octavo.features.speculation.heads.drafter.MOST_WAITING", 4)
    monkeypatch.setattr(
        SpeculationEngine, "drafts", lambda _, request: 2 * ((request.num_output + request.pending) % 9 > 6)
    )
    proposed = spied(monkeypatch, HeadDrafter, greedy(model))
    found, _ = run(folder, {"method": "eagle", "model": str(head), "prompt_lookup_min": 0}, 32)
    assert 9 <= len(proposed) <= 30
    for known, drafts in proposed:
        assert drafts == reference("eagle", model, weights, known, len(drafts))
    check_tokens(model, found)


@pytest.mark.parametrize("accepted", [False, True], ids=["rejected", "accepted"])
def test_medusas_drafts_are_the_references(
    accepted: bool, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = target
    made = torch.Generator().manual_seed(8)
    weights = {
        f"{head}.{name}": 0.3 * torch.randn(shape, generator=made)
        for head in range(2)
        for name, shape in {"0.linear.weight": (SIZE, SIZE), "0.linear.bias": SIZE, "1.weight": (VOCAB, SIZE)}.items()
    }
    path = tmp_path / "head"
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    proposed = spied(monkeypatch, MedusaDrafter, greedy(model) if accepted else None)
    found, _ = run(folder, {"method": "medusa", "model": str(path)}, 9)
    assert len(proposed) > (6 if accepted else 15)
    with torch.no_grad():
        for known, drafts in proposed:
            h = model(torch.tensor([known]), output_hidden_states=True).hidden_states[-1][0, -2]
            for head, token in enumerate(drafts):
                inner = weights[f"{head}.0.linear.weight"] @ h + weights[f"{head}.0.linear.bias"]
                assert token == int((weights[f"{head}.1.weight"] @ (h + torch.nn.functional.silu(inner))).argmax())
    check_tokens(model, found)
