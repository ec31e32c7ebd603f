"""Drafts under a grammar change no token: the mask of each position is that after the drafts before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest
from rank_kit import TWO_RANKS, ranks_in_threads
from toy_drafter import DrafterEngine, News, beside_others, check_same, news_of
from toy_engine import device_of, drive, one_by_one, strict, tiny_config
from toy_models import LLAMA, LLAMA_KV_BYTES_PER_TOKEN, QWEN3, behind, model_files
from toy_tokenizers import byte_level

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.structured import StructuredOutputsParams
from octavo.engine.loop import EngineLoop
from octavo.features.grammar.engine import GrammarEngine
from octavo.features.grammar.payload import Masks
from octavo.features.grammar.worker import GrammarWorker
from octavo.hub.files import ModelFiles
from octavo.sampling.allowed import Allowed
from octavo.schedule.request import Request
from octavo.worker.native_replay import NativeReplay

TOKENIZER = byte_level()
VOCAB = TOKENIZER.get_vocab_size()
OWN = {"vocab_size": VOCAB, "eos_token_id": 2}
FORMS: list[dict[str, Any]] = [
    {"regex": r"(.|\n)*"},
    {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 9}},
    {"regex": "[a-f]{20,40}"},
    {"choice": ["a rather long choice indeed", "a rather short one", "b"]},
    {},
]
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3, "n": 2},
    {"temperature": 0, "frequency_penalty": 0.4, "logprobs": 2},
]
SETTINGS: dict[str, dict[str, Any]] = {
    "no overlap": {},
    "overlap": {"async_scheduling": True},
    "depth 2": {"depth": 2},
    "torch": {"attention_backend": "torch"},
    "torch, overlap, small batches": {"attention_backend": "torch", "async_scheduling": True, "max_num_seqs": 3},
    "preemption": {"memory_bytes": 128 * LLAMA_KV_BYTES_PER_TOKEN, "max_model_len": 112},
    "overlap, preemption": {
        "async_scheduling": True,
        "memory_bytes": 128 * LLAMA_KV_BYTES_PER_TOKEN,
        "max_model_len": 112,
    },
    "overlap, chunked prefill": {"async_scheduling": True, "max_num_batched_tokens": 24, "max_num_seqs": 8},
    "overlap, two ranks": {"async_scheduling": True, **TWO_RANKS},
}


class Drafter(DrafterEngine):
    """Counts the drafts of requests with a grammar, and how many of them are cut."""

    def __init__(self, most: int = 7) -> None:
        super().__init__(most)
        self.shown = 0

    def on_verify(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        if "grammar" in request.spec.options:
            super().on_verify(request, num_drafts, num_accepted)

    def on_drafts(self, request: Request, drafts: Sequence[int]) -> int:
        self.shown += len(drafts)
        return len(drafts)


def requests(count: int = 12, length: int = 24) -> list[GenerateRequest]:
    made = []
    for i in range(count):
        form = FORMS[i % len(FORMS)]
        option = {"grammar": msgspec.Raw(msgspec.msgpack.encode(StructuredOutputsParams(**form)))} if form else {}
        params = SamplingParams(max_tokens=length + 2 * i, **SAMPLED[i % len(SAMPLED)])
        made.append(GenerateRequest(id=f"r{i}", tokens=list(range(10, 20 + 2 * i)), params=params, options=option))
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("tiny")
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return model_files(LLAMA | OWN, folder)


def engine(files: ModelFiles, **settings: Any) -> EngineLoop:
    loop = build_core(tiny_config(**settings), files)[0]
    return strict(loop)


@pytest.fixture(scope="module")
def truth(files: ModelFiles) -> Callable[[str], News]:
    """Each request alone, without drafts, on a device (draws differ between devices)."""

    @cache
    def alone(device: str) -> News:
        loop = engine(files, enable_prefix_caching=False, async_scheduling=False, device=device)
        found = news_of(list(one_by_one(loop, requests())))
        loop.close()
        return found

    return alone


def drafting(monkeypatch: pytest.MonkeyPatch, expected: News, asked: list[GenerateRequest], most: int = 7) -> Drafter:
    """Add a feature that drafts to the engines that are built from now on."""
    prompts = {request.id: request.tokens for request in asked}
    texts = [prompts[name] + tokens for (name, _), (tokens, *_) in expected.items()]
    drafter = Drafter(most)
    beside_others(monkeypatch, drafter, texts)
    return drafter


@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_under_a_grammar_change_nothing(
    name: str, files: ModelFiles, truth: Callable[[str], News], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_in_threads(monkeypatch)
    expected = truth(device_of(SETTINGS[name]))
    drafter = drafting(monkeypatch, expected, requests())
    loop = engine(files, **SETTINGS[name])
    check_same(news_of(list(drive(loop, requests(), at_once=6))), expected)
    assert drafter.accepted > 50
    assert drafter.rejected > 2  # how many depends on when grammars are compiled
    if "preemption" in name:
        assert loop.stats().num_preemptions > 0
    loop.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_where_the_host_knows_them_impossible_drafts_are_not_computed(
    depth: int, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of drafts at random few fit the grammar; only these have room in a step, unless it was launched before."""
    drafter = drafting(monkeypatch, {}, [])
    drafter.opt_in = False
    (asked,) = [one for one in requests() if one.id == "r2"]
    loop = engine(files, depth=depth, attention_backend="torch")
    computed: list[int] = []
    forward = loop._executor.forward
    monkeypatch.setattr(loop._executor, "forward", lambda plan: (computed.extend(plan.num_drafts), forward(plan))[1])
    list(drive(loop, [asked]))
    loop.close()
    assert drafter.shown > 20
    assert (sum(computed) < drafter.shown / 4) == (depth == 0)


