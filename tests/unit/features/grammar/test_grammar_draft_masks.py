"""The masks of a row with drafts, one for each position; and what becomes of a matcher that fails at one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from toy_tokenizers import byte_level

from octavo.core.plan import PlanDraft
from octavo.core.structured import StructuredOutputsParams
from octavo.features.grammar import engine as engine_module
from octavo.features.grammar.compiler import Compiler
from octavo.features.grammar.engine import GrammarEngine
from octavo.features.grammar.payload import Masks
from octavo.features.grammar.worker import GrammarWorker
from octavo.text.tokenizers.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_level(), named_tokens={"eos_token": "</s>"})
EOS = 2
VOCAB = TOKENIZER.vocab_size
COMPILER = Compiler(lambda: TOKENIZER, VOCAB, (EOS,))


def ids(text: str) -> list[int]:
    return [token for letter in text for token in TOKENIZER.encode(letter)]


@dataclass(eq=False)
class Row:
    """What the engine half reads of a request."""

    spec: Any
    tokens: list[int] = field(default_factory=lambda: [9, 9])
    num_prompt: int = 2
    inflight: int = 1
    finish: None = None


class Life:
    """Requests of the engine half, by the regular expressions that they follow, and the drafts of their next row."""

    def __init__(self, *forms: str) -> None:
        self.hook = GrammarEngine("grammar", COMPILER)
        self.rows: list[Any] = []
        self.drafts: list[list[int]] = []
        for form in forms:
            raw = msgspec.Raw(msgspec.msgpack.encode(StructuredOutputsParams(regex=form)))
            COMPILER.open(raw).result()
            self.rows.append(Row(SimpleNamespace(options={"grammar": raw})))
            self.drafts.append([])
            assert self.hook.admit(self.rows[-1], 1) == 1

    def write(self, row: int, text: str, drafts: list[int]) -> int:
        """Append a text, then show drafts; return how many may be accepted."""
        for token in ids(text):
            self.rows[row].tokens.append(token)
            self.hook.on_commit(self.rows[row], [token])
        self.drafts[row] = drafts
        return self.hook.on_drafts(self.rows[row], drafts)

    def masks(self, *room: int) -> Masks:
        counts = [1 + drafts for drafts in room]
        slots = [3 + row for row in range(len(self.rows))]
        plan = PlanDraft(slots=slots, num_tokens=counts, num_drafts=list(room), samples=[True] * len(room))
        self.hook.on_plan(plan, self.rows)
        found: Masks = plan.payload["grammar"]
        return found


def alone(form: str, text: str) -> NDArray[np.int32]:
    """The mask after a text, by a matcher that has read nothing else."""
    raw = msgspec.Raw(msgspec.msgpack.encode(StructuredOutputsParams(regex=form)))
    matcher = COMPILER.open(raw).result().matcher.deep_copy()
    assert matcher.try_consume_tokens(ids(text)) == len(ids(text))
    words = np.zeros(-(-VOCAB // 32), dtype=np.int32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return words


def words_of(masks: Masks) -> NDArray[np.int32]:
    return np.frombuffer(masks.bits, dtype=np.int32).reshape(len(masks.slots), -1)


def test_each_position_has_the_mask_after_the_drafts_before_it() -> None:
    life = Life("[ab]{3}c", "(dog|cat)s?", "x+")
    assert life.write(0, "a", ids("bbz")) == 2
    assert life.write(1, "do", ids("gs")) == 2
    assert life.write(2, "x", ids("zx")) == 0
    masks = life.masks(3, 1, 2)
    assert masks.slots == [3, 3, 3, 4, 4, 5]
    expected = [("[ab]{3}c", "a"), ("[ab]{3}c", "ab"), ("[ab]{3}c", "abb")]
    expected += [("(dog|cat)s?", "do"), ("(dog|cat)s?", "dog"), ("x+", "x")]
    for found, (form, text) in zip(words_of(masks), expected, strict=True):
        assert (found == alone(form, text)).all(), text
    assert not masks.errors
    for row, text in enumerate(("a", "do", "x")):  # the matchers are where they were
        assert life.write(row, "", []) == 0
        assert (words_of(life.masks(0, 0, 0))[row] == alone(("[ab]{3}c", "(dog|cat)s?", "x+")[row], text)).all()


def test_drafts_may_pass_the_end_of_an_output() -> None:
    """After it nothing is kept, so that any mask will do; the matcher goes back to where it was."""
    life = Life("[ab]{3}")
    drafts = [*ids("bb"), EOS, *ids("b")]
    assert life.write(0, "a", drafts) >= 2
    assert not life.masks(4).errors
    assert life.hook.on_commit(life.rows[0], ids("b")) is False
    assert life.hook.on_commit(life.rows[0], ids("b")) is True


def test_the_worker_half_gives_each_position_its_row() -> None:
    """Slot 7 has two drafts; the grammar allows the first. Slot 4 has no grammar and one draft."""
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (3, 3), dtype=np.int32)
    allowed = GrammarWorker("grammar").allowed([4, 4, 7, 7, 7, 9], Masks([9, 7, 7], words.data.cast("B"), {2: "why"}))
    assert (allowed.rows, allowed.errors) == ([5, 2, 3], {3: "why"})
    assert (allowed.words == words).all()


class Failing:
    """A matcher that is in an error from its nth mask on."""

    def __init__(self, matcher: Any, masks: int) -> None:
        self._matcher, self._left = matcher, masks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        self._left -= 1
        self._matcher.unsafe_compute_mask_ptr(address, size)

    def is_error(self) -> bool:
        return self._left <= 0

    def get_error(self) -> str:
        return "too many items"


def test_an_error_at_a_draft_is_that_positions_alone() -> None:
    """Without drafts the request would meet it only after these tokens, which the model may not write."""
    life = Life("[ab]{5}")
    life.write(0, "a", ids("bab"))
    guide = life.hook._guides[life.rows[0]]
    guide.matcher = Failing(guide.matcher, 3)  # type: ignore[assignment]
    masks = life.masks(3)
    assert list(masks.errors) == [2]
    assert "too many items" in masks.errors[2]
    assert (words_of(masks)[1] == alone("[ab]{5}", "ab")).all()
    assert life.hook.drafts(life.rows[0]) == 0, "the same would happen again"
    life.write(0, "b", [])
    after = life.masks(0)
    assert not after.errors
    assert (words_of(after)[0] == alone("[ab]{5}", "ab")).all()


def test_costly_masks_end_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    life = Life("[ab]{5}")
    life.write(0, "a", ids("bab"))
    assert life.hook.drafts(life.rows[0]) is None
    monkeypatch.setattr(engine_module, "perf_counter", lambda: float(next(clock)))
    life.masks(3)
    assert life.hook.drafts(life.rows[0]) == 0
