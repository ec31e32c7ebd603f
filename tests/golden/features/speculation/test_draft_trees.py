"""Trees that heads draft are those of a slow reference, at every step of an engine, and change no token."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from test_draft_heads import greedy, random_head, reference, spied
from toy_engine import drive, tiny_config, tokens_of
from toy_models import behind

from octavo.build import build_core
from octavo.core.draft_tree import DraftTree
from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.core.pausing import SleepTag
from octavo.core.request import GenerateRequest
from octavo.features.speculation.heads.drafter import HeadDrafter
from octavo.features.speculation.heads.model import HeadModel
from octavo.hub.resolve import resolve

PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 1, 0)]
TREE = DraftTree.of(PATHS)
ORDER = [(0,), (0, 0), (0, 0, 0), *sorted(set(PATHS) - {(0,), (0, 0), (0, 0, 0)}, key=lambda path: (len(path), path))]


def using(kind: str, head: Path, **more: Any) -> dict[str, Any]:
    return {"method": kind, "model": str(head), "speculative_token_tree": str(PATHS), "adaptive": False, **more}


@pytest.mark.parametrize("accepted", [False, True], ids=["rejected", "accepted"])
@pytest.mark.parametrize(
    "backend", [None, pytest.param("torch", marks=pytest.mark.slow), pytest.param("behind", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_trees_are_the_references(
    kind: str,
    backend: str | None,
    accepted: bool,
    target: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, model = target
    head, weights = random_head(kind, tmp_path / "head")
    if kind == "eagle":
        weights["lm_head.weight"] = model.lm_head.weight.detach()
    proposed = spied(monkeypatch, HeadDrafter)
    if accepted:
        _put_right_tokens(monkeypatch, model)
    settings: dict[str, Any] = {"load_format": "auto", "max_num_batched_tokens": 48, "max_num_seqs": 3}
    if backend == "behind":
        pytest.importorskip("triton")
        from toy_graphs import recorded_graphs  # needs it, too

        recorded_graphs(monkeypatch)
        settings |= behind(monkeypatch)
    else:
        settings["attention_backend"] = backend
    loop, _ = build_core(tiny_config(**settings, speculative_config=using(kind, head)), resolve(str(folder)))
    proposed.clear()  # those of the warm-up
    params = SamplingParams(max_tokens=40 if accepted else 24, temperature=0, ignore_eos=True)
    asked = [
        GenerateRequest(id=str(n), tokens=list(range(3 + n, 3 + n + size)), params=params)
        for n, size in enumerate((1, 7, 25))
    ]
    found = tokens_of(drive(loop, asked))
    trees = [(known, drafts) for known, drafts in proposed if len(drafts) == len(TREE)]
    assert len(trees) > 6
    counts = {one.name: sum(one.values.values()) for one in loop.stats().features}
    assert counts["spec_decode_num_accepted_tokens"] > 8 or not accepted
    for known, drafts in trees:
        for path, token in zip(ORDER, drafts, strict=True):
            assert token == reference(kind, model, weights, known, len(path), ranks=path)[-1]
    with torch.no_grad():
        for request in asked:
            tokens = request.tokens + found[request.id, 0]
            logits = model(torch.tensor([tokens])).logits[0]
            assert logits.argmax(-1)[len(request.tokens) - 1 : -1].tolist() == found[request.id, 0]
    loop.close()


def _put_right_tokens(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Of what is proposed, make each time another path right."""
    propose, following, turn = HeadDrafter.propose, greedy(model), iter(range(10**6))

    def proposed(self: HeadDrafter, drafting: Any, payload: Any) -> Any:
        drafts = copy.deepcopy(propose(self, drafting, payload))
        for row, slot in enumerate(drafting.slots.tolist()):
            if int(drafts.counts[row]) < len(TREE):
                continue
            known = drafting.tokens[slot, : int(drafting.length[slot])].tolist()
            right, chosen = following(known, TREE.chain), next(turn) % len(TREE)
            for i in range(len(TREE)):
                if TREE.precedes[chosen, i]:
                    _swap(drafts.tokens[row], i, right[TREE.depths[i] - 1])
        return drafts

    monkeypatch.setattr(HeadDrafter, "propose", proposed)


