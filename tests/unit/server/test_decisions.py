"""Questions about an input, answered by the probabilities of the next token."""

from __future__ import annotations

import math
from typing import Any

import pytest
from server_kit import TOKENIZER, House, ask_now, make_house, saying

from octavo.server.openai.decide.protocol import PredicateQuestion, ScoreQuestion
from octavo.server.openai.decide.questions import answer_to, labels_for

PATH = "/v1/decisions"
PREDICATE = {"type": "predicate", "instructions": "Is it broken?"}
CHOICE = {
    "type": "choice",
    "name": "where",
    "instructions": [{"type": "input_text", "text": "Who"}, {"type": "input_json", "data": {"a": 1}}],
    "choices": [{"value": "shop", "description": "sells"}, {"value": True}, {"value": "true"}],
}
SCORE = {"type": "score", "instructions": "How bad?", "levels": [{"label": "fine"}, {"label": "bad"}]}


@pytest.fixture
def house() -> House:
    return make_house(saying("B"))


def ask(house: House, *questions: dict[str, Any], **fields: Any) -> Any:
    return ask_now(house.app, PATH, {"input": "A vase.", "questions": list(questions)} | fields)


def test_each_kind_of_question_has_its_answer(house: House) -> None:
    made = ask(house, PREDICATE, CHOICE, SCORE).json()
    predicate, choice, score = made["answers"]
    rest = {one["probability"] for one in choice["probabilities"] if one["value"] is not True}
    assert predicate.keys() == {"type", "name", "probability"}
    assert predicate["probability"] < 0.5  # B, which was said, is what is not true
    assert (choice["name"], choice["choice"], len(rest)) == ("where", True, 1)
    assert [one["value"] for one in choice["probabilities"]] == ["shop", True, "true"]
    assert sum(one["probability"] for one in choice["probabilities"]) == pytest.approx(1)
    assert choice["confidence"] == pytest.approx(math.exp(-0.5))
    assert [(one["value"], one["label"]) for one in score["probabilities"]] == [(0, "fine"), (1, "bad")]
    assert score["score"] == pytest.approx(score["probabilities"][1]["probability"])
    usage, asked = made["usage"], sum(len(request.tokens) for request in house.engine.requests)
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (asked, 3, asked + 3)
    assert usage["input_tokens_details"].keys() == {"cached_tokens", "cache_write_tokens"}


def test_the_question_follows_what_it_is_about(house: House) -> None:
    turns = [
        {"role": "developer", "content": "Be strict."},
        {"role": "user", "content": [{"type": "input_text", "text": "A vase."}]},
    ]
    assert ask(house, CHOICE, input=turns).status == 200
    text = TOKENIZER.decode(house.engine.requests[-1].tokens)
    assert text.startswith('[system]Be strict.\n[user]A vase.\n\nWho\n{"a": 1}\n')
    assert "A. shop: sells\nB. true\nC. true\n" in text
    assert text.endswith("[assistant]")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE | {"type": "guess"}]}, "questions"),
        ({"questions": [CHOICE | {"choices": [{"value": "a"}]}]}, "choices"),
        (
            {"questions": [CHOICE | {"choices": [{"value": str(n)} for n in range(200)]}]},
            "questions.0 must have at most",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text input only"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": "x" * 9000}, "input"),
        ({"input": 5}, "input"),
    ],
)
def test_what_can_not_be_decided(house: House, fields: dict[str, Any], says: str) -> None:
    answer = ask_now(house.app, PATH, {"input": "A vase.", "questions": [PREDICATE]} | fields)
    assert answer.status == 400
    assert says in answer.error()["message"]
    assert not house.engine.requests


def test_the_model_must_be_known(house: House) -> None:
    assert ask(house, PREDICATE, model="other").status == 404
    assert ask(house, PREDICATE, colour=1).json()["warnings"]


def test_options_that_are_all_unlikely_still_add_up() -> None:
    levels: Any = [{"label": name} for name in "abc"]
    answer: Any = answer_to(ScoreQuestion(type="score", instructions="", levels=levels), [-9000.0, -9001.0, -9000.0])
    assert sum(one.probability for one in answer.probabilities) == pytest.approx(1)
    assert answer.score == pytest.approx(1)
    likely: Any = answer_to(PredicateQuestion(type="predicate", instructions=""), [-0.1, -3.0])
    assert likely.probability == pytest.approx(1 / (1 + math.exp(-2.9)))


def test_names_of_options_are_one_token_each() -> None:
    labels = labels_for(30, TOKENIZER, "x")
    assert list(labels)[:26] == list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert len(set(labels.values())) == 30
