"""A feature that drafts, for tests: what is right, as far as it knows, with wrong tokens in between; and how the news
of engines with and without it are compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from octavo import build, build_worker
from octavo.core.output import FinishReason, TokenDelta, TokenLogprobs
from octavo.engine.loop import EngineLoop
from octavo.schedule.hooks import EngineHook
from octavo.schedule.request import Request
from octavo.worker.drafts import Drafting, Drafts
from octavo.worker.hooks import WorkerHook
from octavo.worker.runner import Runner

NAME = "drafter"

News = dict[tuple[str, int], tuple[list[int], list[TokenLogprobs], list[TokenLogprobs], FinishReason | None]]


class DrafterEngine(EngineHook):
    """Allows each request a number of drafts of its own, now and then fewer; and counts what became of them."""

    name = NAME
    opt_in = True

    def __init__(self, most: int = 7, seed: int = 0) -> None:
        self.max_drafts = most
        self.accepted = self.rejected = 0
        self._random = random.Random(seed)

    def drafts(self, request: Request) -> int | None:
        own = (request.order * 5 + 2) % (self.max_drafts + 1)
        return own if self._random.random() < 0.8 else self._random.randint(0, own)

    def on_verify(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self.accepted += num_accepted
        self.rejected += num_drafts - num_accepted


class DrafterWorker(WorkerHook):
    """Continues a slot's tokens by the first of some texts that begins with them, each token right with a chance."""

    name = NAME

    def __init__(self, texts: Sequence[Sequence[int]] = (), vocab: int = 131, right: float = 0.75) -> None:
        self._texts = [list(text) for text in texts]
        self._vocab = vocab
        self._right = right
        self._random = random.Random(1)
        self.asked = 0

    def propose(self, drafting: Drafting, payload: Any) -> Drafts | None:
        self.asked += 1
        if self._random.random() < 0.05:
            return None
        limits = drafting.limits.tolist()
        counts = [limit if self._random.random() < 0.8 else self._random.randint(0, limit) for limit in limits]
        width = max(limits) + 1
        tokens = [self._guess(drafting, slot, width) for slot in drafting.slots.tolist()]
        device = drafting.slots.device
        return Drafts(torch.tensor(tokens, device=device), torch.tensor(counts, device=device))

    def _guess(self, drafting: Drafting, slot: int, count: int) -> list[int]:
        known = drafting.tokens[slot, : int(drafting.length[slot])].tolist()
        text = next((text for text in self._texts if text[: len(known)] == known), [])
        right = text[len(known) : len(known) + count]
        right += [self._random.randrange(self._vocab) for _ in range(count - len(right))]
        return [t if self._random.random() < self._right else self._random.randrange(self._vocab) for t in right]


def corrected(hook: WorkerHook, texts: Sequence[Sequence[int]], right: float = 0.8, seed: int = 2) -> None:
    """Replace the tokens that a drafter proposes by those of the text that begins like the slot's, each with a chance.

    What random heads propose is hardly ever accepted.
    """
    propose, rng = hook.propose, random.Random(seed)
    known_texts = [list(text) for text in texts]

    def proposed(drafting: Drafting, payload: Any) -> Drafts | None:
        drafts = propose(drafting, payload)
        if drafts is None:
            return None
        tokens = drafts.tokens.clone()
        for row, slot in enumerate(drafting.slots.tolist()):
            known = drafting.tokens[slot, : int(drafting.length[slot])].tolist()
            text = next((text for text in known_texts if text[: len(known)] == known), [])
            for place, token in enumerate(text[len(known) : len(known) + tokens.shape[1]]):
                if rng.random() < right:
                    tokens[row, place] = token
        return Drafts(tokens, drafts.counts)

    hook.propose = proposed  # type: ignore[method-assign]


def with_drafter(monkeypatch: pytest.MonkeyPatch, engine: DrafterEngine, worker: WorkerHook) -> None:
    """Engines that are built from now on have this feature, and no other."""
    monkeypatch.setattr("octavo.build.build_engine_halves", lambda _: [engine])
    monkeypatch.setattr("octavo.build_worker.build_worker_halves", lambda _: [worker])


def beside_others(monkeypatch: pytest.MonkeyPatch, engine: DrafterEngine, texts: Sequence[Sequence[int]]) -> None:
    """Engines that are built from now on have this feature besides the others; each rank has a drafter of its own."""
    engine_halves, worker_halves = build.build_engine_halves, build_worker.build_worker_halves
    monkeypatch.setattr(build, "build_engine_halves", lambda context: [engine, *engine_halves(context)])
    monkeypatch.setattr(
        build_worker,
        "build_worker_halves",
        lambda context: [DrafterWorker(texts, context.vocab_size), *worker_halves(context)],
    )


def news_of(deltas: list[TokenDelta]) -> News:
    """Of each choice its tokens, their log-probabilities, its prompt's, and how it ended."""
    found: News = {}
    for delta in deltas:
        assert delta.error is None, delta.error
        tokens, logprobs, prompt, _ = found.get((delta.id, delta.index), ([], [], [], None))
        parts = tokens + delta.tokens, logprobs + (delta.logprobs or []), prompt + (delta.prompt_logprobs or [])
        found[delta.id, delta.index] = *parts, delta.finish
    return found


def check_same(found: News, expected: News) -> None:
    assert {key: (one[0], one[3]) for key, one in found.items()} == {k: (one[0], one[3]) for k, one in expected.items()}
    for key, (_, logprobs, prompt, _) in found.items():
        for mine, other in ((logprobs, expected[key][1]), (prompt, expected[key][2])):
            assert [(e.rank, e.top_ids) for e in mine] == [(e.rank, e.top_ids) for e in other]
            assert [e.logprob for e in mine] == pytest.approx([e.logprob for e in other], abs=1e-4)
            assert [e.top_logprobs for e in mine] == [pytest.approx(e.top_logprobs, abs=1e-4) for e in other]


def runner_of(loop: EngineLoop) -> Runner:
    assert isinstance(loop._executor, Runner)
    return loop._executor