def _swap(drafts: torch.Tensor, place: int, token: int) -> None:
    """Put a token there; drafts after the same token stay different."""
    beside = [i for i, parent in enumerate(TREE.parents) if parent == TREE.parents[place] and drafts[i] == token]
    for other in beside:
        drafts[other] = drafts[place]
    drafts[place] = token


@pytest.mark.parametrize(
    ("width", "room", "recorded"),
    [(4, 12, True), pytest.param(9, 48, False, marks=pytest.mark.slow)],
    ids=["small steps", "wide"],
)
def test_trees_are_recorded_where_they_fit(
    width: int,
    room: int,
    recorded: bool,
    target: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts of as many rows as a step has room for, if attention needs nothing from the host for those of a depth."""
    pytest.importorskip("triton")
    from toy_graphs import recorded_graphs  # needs it, too

    replayed = recorded_graphs(monkeypatch)
    head, _ = random_head("eagle", tmp_path / "head")
    proposed = spied(monkeypatch, HeadDrafter)
    paths = [(i, *more) for i in range(width) for more in ((), (0,))]
    settings: dict[str, Any] = {
        "load_format": "auto",
        "max_num_batched_tokens": room,
        "max_num_seqs": 8 if recorded else 1,
    }
    own = using("eagle", head, speculative_token_tree=str(paths))
    loop, _ = build_core(tiny_config(**settings | behind(monkeypatch), speculative_config=own), resolve(str(target[0])))
    proposed.clear()  # those of the warm-up
    params = SamplingParams(max_tokens=len(paths) + 2, temperature=0, ignore_eos=True)
    list(drive(loop, [GenerateRequest(id="r", tokens=[3, 4, 5], params=params)]))
    assert any(len(drafts) == len(paths) for _, drafts in proposed)
    assert bool(replayed["tree"]) == recorded or torch.cuda.is_available()
    loop.close()


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({"use_sliding_window": True}, {}, "only models with full attention in all layers"),
        ({}, {"attention_backend": "reference"}, "the attention backend 'reference' can't verify"),
    ],
    ids=["windows", "backend"],
)
def test_models_that_cannot_verify_trees(
    changes: dict[str, Any], settings: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draft_models import folder_of
    from toy_models import LLAMA, model_files

    windows = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "sliding_window": 16,
        "max_window_layers": 1,
    }
    config = LLAMA | (windows | changes if changes else {})
    head = folder_of(LLAMA | {"num_hidden_layers": 1}, tmp_path / "head")
    with pytest.raises(ConfigError, match=reason):
        build_core(tiny_config(**settings, speculative_config=using("eagle", Path(head))), model_files(config))


def test_a_head_that_sleeps_is_freed(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, finish = [], HeadModel.finish

    def finished(self: HeadModel) -> None:
        made.append(weakref.ref(self))
        finish(self)

    def alive() -> list[bool]:
        gc.collect()
        return [one() is not None for one in made]

    monkeypatch.setattr(HeadModel, "finish", finished)
    head, _ = random_head("eagle", tmp_path / "head")
    settings: dict[str, Any] = {"load_format": "auto", "max_num_batched_tokens": 48, "enable_sleep_mode": True}
    loop, _ = build_core(tiny_config(**settings, speculative_config=using("eagle", head)), resolve(str(target[0])))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    asked = [GenerateRequest(id="r", tokens=[3, 4, 5], params=params)]
    awake = tokens_of(drive(loop, asked))
    assert alive() == [True]
    loop.sleep(1)
    assert alive() == [False]
    loop.wake_up(SleepTag)
    assert tokens_of(drive(loop, asked)) == awake
    assert alive() == [False, True]
    loop.close()
