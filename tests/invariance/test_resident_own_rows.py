"""Data-parallel attention with slots on the device: recorded decoding gives one device's tokens.

The ranks are threads, kernels run in Triton's interpreter, and graphs are those of `toy_graphs`.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("these ranks are threads on the CPU; test_gpu_ranks.py has those of GPUs", allow_module_level=True)

from rank_kit import ranks_in_threads
from test_resident_experts import FAMILIES
from toy_engine import drive, tiny_config, tokens_of
from toy_graphs import interpret_in_turns, recorded_graphs
from toy_models import VOCAB, Behind, model_files

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.plan import StepPlan
from octavo.core.request import GenerateRequest
from octavo.worker.resident import own_singles
from octavo.worker.resident.replay import GraphReplay

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # padding has any values
LATENT, GROUPED = "DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM"
MODELS: dict[str, dict[str, Any]] = {
    name: FAMILIES[name]
    | {"architectures": [name], "model_type": "any", "num_hidden_layers": 2, "vocab_size": VOCAB + 1}
    for name in (LATENT, GROUPED)
}
MODELS["windows and sinks"] = MODELS[GROUPED] | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4}
MODELS["windows and sinks"] |= {"head_dim": 16, "sliding_window": 16}
WHERE: dict[str, Any] = {"device": "cpu", "cpu_bind": "nobind", "attention_backend": "triton"}
FEW: dict[str, Any] = {"max_model_len": 40, "max_num_seqs": 5, "max_num_batched_tokens": 24} | WHERE
TWO: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "two ranks": TWO,
    "steps launched ahead, preempted requests": TWO | {"num_blocks": 5, "block_size": 8, "async_scheduling": True},
    "three ranks": TWO | {"data_parallel_size": 3},
    "unequal steps": TWO | {"max_num_seqs": 3},
}


class Watch:
    """Collects of decoding steps the rows of each rank, recorded or not, and what each rank's graphs give to the head.

    Attributes:
        recorded, launched: (rows of the first rank, of the second, ...).
        hidden: of each rank, step by step.
        rooms: rows that masks have room for, and rows of the largest recorded step, of each rank's steps.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded: list[tuple[int, ...]] = []
        self.launched: list[tuple[int, ...]] = []
        self.hidden: dict[int, list[Tensor]] = {}
        self.rooms: set[tuple[int, int]] = set()
        takes, forward = GraphReplay.takes, GraphReplay.forward

        def taking(replay: GraphReplay, plan: StepPlan, variant: Any) -> bool:
            taken, own = takes(replay, plan, variant), replay._own_rows
            if own is not None and own.mesh.rank == 0 and max(plan.num_tokens) == 1:
                ranks = own.ranks_of(plan.slots).tolist()
                counts = tuple(ranks.count(rank) for rank in range(own.mesh.size))
                (self.recorded if taken else self.launched).append(counts)
            return taken

        def computing(replay: GraphReplay, step: Any, allowed: Any) -> None:
            forward(replay, step, allowed)
            if replay._own_rows is not None:
                self.hidden.setdefault(replay._own_rows.mesh.rank, []).append(step.hidden.clone())
                assert replay._sampling is not None
                which = replay._sampling._sampler._allowed.which
                self.rooms.add((len(which), replay._singles.sizes[-1]))

        monkeypatch.setattr(GraphReplay, "takes", taking)
        monkeypatch.setattr(GraphReplay, "forward", computing)


@pytest.fixture(autouse=True)
def ranks_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch, native=False)
    interpret_in_turns(monkeypatch)
    recorded_graphs(monkeypatch)
    monkeypatch.setattr("octavo.worker.worker.select_device", lambda name: Behind())


def requests() -> list[GenerateRequest]:
    """Greedy and drawn ones, some with parameters that graphs don't sample."""
    rng = random.Random(5)
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "seed": 4}]
    kinds += [{"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2}]
    return [
        GenerateRequest(
            id=f"r{i}",
            tokens=[rng.randrange(4, VOCAB) for _ in range(rng.randrange(3, 16))],
            params=SamplingParams(max_tokens=length, ignore_eos=True, **kinds[i % len(kinds)]),
        )
        for i, length in enumerate((14, 3, 9, 2, 12, 6, 4))
    ]


def run(name: str, **settings: Any) -> tuple[dict[tuple[str, int], list[int]], int]:
    """Return the tokens, and the number of preemptions."""
    loop = build_core(tiny_config(**FEW | settings), model_files(MODELS[name]))[0]
    found, preempted = tokens_of(drive(loop, requests())), loop.stats().num_preemptions
    loop.close()
    return found, preempted


@functools.cache
def of_one_device(name: str) -> dict[tuple[str, int], list[int]]:
    """Return the tokens without recorded steps. Several settings compare with them."""
    return run(name, enforce_eager=True)[0]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (LATENT, "two ranks"),
        (GROUPED, "steps launched ahead, preempted requests"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (GROUPED, "unequal steps"),
                (GROUPED, "three ranks"),
                (LATENT, "steps launched ahead, preempted requests"),
                ("windows and sinks", "two ranks"),
            )
        ),
    ],
)
def test_tokens(name: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' numbers of rows differ, grow and shrink, and at times one has none."""
    expected = of_one_device(name)
    watch = Watch(monkeypatch)
    if setting == "unequal steps":
        monkeypatch.setattr(own_singles, "own_sizes", lambda ranks, max_rows: [ranks])
    found, preempted = run(name, **SETTINGS[setting])
    assert found == expected
    assert any(min(one) == 0 for one in watch.recorded)
    if setting == "unequal steps":
        assert {max(one) for one in watch.launched} == {2}, "steps of one row of each rank are recorded"
    else:
        assert any(0 < min(one) < max(one) for one in watch.recorded)
        assert len({sum(one) for one in watch.recorded}) > 3
        assert not watch.launched
    assert (preempted > 0) == ("preempted" in setting)
    assert all(room >= largest for room, largest in watch.rooms), "padding has masks, too"
    first, *others = watch.hidden.values()
    assert len(first) == len(watch.recorded)
    for other in others:
        assert all(map(torch.equal, first, other)), "ranks draw from the same bits"


def test_steps_with_prompts_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[int]] = []
    forward = GraphReplay.forward

    def noted(replay: GraphReplay, step: Any, allowed: Any) -> None:
        taken.append(step.plan.num_tokens)
        forward(replay, step, allowed)

    monkeypatch.setattr(GraphReplay, "forward", noted)
    run(GROUPED, **TWO)
    assert {max(one) for one in taken} == {1}
