"""Models that a feature adds to the served one: named in requests, listed, and unknown."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from server_kit import HELLO, VOCAB_SIZE, House, ask_now, get_now, make_frontend, saying

from octavo.config import ServerConfig
from octavo.core.errors import InvalidRequestError
from octavo.core.request import GenerateRequest
from octavo.engine.fake import FakeEngine, fake_info
from octavo.engine.protocol import EngineClient
from octavo.server.app import create_app
from octavo.server.process.lifecycle import Lifecycle
from octavo.text.hooks import AddedModel, TextHook

MARK = msgspec.Raw(msgspec.msgpack.encode("red"))


class Colours(TextHook):
    """Adds the model `red`, and any whose name begins with `odd-`, which it does not list."""

    name = "colours"
    body_fields = ("colour",)

    async def models(self, engine: EngineClient) -> list[AddedModel]:
        return [AddedModel("red", "/paint/red", {self.name: MARK})]

    async def find_model(self, engine: EngineClient, name: str) -> AddedModel | None:
        if name.startswith("odd-"):
            return AddedModel(name, "/paint/odd", {self.name: MARK}, parent="red")
        return next((one for one in await self.models(engine) if one.name == name), None)

    def params_of(self, body: Any, *, max_bytes: int) -> dict[str, Any]:
        return {"feature_args": {self.name: body.colour}} if getattr(body, "colour", None) else {}


def house(script: Any = None, config: ServerConfig | None = None, **info: Any) -> House:
    engine = FakeEngine(script or saying("ok"), info=fake_info(name="toy", vocab_size=VOCAB_SIZE, **info))
    frontend = make_frontend(engine)
    frontend.preparer.hooks = (*frontend.preparer.hooks, Colours(frontend.preparer.hooks[0].context))
    lifecycle = Lifecycle()
    return House(create_app(frontend, config, lifecycle=lifecycle), engine, lifecycle)


BODIES = {
    "/v1/chat/completions": HELLO,
    "/v1/chat/completions/batch": {"messages": [HELLO["messages"]]},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {**HELLO, "max_tokens": 4},
    "/inference/v1/generate": {"token_ids": [5, 6]},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [5]},
}
QUIET = {
    "/v1/messages/count_tokens": HELLO,
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5]},
    "/v1/chat/completions/render": HELLO,
    "/v1/completions/render": {"prompt": "Hello"},
}
"""Routes that compute nothing."""


@pytest.mark.parametrize("path", BODIES)
def test_a_request_for_an_added_model_carries_its_option_and_the_answer_its_name(path: str) -> None:
    made = house()
    answer = ask_now(made.app, path, {**BODIES[path], "model": "red"})
    assert answer.status == 200, answer.body
    assert answer.json().get("model", "red") == "red"
    assert [one.options["colours"] for one in made.engine.requests] == [MARK]
    assert ask_now(made.app, path, BODIES[path]).status == 200
    assert "colours" not in made.engine.requests[-1].options


@pytest.mark.parametrize("path", [*BODIES, *QUIET])
def test_unknown_names_are_answered_with_those_there_are(path: str) -> None:
    made = house()
    error = ask_now(made.app, path, {**(BODIES | QUIET)[path], "model": "blue"})
    assert error.status == 404
    told = error.json()["error"]["message"]
    assert told == "The model `blue` does not exist. This server serves `toy`, `red`; ask for one of them."
    assert made.engine.requests == []


@pytest.mark.parametrize("path", QUIET)
def test_routes_that_compute_nothing_know_added_models(path: str) -> None:
    assert ask_now(house().app, path, {**QUIET[path], "model": "odd-1"}).status == 200


def test_streams_carry_the_name() -> None:
    made = house()
    events = ask_now(made.app, "/v1/chat/completions", {**HELLO, "model": "red", "stream": True}).events()
    assert {one["model"] for one in events} == {"red"}
    assert made.engine.requests[0].options["colours"] == MARK


def test_the_list_has_the_added_models_with_root_and_parent() -> None:
    app = house().app
    cards = {card["id"]: card for card in get_now(app, "/v1/models").json()["data"]}
    assert list(cards) == ["toy", "red"]
    assert (cards["toy"]["root"], cards["toy"]["parent"]) == ("toy", None)
    assert (cards["red"]["root"], cards["red"]["parent"]) == ("/paint/red", "toy")
    assert get_now(app, "/v1/models/red").json() == cards["red"]
    assert get_now(app, "/v1/models/odd-1").json()["parent"] == "red"
    assert get_now(app, "/v1/models/blue").error()["param"] == "model"
    theirs = get_now(app, "/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [one["id"] for one in theirs["data"]] == ["toy", "red"]


def test_a_model_that_is_removed_meanwhile_is_as_unknown() -> None:
    def gone(request: GenerateRequest) -> list[int]:
        raise InvalidRequestError("The model `red` does not exist any more.", param="model")

    for stream in (False, True):
        answer = ask_now(house(gone).app, "/v1/completions", {"prompt": "a", "model": "red", "stream": stream})
        assert answer.status == 404
        assert answer.error()["message"] == "The model `red` does not exist any more."


def test_a_field_of_the_same_feature_is_refused_beside_the_model() -> None:
    error = ask_now(house().app, "/v1/completions", {"prompt": "a", "model": "red", "colour": "blue"}).error()
    assert error["param"] == "colour"
    assert "can't be combined with the model `red`" in error["message"]


def test_the_served_name_wins_over_an_added_one() -> None:
    made = house(config=ServerConfig(served_model_name=("red",)))
    assert ask_now(made.app, "/v1/completions", {"prompt": "a", "model": "red"}).status == 200
    assert "colours" not in made.engine.requests[0].options


def test_any_name_is_taken_if_names_are_not_checked() -> None:
    made = house(config=ServerConfig(skip_model_name_validation=True))
    assert ask_now(made.app, "/v1/completions", {"prompt": "a", "model": "blue"}).json()["model"] == "blue"
    assert ask_now(made.app, "/v1/completions", {"prompt": "a", "model": "red"}).json()["model"] == "red"
    assert ["colours" in one.options for one in made.engine.requests] == [False, True]


def test_long_lists_of_names_are_cut() -> None:
    class Many(Colours):
        async def models(self, engine: EngineClient) -> list[AddedModel]:
            return [AddedModel(f"m{number}", "", {}) for number in range(50)]

    made = house()
    frontend = make_frontend(made.engine)
    frontend.preparer.hooks = (Many(frontend.preparer.hooks[0].context),)
    error = ask_now(create_app(frontend), "/v1/completions", {"prompt": "a", "model": "blue"}).error()
    assert "`m18`, and 31 more that /v1/models lists" in error["message"]
