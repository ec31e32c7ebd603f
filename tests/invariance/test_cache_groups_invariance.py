"""Layers with windows keep less, and give the same tokens: in a group of their own, beside full attention, under load.

The truth is the same model with one table for all layers, which keeps everything. Layouts without a backend run in the
machine's fastest: recorded steps with Triton's kernels on a GPU, native programs on a CPU.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from toy_drafter import DrafterEngine, DrafterWorker, runner_of, with_drafter
from toy_engine import device_of, drive, tiny_config, tokens_of
from toy_models import LLAMA, VOCAB, model_files

from octavo.build import build_core
from octavo.core.cache_groups import FULL, CacheGroup, GroupKind, attending, groups_of
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.worker.native_replay import NativeReplay
from octavo.worker.parts import Replay

WINDOW = 20
MIXED = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 1,
}
WINDOWED = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW}
LAYOUTS = {
    "mixed": (MIXED, "torch", 3),
    "windowed": (WINDOWED, "torch", 1),
    "mixed, fastest": (MIXED, "auto", 3),
    "windowed, fastest": (WINDOWED, "auto", 1),
}


def requests(count: int = 8) -> list[GenerateRequest]:
    rng = random.Random(3)
    prefix = [rng.randrange(4, VOCAB) for _ in range(64)]
    made = []
    for i in range(count):
        prompt = prefix[: rng.choice([0, 32, 64])] + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 30))]
        drawn = {"temperature": 0.8, "seed": i, "n": 2} if i % 2 else {"temperature": 0}
        params = SamplingParams(max_tokens=rng.randrange(10, 50), ignore_eos=True, **drawn)
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params))
    return made


def settings_of(backend: str, **settings: Any) -> dict[str, Any]:
    chosen = {} if backend == "auto" else {"attention_backend": backend}
    return {"max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 24, **chosen, **settings}


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_that_release_blocks_change_no_token(
    layout: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, backend, groups = LAYOUTS[layout]
    settings = settings_of(backend, async_scheduling=overlap)
    loop, info = build_core(tiny_config(**settings, num_blocks=40 * groups), model_files(config))
    assert info.kv_groups == groups
    replay = replay_of(loop, settings)
    recorded = replay.count
    found = tokens_of(drive(loop, requests()))
    assert replay.count > recorded or backend == "torch"
    stats = loop.stats()
    loop.close()
    assert stats.prefix_cache_hits > 0
    monkeypatch.setattr("octavo.worker.worker.groups_of", whole)
    loop, info = build_core(tiny_config(**settings, memory_bytes=1 << 24), model_files(config))
    assert info.kv_groups == 1
    assert found == tokens_of(drive(loop, requests()))
    loop.close()


def replay_of(loop: EngineLoop, settings: Mapping[str, Any]) -> Replay:
    """Return what replays steps; fail if it is not the kind that this machine has for the settings."""
    replay = runner_of(loop).replay
    fastest = "GraphReplay" if device_of(settings) == "cuda" else "NativeReplay"
    assert type(replay).__name__ == ("NoReplay" if settings.get("attention_backend") == "torch" else fastest)
    return replay


def whole(kinds: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    return (CacheGroup(GroupKind.FULL, tuple(range(len(kinds)))),)


@pytest.mark.parametrize("layout", ["mixed", "mixed, fastest"])
def test_requests_that_displace_each_other_find_what_their_windows_need(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache so small that requests are preempted, and resume with what is left of their blocks in each group."""
    config, backend, groups = LAYOUTS[layout]
    settings = settings_of(backend, max_num_seqs=8, max_model_len=150)
    loop, _ = build_core(tiny_config(**settings, num_blocks=10 * groups), model_files(config))
    found = tokens_of(drive(loop, requests(), at_once=8))
    assert loop.stats().num_preemptions > 0
    loop.close()
    monkeypatch.setattr("octavo.worker.worker.groups_of", whole)
    loop, _ = build_core(tiny_config(**settings, memory_bytes=1 << 24), model_files(config))
    assert found == tokens_of(drive(loop, requests(), at_once=8))
    loop.close()


