"""Adapters of experts: the logits are those of the merged weights, for both forms of files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_kit import ALL_FORMS_NIGHTLY, BASE, load
from tiny import make_checkpoint, model_files, reference_of
from tiny_expert_adapters import save_and_merge

from octavo.features.lora.payload import LoraStep

RANK = 3


@ALL_FORMS_NIGHTLY
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3-moe", "one by one"),
        ("qwen3-moe", "stacked"),
        ("qwen3-moe", "stacked, swapped"),
        ("granite-moe", "stacked"),
        pytest.param("gpt-oss", "stacked", marks=pytest.mark.slow),
        pytest.param("mixtral", "stacked", marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_merged_experts(family: str, form: str, by_output: bool, tmp_path: Path) -> None:
    theirs = make_checkpoint(family, tmp_path)
    files = model_files(tmp_path)
    adapted = load(files, reference_of(files), num_blocks=800, by_output=by_output)
    made = torch.Generator().manual_seed(1)
    prompt = torch.randint(1, 199, (24,), generator=made).tolist()
    with torch.no_grad():
        plain = theirs(torch.tensor([prompt]), use_cache=False).logits[0, -1]
        save_and_merge(theirs, tmp_path / "adapter", form, RANK, made, transposed=family == "gpt-oss")
        expected = theirs(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    entered = adapted.enter(tmp_path / "adapter")
    assert entered.experts
    assert not entered.general
    rows = [adapted.runner.row(prompt, len(prompt)) for _ in range(2)]
    found = adapted.step(rows, [len(prompt)] * 2, LoraStep(entered.entries, [BASE, 0], experts=True))
    torch.testing.assert_close(found, torch.stack([plain, expected]), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, expected, atol=1e-2)
