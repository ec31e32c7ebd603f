"""The real SmolLM2, in float32, against greedy tokens that Transformers made from the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedRunner
from tiny import load_model

from octavo.hub.files import ModelFiles
from octavo.models.model import Model, compiled
from octavo.nn.attention.base import AttentionSpec, BackendRequest
from octavo.nn.attention.select import select

GOLDEN = Path(__file__).parent.parent / "data" / "smollm2_greedy.json"


@pytest.fixture(scope="module")
def chats() -> list[dict[str, Any]]:
    return json.loads(GOLDEN.read_text())["chats"]


@pytest.fixture(scope="module", params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(smollm2_files: ModelFiles, backend: str) -> Model:
    spec = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
    attention = select(backend, BackendRequest(torch.device("cpu"), torch.float32, spec))
    # The golden run used the epsilon that the model was trained with; the file's metadata says the same.
    assert smollm2_files.config["rms_norm_eps"] == 1e-5
    return compiled(load_model(smollm2_files, attention), attention)


@pytest.mark.slow
def test_all_chats_in_one_ragged_batch(model: Model, backend: str, chats: list[dict[str, Any]]) -> None:
    most = None if backend == "native" else 12  # torch takes its time
    expected = [chat["tokens"][:most] for chat in chats]
    runner = PagedRunner(model, num_blocks=200, block_size=16)
    prompts = [chat["prompt_token_ids"] for chat in chats]
    assert runner.greedy(prompts, [len(tokens) for tokens in expected], stop={2}) == expected


@pytest.mark.slow
def test_a_chat_alone_and_in_chunks(model: Model, chats: list[dict[str, Any]]) -> None:
    chat = max(chats, key=lambda chat: len(chat["prompt_token_ids"]))
    runner = PagedRunner(model, num_blocks=40, block_size=16, seed=5)
    prompt, tokens = chat["prompt_token_ids"], chat["tokens"][:12]
    row = runner.row(prompt, len(prompt) + len(tokens))
    while len(prompt) - row.computed > 9:
        runner.step([row], [9])
    produced = []
    for _ in tokens:
        logits = runner.step([row], [len(row.tokens) - row.computed])
        produced.append(int(logits.argmax()))
        row.tokens.append(produced[-1])
    assert produced == tokens