@pytest.mark.parametrize("layout", ["mixed", "mixed, fastest"])
def test_drafts_that_are_rejected_leave_the_window_where_it_was(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, backend, groups = LAYOUTS[layout]
    settings = settings_of(backend, num_blocks=40 * groups, async_scheduling=True)
    loop, _ = build_core(tiny_config(**settings), model_files(config))
    expected = tokens_of(drive(loop, requests()))
    loop.close()
    prompts = {request.id: request.tokens for request in requests()}
    drafter = DrafterEngine()
    texts = [prompts[name] + tokens for (name, _), tokens in expected.items()]
    with_drafter(monkeypatch, drafter, DrafterWorker(texts, VOCAB))
    loop, info = build_core(tiny_config(**settings), model_files(config))
    assert info.kv_groups == groups
    replay_of(loop, settings)
    assert tokens_of(drive(loop, requests())) == expected
    assert min(drafter.accepted, drafter.rejected) > 10
    loop.close()


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_native_programs_compute_the_same_bits_with_several_tables(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of prompt and answer, in chunks and batches of both kinds of rows."""
    settings = settings_of("native", num_blocks=120, kv_cache_dtype=kind)

    def reported() -> dict[str, list[Any]]:
        asked = [
            msgspec.structs.replace(
                one,
                params=SamplingParams(max_tokens=30, temperature=0, logprobs=3, prompt_logprobs=1, ignore_eos=True),
            )
            for one in requests(4)
        ]
        loop, _ = build_core(tiny_config(**settings), model_files(MIXED))
        entries: dict[str, list[Any]] = {}
        for delta in drive(loop, asked):
            entries.setdefault(delta.id, []).extend([*(delta.prompt_logprobs or []), *(delta.logprobs or [])])
        loop.close()
        return entries

    divided = reported()
    assert all(len(entries) >= 30 for entries in divided.values())
    monkeypatch.setattr("octavo.worker.worker.groups_of", whole)
    assert divided == reported()


def test_native_decoding_holds_what_windows_reach() -> None:
    """A long answer takes more and more blocks in the group of full attention only; each step is one native call."""
    settings = {"max_model_len": 250, "max_num_seqs": 1, "max_num_batched_tokens": 16, "attention_backend": "native"}
    loop, info = build_core(tiny_config(**settings, num_blocks=40), model_files(MIXED))
    assert info.kv_groups == 3
    replay = runner_of(loop).replay
    assert isinstance(replay, NativeReplay)
    params = SamplingParams(max_tokens=230, temperature=0, ignore_eos=True)
    loop.add(GenerateRequest(id="long", tokens=[5] * 16, params=params))
    windows, length = [], 16
    while loop.busy:
        length += sum(len(delta.tokens) for delta in loop.step())
        windows.append(loop.stats().num_blocks_used - (length - 1 + 15) // 16)
    assert info.kv_tokens == 40 * 250 // info.kv_longest
    assert info.kv_longest == 16 + 2 * 5
    assert info.kv_reads == [(0, info.kv_bytes_per_token // 3), (WINDOW, info.kv_bytes_per_token * 2 // 3)]
    assert replay.count >= 228
    loop.check_idle()
    loop.close()
    # A window of 20 tokens lies in three blocks at most, and one more is held until the step has run.
    assert max(windows) <= 2 * 4


def test_a_window_needs_no_room_for_what_it_forgets() -> None:
    """A request of ten times the cache's positions is served, and holds what its window reaches."""
    settings = {"max_model_len": 250, "max_num_seqs": 1, "max_num_batched_tokens": 16, "attention_backend": "torch"}
    loop, info = build_core(tiny_config(**settings, num_blocks=8), model_files(WINDOWED))
    assert info.max_model_len == 250
    request = GenerateRequest(
        id="long", tokens=[5] * 100, params=SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
    )
    most = 0
    loop.add(request)
    while loop.busy:
        loop.step()
        most = max(most, loop.stats().num_blocks_used)
    loop.check_idle()
    loop.close()
    assert most <= 6


def test_groups_have_as_many_layers_as_the_rarest_kind() -> None:
    def groups(*windows: int | None) -> tuple[CacheGroup, ...]:
        return groups_of([attending(window) for window in windows])

    assert groups(None, None, None, None) == (CacheGroup(layers=(0, 1, 2, 3)),)
    assert groups() == ()
    full, *windows = groups(None, 8, 8, 8, None, 8)
    assert full == CacheGroup(layers=(0, 4))
    assert [group.layers for group in windows] == [(1, 2), (3, 5)]
    assert all(group.kind is GroupKind.WINDOW and group.window == 8 for group in windows)
    assert FULL[0].kind is GroupKind.FULL
    assert [len(group.layers) for group in groups(*[None] * 27, 8)] == [4, 4, 4, 4, 4, 4, 3, 1]
