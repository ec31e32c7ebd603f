"""Log-probabilities of prompts: equal to Transformers', however the prompt was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_checkpoint, model_files

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.output import TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest

PROMPTS = [[5, 17, 90, 3, 44, 44, 101, 8, 9, 120, 7, 5, 5, 60, 61, 62, 63, 64, 65, 66], [4, 5, 6], [9]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("llama")
    return make_checkpoint("llama", folder), folder


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"async_scheduling": True},
        {"memory_bytes": 24 * 3 * 2 * 2 * 16 * 4 * 4, "max_model_len": 64, "block_size": 4},
    ],
    ids=["whole", "in chunks", "overlapped", "preempted"],
)
def test_as_transformers(checkpoint: tuple[Any, Path], settings: dict[str, Any]) -> None:
    model, folder = checkpoint
    config = EngineConfig.of(**{"dtype": "float32", "memory_bytes": 1 << 22, "threads": 1, **settings})
    loop, _ = build_core(config, model_files(folder))
    found: dict[str, list[TokenLogprobs]] = {}
    for round_ in range(2):  # the second time the prompts are in the prefix cache
        for number, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=30, n=1 + number % 2, seed=1, prompt_logprobs=3, ignore_eos=True)
            loop.add(GenerateRequest(id=f"{round_}-{number}", tokens=prompt, params=params))
        while loop.busy:
            for delta in loop.step():
                assert delta.error is None
                if delta.index == 0:
                    found.setdefault(delta.id, []).extend(delta.prompt_logprobs or [])
    loop.check_idle()
    if "memory_bytes" in settings:
        assert loop.stats().num_preemptions > 0
    for number, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        for round_ in range(2):
            entries = found[f"{round_}-{number}"]
            assert len(entries) == len(prompt) - 1
            for place, entry in enumerate(entries):
                row = expected[place]
                assert entry.logprob == pytest.approx(row[prompt[place + 1]].item(), abs=1e-4)
                assert entry.rank == int((row > row[prompt[place + 1]]).sum()) + 1
                assert entry.top_ids == row.topk(3).indices.tolist()
