"""The model that drafting heads are tested beside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.LlamaForCausalLM]:
    """A checkpoint with random weights, and the model itself."""
    from test_draft_heads import (  # asserts of a test module are rewritten only if pytest imports it first
        CONFIG,
        LAYERS,
    )

    torch.manual_seed(3)
    config = transformers.LlamaConfig(num_hidden_layers=LAYERS, initializer_range=0.2, **CONFIG)
    model = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return folder, model