def test_native_programs_draw_and_verify_under_masks(
    files: ModelFiles, truth: Callable[[str], News], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [0]
    forward = NativeReplay.forward

    def noting(self: NativeReplay, step: Any, allowed: Allowed | None) -> None:
        seen[0] += allowed is not None and any(step.plan.num_drafts)
        forward(self, step, allowed)

    monkeypatch.setattr(NativeReplay, "forward", noting)
    asked = [replace_logprobs(one) for one in requests()]
    expected = truth("cpu")
    drafting(monkeypatch, expected, asked)
    loop = engine(files, device="cpu", attention_backend="native")
    found = {key: tokens for key, (tokens, *_) in news_of(list(drive(loop, asked, at_once=6))).items()}
    loop.close()
    assert found == {key: tokens for key, (tokens, *_) in expected.items()}
    assert seen[0] > 10


def replace_logprobs(request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(request, params=request.params.replace(logprobs=None))


class Faults:
    """Ways to use the wrong position's mask."""

    @staticmethod
    def first_mask_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
        def fill(self: Any, bits: Any, request: Request, guide: Any, drafts: list[int]) -> dict[int, str]:
            guide.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.strides[0])
            bits[:] = bits[0]
            return {}

        monkeypatch.setattr(GrammarEngine, "_fill_drafted", fill)

    @staticmethod
    def masks_one_position_late(monkeypatch: pytest.MonkeyPatch) -> None:
        allowed = GrammarWorker.allowed

        def late(self: GrammarWorker, slots: Sequence[int], payload: Masks) -> Allowed:
            right = allowed(self, slots, payload)
            rows = [row + (row + 1 < len(slots) and slots[row + 1] == slots[row]) for row in right.rows]
            kept = {row: place for place, row in enumerate(rows)}
            return replace(right, rows=list(kept), words=right.words[list(kept.values())])

        monkeypatch.setattr(GrammarWorker, "allowed", late)

    @staticmethod
    def no_masks_after_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
        allowed = GrammarWorker.allowed

        def first_only(self: GrammarWorker, slots: Sequence[int], payload: Masks) -> Allowed:
            return allowed(self, slots, payload).of([row for row, slot in enumerate(slots) if slots.index(slot) == row])

        monkeypatch.setattr(GrammarWorker, "allowed", first_only)


@pytest.mark.parametrize("fault", [name for name in vars(Faults) if not name.startswith("_")])
def test_the_wrong_positions_mask_is_noticed(
    fault: str, files: ModelFiles, truth: Callable[[str], News], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = truth(device_of({}))
    drafting(monkeypatch, expected, requests())
    getattr(Faults, fault)(monkeypatch)
    loop = engine(files)
    with pytest.raises(AssertionError):
        check_same(news_of(list(drive(loop, requests(), at_once=6))), expected)


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("resident")
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return model_files(QWEN3 | OWN, folder)


ROOM = {"memory_bytes": 1 << 21, "max_num_seqs": 3, "max_num_batched_tokens": 48}


def test_a_device_masks_each_position(resident: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [one for one in requests(8, 3) if one.id in ("r2", "r6")]
    greedy = [msgspec.structs.replace(one, params=SamplingParams(max_tokens=8, temperature=0)) for one in asked]
    plain = engine(resident, device="cpu", attention_backend="torch", **ROOM)
    expected = news_of(list(drive(plain, greedy)))
    plain.close()
    drafter = drafting(monkeypatch, expected, greedy, 3)
    drafter.drafts = lambda request: None  # type: ignore[method-assign]
    loop = engine(resident, **ROOM | behind(monkeypatch) | {"enforce_eager": True})
    check_same(news_of(list(drive(loop, greedy))), expected)
    assert drafter.accepted > 2
    assert drafter.rejected > 0
    loop.close()


RESIDENT: dict[str, Any] = {"overlap": {}, "no overlap": {"async_scheduling": False}, "depth 2": {"depth": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESIDENT)
def test_drafts_under_a_grammar_on_a_device(name: str, resident: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    small, asked = ROOM | behind(monkeypatch), requests(5, 9)
    plain = engine(resident, **small | {"enforce_eager": True, "async_scheduling": False})
    expected = news_of(list(drive(plain, asked)))
    plain.close()
    from toy_graphs import recorded_graphs

    recorded_graphs(monkeypatch)
    drafter = drafting(monkeypatch, expected, asked, 3)
    loop = engine(resident, **small | RESIDENT[name])
    check_same(news_of(list(drive(loop, asked))), expected)
    assert drafter.accepted > 5
    assert drafter.rejected > 2
    loop.close()
