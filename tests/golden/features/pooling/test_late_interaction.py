"""Models whose vectors are those of tokens (ColBERT), against Transformers and the layer by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import toy_tokenizers
import transformers
from safetensors.torch import save_file

from octavo import LLM

QUERY, DOCUMENTS = "quick fox", ["the lazy dog", "a quick fox jumps"]


def make(folder: Path) -> tuple[torch.nn.Module, torch.Tensor]:
    """A checkpoint as PyLate saves it: a model and a dense layer, without pooling."""
    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80
    )
    model = transformers.BertModel(config).eval()
    model.save_pretrained(folder)
    toy_tokenizers.bert().save(str(folder / "tokenizer.json"))
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    (folder / "modules.json").write_text(json.dumps([{"path": path, "type": kind} for path, kind in kinds.items()]))
    (folder / "1_Dense").mkdir()
    linear = torch.nn.modules.linear
    layer = {"in_features": 48, "out_features": 16, "bias": False}
    layer["activation_function"] = f"{linear.__name__}.{linear.Identity.__name__}"
    (folder / "1_Dense" / "config.json").write_text(json.dumps(layer))
    weight = torch.randn(16, 48)
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
    return model, weight


def test_vectors_of_tokens_and_scores(tmp_path: Path) -> None:
    model, weight = make(tmp_path)

    def vectors(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            states = model(torch.tensor([tokens])).last_hidden_state[0]
        return torch.nn.functional.normalize(states @ weight.T, dim=-1).numpy()

    with LLM(str(tmp_path), threads=1) as llm:
        found = llm.encode([QUERY, *DOCUMENTS])
        scores = llm.score(QUERY, DOCUMENTS)
    for one in found:
        np.testing.assert_allclose(np.array(one.outputs.data), vectors(one.prompt_token_ids), atol=2e-5)
    query, *documents = (vectors(one.prompt_token_ids) for one in found)
    for score, document in zip(scores, documents, strict=True):
        expected = sum(max(float(mine @ its) for its in document) for mine in query)
        assert score.outputs.score == pytest.approx(expected, abs=1e-4)
