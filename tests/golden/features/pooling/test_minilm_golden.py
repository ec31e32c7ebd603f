"""The catalogue's embedding model against Transformers, pooled by hand as its sentence-transformers files say."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from octavo import LLM
from octavo.hub.files import ModelFiles

TEXTS = [
    "Hello world",
    "The quick brown fox jumps over the lazy dog.",
    "",
    "Grüße aus München: 日本語, naïve café 🙂",
    "Paris is the capital of France, and " * 60,
    "x",
]


def test_vectors_equal_those_of_transformers(minilm_files: ModelFiles) -> None:
    folder = str(minilm_files.path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).numpy()
    with LLM(folder, threads=1) as llm:
        assert llm.info.max_model_len == 256
        found = llm.embed(TEXTS, truncate_prompt_tokens=-1)
        scores = llm.score(TEXTS[0], TEXTS[1:4])
    for tokens, attended, one, vector in zip(
        batch["input_ids"].tolist(), batch["attention_mask"].tolist(), found, expected, strict=True
    ):
        assert one.prompt_token_ids == tokens[: sum(attended)]
        np.testing.assert_allclose(one.outputs.embedding, vector, atol=2e-6)
    np.testing.assert_allclose([one.outputs.score for one in scores], expected[1:4] @ expected[0], atol=2e-6)
