"""SmolLM2 on the GPU, in float32 and with the whole engine around it, against the golden tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.hub.files import ModelFiles

GOLDEN = Path(__file__).parent.parent / "data" / "smollm2_greedy.json"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_smollm2_in_float32_gives_the_golden_tokens(smollm2_files: ModelFiles, eager: bool) -> None:
    chats = json.loads(GOLDEN.read_text())["chats"]
    config = EngineConfig.of(
        dtype="float32", device="cuda", max_num_seqs=16, memory_bytes=1 << 28, enforce_eager=eager, max_model_len=512
    )
    loop, _ = build_core(config, smollm2_files)
    for i, chat in enumerate(chats):
        params = SamplingParams(temperature=0, max_tokens=len(chat["tokens"]))
        loop.add(GenerateRequest(id=str(i), tokens=chat["prompt_token_ids"], params=params))
    outputs: dict[str, list[int]] = {}
    while loop.busy:
        for delta in loop.step():
            assert delta.error is None, delta.error
            outputs.setdefault(delta.id, []).extend(delta.tokens)
    loop.check_idle()
    loop.close()
    assert [outputs[str(i)] for i in range(len(chats))] == [chat["tokens"] for chat in chats]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_smollm2_in_bfloat16_still_knows_the_capital_of_france(smollm2_files: ModelFiles) -> None:
    """A residual stream in bfloat16 is enough to lose it."""
    chat = json.loads(GOLDEN.read_text())["chats"][0]
    config = EngineConfig.of(dtype="bfloat16", device="cuda", max_num_seqs=4, memory_bytes=1 << 26, max_model_len=256)
    loop, _ = build_core(config, smollm2_files)
    params = SamplingParams(temperature=0, max_tokens=len(chat["tokens"]))
    loop.add(GenerateRequest(id="chat", tokens=chat["prompt_token_ids"], params=params))
    tokens: list[int] = []
    while loop.busy:
        for delta in loop.step():
            tokens += delta.tokens
    loop.close()
    assert tokens == chat["tokens"]
