"""What users say about adapters: in HTTP bodies, in Python, and on the routes that load and unload them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from server_kit import HELLO, TOKENIZER, VOCAB_SIZE, ask, ask_now, get_now, make_frontend

from octavo.core.errors import InvalidRequestError, ModelFileError
from octavo.core.params import SamplingParams
from octavo.core.stats import FeatureMetric
from octavo.engine.fake import FakeEngine, fake_info
from octavo.features.lora.api import AdapterIds, LoRARequest
from octavo.features.lora.requests import (
    CHANGES,
    Adapter,
    LoraInfo,
    Part,
    already_loaded,
    decode,
    encode,
    gone,
    not_loaded,
    selection_of,
)
from octavo.features.lora.text import LoraText
from octavo.python_api.inputs import feature_arguments
from octavo.server.app import create_app
from octavo.text.frontend import Frontend

PROMPT = {"prompt": "a"}


class Adapters:
    """An engine half of the simplest kind, behind a scripted engine."""

    def __init__(self, *, updates: bool = True, enabled: bool = True, added_tokens: int = 0, **info: Any) -> None:
        facts = LoraInfo(max_rank=64, max_adapters=8, updates=updates, added_tokens=added_tokens)
        here = {"features": ["lora"], "feature_info": {"lora": msgspec.Raw(msgspec.msgpack.encode(facts))}}
        known = fake_info(name="toy", vocab_size=VOCAB_SIZE, **(here if enabled else {}), **info)
        self.there = {"red": Adapter(name="red", path="/red", rank=8), "blue": Adapter(name="blue", path="/blue")}
        self.changes = 0
        self.engine = FakeEngine(self._answer, info=known)
        for method in ("list", "find", "load", "unload"):
            self.engine.answers["lora", method] = getattr(self, method)
        self.frontend = make_frontend(self.engine)
        self.app = create_app(self.frontend)
        self._tell()

    def _answer(self, request: Any) -> list[int]:
        for part in decode(request.options["lora"]) if "lora" in request.options else ():
            if part.name not in self.there:
                raise gone(part.name)
        return TOKENIZER.encode("ok", add_special_tokens=False)

    def _tell(self) -> None:
        self.engine.current.features = [FeatureMetric(CHANGES, "counter", "", "", {"": float(self.changes)})]

    def list(self, args: dict[str, Any]) -> Any:
        return {"adapters": [msgspec.to_builtins(one) for one in self.there.values()]}

    def find(self, args: dict[str, Any]) -> Any:
        if args["name"] == "broken":
            raise ModelFileError("/adapters/broken has no adapter_config.json.")
        return {"adapter": msgspec.to_builtins(self.there.get(args["name"]))}

    def load(self, args: dict[str, Any]) -> Any:
        if args["path"] == "/broken":
            raise ModelFileError("/broken has no adapter_config.json.")
        if args["name"] in self.there and not args["in_place"]:
            raise already_loaded(args["name"])
        self.there[args["name"]] = Adapter(name=args["name"], path=args["path"])
        self.changes += 1
        self._tell()
        return {"adapter": msgspec.to_builtins(self.there[args["name"]])}

    def unload(self, args: dict[str, Any]) -> Any:
        if args["name"] not in self.there:
            raise not_loaded(args["name"])
        del self.there[args["name"]]
        self.changes += 1
        self._tell()
        return {}

    @property
    def calls(self) -> list[str]:
        return [command[2] for command in self.engine.commands if command[0] == "call"]

    @property
    def asked(self) -> list[tuple[Part, ...]]:
        return [decode(one.options["lora"]) if "lora" in one.options else () for one in self.engine.requests]


def test_an_adapter_is_a_model() -> None:
    made = Adapters()
    answer = ask_now(made.app, "/v1/chat/completions", {**HELLO, "model": "red"})
    assert (answer.status, answer.json()["model"]) == (200, "red")
    assert made.asked == [(Part("red"),)]
    cards = {card["id"]: card for card in get_now(made.app, "/v1/models").json()["data"]}
    assert [(name, card["root"], card["parent"]) for name, card in cards.items()] == [
        ("toy", "toy", None),
        ("red", "/red", "toy"),
        ("blue", "/blue", "toy"),
    ]
    error = ask_now(made.app, "/v1/completions", {**PROMPT, "model": "green"}).error()
    assert error["message"].startswith("The model `green` does not exist. This server serves `toy`, `red`, `blue`;")


def test_the_core_is_asked_once_for_a_name_until_adapters_change() -> None:
    made = Adapters()
    for _ in range(3):
        assert ask_now(made.app, "/tokenize", {**PROMPT, "model": "red"}).status == 200
    assert made.calls == ["find"]
    made.unload({"name": "red"})
    assert ask_now(made.app, "/tokenize", {**PROMPT, "model": "red"}).status == 404
    assert made.calls == ["find", "find", "list"]


def test_an_adapter_that_went_away_unheard_is_as_unknown() -> None:
    made = Adapters()
    assert ask_now(made.app, "/v1/completions", {**PROMPT, "model": "red"}).status == 200
    del made.there["red"]  # by another process, whose news has not arrived
    for stream in (False, True):
        error = ask_now(made.app, "/v1/completions", {**PROMPT, "model": "red", "stream": stream}).error()
        assert (error["code"], error["message"]) == (404, "The model `red` does not exist.")


def test_a_file_that_cannot_be_used_is_named_in_the_error() -> None:
    error = ask_now(Adapters().app, "/v1/completions", {**PROMPT, "model": "broken"}).error()
    assert (error["code"], error["param"]) == (400, "model")
    assert "/adapters/broken has no adapter_config.json." in error["message"]


@pytest.mark.parametrize(
    ("field", "value", "parts"),
    [
        ("loras", "red", (Part("red"),)),
        ("loras", [{"name": "red", "weight": 0.5}, "blue"], (Part("red", 0.5), Part("blue"))),
        ("lora_request", {"lora_name": "red"}, (Part("red"),)),
        ("lora_path", ["red", "blue"], (Part("red"), Part("blue"))),
    ],
)
def test_a_request_may_add_up_several(field: str, value: Any, parts: tuple[Part, ...]) -> None:
    made = Adapters()
    for path, body in (("/v1/completions", PROMPT), ("/v1/messages", HELLO | {"max_tokens": 3})):
        answer = ask_now(made.app, path, {**body, field: value})
        assert (answer.status, answer.json()["model"]) == (200, "toy"), answer.body
    assert made.asked == [parts, parts]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"loras": 5}, "loras.0", "must be an adapter's name"),
        ({"loras": [{"name": "red", "weight": "x"}]}, "loras.0.weight", "finite number"),
        ({"loras": [{"weight": 1}]}, "loras.0.name", "must be an adapter's name"),
        ({"loras": ["red", "red"]}, "loras", "names an adapter twice"),
        ({"loras": [f"a{number}" for number in range(9)]}, "loras", "1 to 8 adapters"),
        ({"loras": "red", "lora_path": "red"}, "loras", "mean the same"),
        ({"loras": "red", "model": "blue"}, "loras", "can't be combined with the model `blue`"),
    ],
)
def test_wrong_lists_are_refused(body: dict[str, Any], param: str, says: str) -> None:
    error = ask_now(Adapters().app, "/v1/completions", PROMPT | body).error()
    assert (error["code"], error["param"]) == (400, param)
    assert says in error["message"]


def test_an_engine_without_adapters_says_so() -> None:
    made = Adapters(enabled=False)
    assert ask_now(made.app, "/v1/completions", {**PROMPT, "model": "red"}).status == 404
    error = ask_now(made.app, "/v1/completions", {**PROMPT, "loras": ["red"]}).error()
    assert (error["code"], error["param"]) == (400, "loras")
    assert "serves no LoRA adapters" in error["message"]
    assert ask_now(made.app, "/v1/completions", {**PROMPT, "loras": []}).status == 200
    assert "serves no adapters" in ask_now(made.app, "/v1/load_lora_adapter", {}).error()["message"]
    assert made.calls == []


def test_loading_and_unloading() -> None:
    made = Adapters()
    wish = {"lora_name": "green", "lora_path": "/green"}
    answer = ask_now(made.app, "/v1/load_lora_adapter", wish)
    assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'green' added successfully.")
    assert ask_now(made.app, "/v1/completions", {**PROMPT, "model": "green"}).status == 200
    again = ask_now(made.app, "/v1/load_lora_adapter", wish)
    assert again.status == 400
    assert "set 'load_inplace' to True" in again.error()["message"]
    other = wish | {"lora_path": "/other", "load_inplace": True}
    assert ask_now(made.app, "/v1/load_lora_adapter", other).status == 200
    assert made.there["green"].path == "/other"
    answer = ask_now(made.app, "/v1/unload_lora_adapter", {"lora_name": "green"})
    assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'green' removed successfully.")
    missing = ask_now(made.app, "/v1/unload_lora_adapter", {"lora_name": "green"})
    assert (missing.status, missing.error()["message"]) == (404, "The lora adapter 'green' cannot be found.")
    assert ask_now(made.app, "/v1/completions", {**PROMPT, "model": "green"}).status == 404


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("load", {"lora_name": "a"}, "Both 'lora_name' and 'lora_path' must be provided."),
        ("load", {"lora_name": "toy", "lora_path": "/a"}, "is a name of the served model"),
        ("load", {"lora_name": "a", "lora_path": "/broken"}, "/broken has no adapter_config.json."),
        ("unload", {}, "'lora_name' needs to be provided to unload a LoRA adapter."),
    ],
)
def test_wrong_wishes(path: str, body: dict[str, Any], says: str) -> None:
    answer = ask_now(Adapters().app, f"/v1/{path}_lora_adapter", body)
    assert answer.status == 400
    assert says in answer.error()["message"]


def test_the_routes_need_their_flag() -> None:
    made = Adapters(updates=False)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        error = ask_now(made.app, path, {"lora_name": "a", "lora_path": "/a"}).error()
        assert error["code"] == 404
        assert error["message"].endswith("unless the server is started with --allow-runtime-lora-updating.")
    assert made.calls == []


def test_many_at_once_get_their_own() -> None:
    made = Adapters()

    async def all_of_them() -> list[str]:
        names = ["red", "blue", "toy"] * 5
        bodies = [{**PROMPT, "model": name} for name in names]
        answers = await asyncio.gather(*(ask(made.app, "/v1/completions", body) for body in bodies))
        assert [one.json()["model"] for one in answers] == names
        return names

    names = asyncio.run(all_of_them())
    assert sorted(made.asked, key=str) == sorted((() if name == "toy" else (Part(name),) for name in names), key=str)


def hook_of(made: Adapters) -> tuple[Frontend, LoraText]:
    hook = made.frontend.preparer.hook("lora")
    assert isinstance(hook, LoraText)
    return made.frontend, hook


def test_only_requests_of_adapters_may_have_added_tokens() -> None:
    """Here up to the most that any may add; the engine core knows how many each has."""
    frontend, _ = hook_of(Adapters(added_tokens=2))
    added, option = [VOCAB_SIZE, VOCAB_SIZE + 1], {"lora": encode((Part("red"),))}
    params = SamplingParams(max_tokens=2, logit_bias={VOCAB_SIZE + 1: 2.0})
    assert frontend.prepare(added, params, options=option).tokens == added
    assert frontend.prepare(added, params.replace(feature_args={"lora": (Part("red"),)})).tokens == added
    for tokens, given in ((added, {}), ([VOCAB_SIZE + 2], {"options": option}), ([1], {})):
        with pytest.raises(InvalidRequestError, match=r"out.of.vocab"):
            frontend.prepare(tokens, params, **given)


def test_python_names_one_for_all_or_one_each() -> None:
    frontend, _ = hook_of(Adapters())
    red, blue = LoRARequest("red", 1, "/red"), LoRARequest("blue", 2, "/blue", weight=0.5)

    def read(value: Any, count: int) -> tuple[list[str], list[tuple[Part, ...]]]:
        asked = feature_arguments(frontend.preparer.hooks, count, lora_request=value)
        return [args["name"] for _, _, args in asked.calls], [
            decode(one["lora"]) if "lora" in one else () for one in asked.options
        ]

    assert read(None, 2) == ([], [(), ()])
    assert read(red, 2) == (["red"], [(Part("red"),), (Part("red"),)])
    assert read([red, None], 2) == (["red"], [(Part("red"),), ()])
    assert read([[red, blue], "green"], 2) == (["red", "blue"], [(Part("red"), Part("blue", 0.5)), (Part("green"),)])
    with pytest.raises(InvalidRequestError, match="2 entries for 3 prompts"):
        read([red, blue], 3)
    with pytest.raises(InvalidRequestError, match="must be a LoRARequest"):
        read(object(), 1)
    with pytest.raises(InvalidRequestError, match="lora_int_id 1 is the adapter 'red'"):
        read(LoRARequest("other", 1, "/other"), 1)


def test_numbers_of_adapters() -> None:
    ids = AdapterIds()
    ids.note(LoRARequest("red", 7, "/red"))
    assert ids.numbers(["blue", "red", "green"]) == {1, 7, 2}
    assert ids.numbers(["green", "red"]) == {2, 7}
    assert (ids.name_of(7), ids.name_of(2), ids.name_of("x")) == ("red", "green", "x")
    assert ids.name_of(LoRARequest("y")) == "y"
    with pytest.raises(InvalidRequestError, match="No adapter has this number"):
        ids.name_of(1)


def test_the_number_of_an_adapter_that_is_gone_is_free() -> None:
    """Also that of one that could not be loaded."""
    ids = AdapterIds()
    ids.check(LoRARequest("wrong", 7, "/nowhere"))
    ids.note(LoRARequest("red", 7, "/red"))
    with pytest.raises(InvalidRequestError, match=r"lora_int_id 7 is the adapter 'red'; .* or remove that adapter"):
        ids.check(LoRARequest("blue", 7, "/blue"))
    ids.forget("red")
    ids.note(LoRARequest("blue", 7, "/blue"))
    assert ids.name_of(7) == "blue"


@pytest.mark.parametrize(("name", "number"), [("", 1), ("a", 0), ("a", True), (None, 1)])
def test_wrong_requests_in_python(name: Any, number: Any) -> None:
    with pytest.raises(InvalidRequestError):
        LoRARequest(name, number, "/a")


def test_a_selection_survives_the_wire() -> None:
    made = selection_of([{"name": "a", "weight": -2}, "b"], "loras")
    assert made == (Part("a", -2.0), Part("b", 1.0))
