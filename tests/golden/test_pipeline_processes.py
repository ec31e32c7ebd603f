"""Ranks in processes of their own, over gloo: the tokens of one process, and one error if a rank is lost."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from toy_engine import drive, tiny_config, tokens_of
from toy_models import LLAMA, VOCAB, model_files

from octavo.build import build_core
from octavo.core.errors import DeviceLostError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop

MODEL = LLAMA | {"vocab_size": VOCAB + 1}


def requests(max_tokens: int) -> list[GenerateRequest]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return [GenerateRequest(id=str(i), tokens=list(range(5 + i, 17)), params=params) for i in range(4)]


def engine(**settings: Any) -> EngineLoop:
    return build_core(tiny_config(device="cpu", cpu_bind="nobind", **settings), model_files(MODEL))[0]


@pytest.mark.slow
def test_tokens_and_the_loss_of_a_stage() -> None:
    alone = engine()
    expected = tokens_of(drive(alone, requests(9)))
    loop = engine(pipeline_parallel_size=2)
    ranks = loop.worker.ranks  # type: ignore[attr-defined]
    assert tokens_of(drive(loop, requests(9))) == expected
    for request in requests(200):
        loop.add(request)
    for _ in range(4):
        loop.step()
    os.kill(ranks.processes[0].pid, signal.SIGKILL)
    with pytest.raises(DeviceLostError, match=r"The device was lost: rank 0 \(.*\): its process was killed by SIGKILL"):
        tokens_of(drive(loop, []))
    assert all(process.code is not None for process in ranks.processes)


@pytest.mark.slow
@pytest.mark.parametrize("each", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_that_divide_prompts(each: dict[str, Any]) -> None:
    alone = engine()
    expected = tokens_of(drive(alone, requests(9)))
    loop = engine(prefill_context_parallel_size=2, prefill_context_parallel_threshold=8, **each)
    ranks = loop.worker.ranks  # type: ignore[attr-defined]
    assert tokens_of(drive(loop, requests(9))) == expected
    for request in requests(200):
        loop.add(request)
    os.kill(ranks.processes[-1].pid, signal.SIGKILL)
    with pytest.raises(DeviceLostError, match=r"The device was lost: rank . \(.*\): its process was killed by SIGKILL"):
        tokens_of(drive(loop, []))
    assert all(process.code is not None for process in ranks.processes)
