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
def model(smollm2_files: ModelFiles, request: pytest.FixtureRequest) -> Model:
    spec = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
    attention = select(request.param, BackendRequest(torch.device("cpu"), torch.float32, spec))
    # The golden run used the epsilon that the model was trained with; the file's metadata says the same.
    assert smollm2_files.config["rms_norm_eps"] == 1e-5
    return compiled(load_model(smollm2_files, attention), attention)


@pytest.mark.slow
def test_all_chats_in_one_ragged_batch(model: Model, chats: list[dict[str, Any]]) -> None:
    runner = PagedRunner(model, num_blocks=200, block_size=16)
    prompts = [chat["prompt_token_ids"] for chat in chats]
    outputs = runner.greedy(prompts, [len(chat["tokens"]) for chat in chats], stop={2})
    assert outputs == [chat["tokens"] for chat in chats]


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
