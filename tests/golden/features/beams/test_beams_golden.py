"""Beam search: token for token what Transformers finds, alone, together, in chunks and under preemption."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny import make_checkpoint, model_files

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.output import FinishReason
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.features.beams.engine import Beams

EOS = [7, 30]
KV_BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 4
_DRAW = random.Random(3)
PROMPTS = [[_DRAW.randrange(8, 199) for _ in range(_DRAW.randrange(1, 30))] for _ in range(20)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("llama")
    model = make_checkpoint("llama", folder)
    with torch.no_grad():  # ends must happen
        model.lm_head.weight[EOS] *= 1.7
    model.config.eos_token_id = EOS
    model.save_pretrained(folder)
    return model, folder


def searching(name: str, prompt: list[int], beams: Beams, **params: Any) -> GenerateRequest:
    option = msgspec.Raw(msgspec.msgpack.encode(beams))
    return GenerateRequest(id=name, tokens=prompt, params=SamplingParams(**params), options={"beams": option})


KNOWN: dict[str, list[list[int]]] = {}


def expected(model: Any, prompt: list[int], width: int, penalty: float, max_tokens: int, n: int) -> list[list[int]]:
    name = str((prompt, width, penalty, max_tokens, n))
    if name not in KNOWN:
        KNOWN[name] = searched(model, prompt, width, penalty, max_tokens, n)
    return KNOWN[name]


def searched(model: Any, prompt: list[int], width: int, penalty: float, max_tokens: int, n: int) -> list[list[int]]:
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=n,
            do_sample=False,
            max_new_tokens=max_tokens,
            length_penalty=penalty,
            early_stopping=False,
            eos_token_id=EOS,
            pad_token_id=0,
        )
    outputs = []
    for row in found.tolist():
        tokens = row[len(prompt) :]
        ends = [place for place, token in enumerate(tokens) if token in EOS]
        outputs.append(tokens[: ends[0] + 1] if ends else tokens)
    return outputs


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": True, "block_size": 4},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16, "block_size": 4},
        {"memory_bytes": 200 * KV_BYTES_PER_TOKEN, "max_model_len": 64, "block_size": 4},
        pytest.param({"max_num_seqs": 8, "block_size": 4, "enable_prefix_caching": False}, marks=pytest.mark.slow),
    ],
    ids=["plain", "overlapped", "in chunks", "preempted", "few slots"],
)
def test_as_transformers(checkpoint: tuple[Any, Path], settings: dict[str, Any]) -> None:
    model, folder = checkpoint
    config = EngineConfig.of(**{"dtype": "float32", "memory_bytes": 1 << 22, "threads": 1, **settings})
    loop, _ = build_core(config, model_files(folder))
    asked = {}
    for number, prompt in enumerate(PROMPTS):
        width, penalty, n = (2, 4, 8)[number % 3], (1.0, 0.0, 2.0)[number // 3 % 3], 1 + number % 2
        asked[f"r{number}"] = (prompt, width, penalty, 14, n)
        loop.add(searching(f"r{number}", prompt, Beams(width, penalty), n=n, max_tokens=14))
    plain = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    loop.add(GenerateRequest(id="plain", tokens=PROMPTS[0], params=plain))
    deltas = []
    while loop.busy:
        deltas += loop.step()
    loop.check_idle()
    if "memory_bytes" in settings:
        assert loop.stats().num_preemptions > 0
    assert loop.stats().blocks_copied > 0
    stopped = 0
    for name, request in asked.items():
        found = {delta.index: delta for delta in deltas if delta.id == name}
        assert len([delta for delta in deltas if delta.id == name]) == len(found) == request[-1]
        want = expected(model, *request)
        assert [found[index].tokens for index in range(len(want))] == want
        for delta in found.values():
            ended = delta.tokens[-1] in EOS
            stopped += ended
            assert delta.finish is (FinishReason.STOP if ended else FinishReason.LENGTH)
    assert stopped > 3
    (length,) = [delta.finish for delta in deltas if delta.id == "plain" and delta.finish]
    assert length is FinishReason.LENGTH


def test_an_abort_ends_all_beams_and_tells_of_those_that_count(checkpoint: tuple[Any, Path]) -> None:
    config = EngineConfig.of(dtype="float32", memory_bytes=1 << 22, threads=1)
    loop, _ = build_core(config, model_files(checkpoint[1]))
    for steps in range(1, 6):
        loop.add(searching("a", [9, 10, 11], Beams(4), n=2, max_tokens=50))
        for _ in range(steps):
            assert loop.step() == []
        deltas = loop.abort("a", 0 if steps % 2 else None)
        assert [(delta.index, delta.finish) for delta in deltas] == [(0, FinishReason.ABORT), (1, FinishReason.ABORT)]
        while loop.busy:
            assert loop.step() == []
        loop.check_idle()
