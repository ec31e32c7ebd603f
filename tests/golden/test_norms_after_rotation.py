"""Norms of rotated heads where a backend does what lies between a layer's products, as on a GPU: it then gets heads
that are rotated and normalized already."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged import PagedRunner
from tiny import load_model, make_checkpoint, model_files

from octavo.models.attention import attention_spec
from octavo.models.load.weights import replace_weights
from octavo.models.registry import spec_of
from octavo.nn.attention.triton import TritonAttention

PROMPTS = [torch.randint(1, 199, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (37, 5)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles its kernels for the GPU; test_gpu_families.py")
@pytest.mark.parametrize("family", ["hunyuan", "hunyuan-moe"])
def test_logits_with_a_fused_backend(family: str, tmp_path: Path) -> None:
    theirs = make_checkpoint(family, tmp_path)
    files = model_files(tmp_path)
    backend = TritonAttention(torch.float32, attention_spec(spec_of(files.config), 0))
    runner = PagedRunner(load_model(files, backend), num_blocks=12, block_size=16)
    rows = [runner.row(prompt, len(prompt)) for prompt in PROMPTS]
    first = runner.step(rows, [30, 5], all_logits=True)
    found = torch.cat([first[:30], runner.step(rows[:1], [7], all_logits=True), first[30:]])
    with torch.no_grad():
        expected = torch.cat([theirs(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in PROMPTS])
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def test_weights_are_replaced_where_they_are(tmp_path: Path) -> None:
    """Recorded steps read them, and tables of rotations, at their addresses."""
    make_checkpoint("hunyuan", tmp_path)
    files = model_files(tmp_path)
    backend = TritonAttention(torch.float32, attention_spec(spec_of(files.config), 0))
    model, other = load_model(files, backend), load_model(files, backend)
    (before,) = (rope.still.data_ptr() for rope in model.ropes)
    replace_weights(model, other, in_place=True)
    (rope,) = model.ropes
    assert rope.still.data_ptr() == before
    assert rope.still.shape == rope.cos_sin.shape
