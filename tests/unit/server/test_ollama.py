"""Ollama's API: requests become chats and completions, and answers are told in lines."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from server_kit import TOKENIZER, VOCAB_SIZE, Answer, House, ask_now, get_now, make_house, saying
from test_engine_aborts import aborted
from test_tools import CALL, CLOCK, CLOCK_CALL, TOOL, WITH_TOOLS

from octavo.config import ServerConfig
from octavo.engine.fake import FakeEngine, fake_info
from octavo.server.app import create_app
from octavo.server.ollama.protocol import OllamaChatBody
from octavo.server.ollama.translate import chat_of
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend

THINKING = (
    "{# </think> #}" + WITH_TOOLS + "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
)
HELLO = {"model": "toy", "messages": [{"role": "user", "content": "Hello"}]}
PROMPT = {"model": "toy", "prompt": "Hello"}


class Place:
    def __init__(self, text: str, template: str = WITH_TOOLS) -> None:
        info = fake_info(name="toy", vocab_size=VOCAB_SIZE, features=["grammar"])
        self.engine = FakeEngine(saying(text), info=info)
        frontend = Frontend(self.engine, TOKENIZER, info, chat=ChatTemplate(template, TOKENIZER))
        self.app = create_app(frontend, ServerConfig())

    @property
    def prompt(self) -> str:
        return TOKENIZER.decode(self.engine.requests[-1].tokens, skip_special_tokens=False)


@pytest.fixture
def house() -> House:
    return make_house(saying("Bonjour, monde"))


def lines(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.body.decode().splitlines()]


def both(app: Any, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer and the objects of the stream, which is the default."""
    whole = ask_now(app, path, body | {"stream": False})
    assert whole.status == 200, whole.body
    return whole.json(), lines(ask_now(app, path, body))


def test_a_chat_in_lines_and_whole(house: House) -> None:
    whole, parts = both(house.app, "/api/chat", HELLO)
    assert whole["message"] == {"role": "assistant", "content": "Bonjour, monde"}
    assert "".join(part["message"]["content"] for part in parts) == "Bonjour, monde"
    assert len(parts) > 2
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    for last in (whole, parts[-1]):
        assert (last["model"], last["done"], last["done_reason"]) == ("toy", True, "stop")
        assert (last["eval_count"], last["prompt_eval_count"]) == (15, len("[user]Hello\n[assistant]"))
        assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 0
        assert last["created_at"].endswith("Z")


def test_options_become_sampling_parameters(house: House) -> None:
    options = {
        "num_predict": 4,
        "temperature": 0,
        "top_k": 3,
        "repeat_penalty": 1.5,
        "seed": -1,
        "stop": ["x"],
        "num_ctx": 8,
    }
    whole, parts = both(house.app, "/api/chat", HELLO | {"options": options})
    assert whole["message"]["content"] == "Bonj"
    assert (whole["done_reason"], parts[-1]["done_reason"]) == ("length", "length")
    assert "warnings" not in whole
    params = house.engine.requests[-1].params
    assert (params.temperature, params.top_k, params.repetition_penalty, params.seed) == (0, 3, 1.5, None)
    assert params.stop == ["x"]
    assert ask_now(house.app, "/api/chat", HELLO | {"options": {"num_predict": -1}}).status == 200


def test_unknown_options_are_told_and_unsupported_ones_refused(house: House) -> None:
    told = ask_now(house.app, "/api/chat", HELLO | {"stream": False, "options": {"num_wishes": 3}}).json()
    assert "num_wishes" in told["warnings"][0]
    refused = ask_now(house.app, "/api/chat", HELLO | {"options": {"typical_p": 0.5}})
    assert (refused.status, refused.json()["param"]) == (400, "typical_p")
    assert ask_now(house.app, "/api/chat", HELLO | {"options": {"typical_p": 1.0}}).status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_errors_name_the_fields_of_the_client(house: House, stream: bool) -> None:
    answer = ask_now(house.app, "/api/chat", HELLO | {"stream": stream, "options": {"num_predict": 0}})
    assert answer.status == 400
    error = answer.json()
    assert list(error) == ["error", "param"]
    assert error["param"] == "options.num_predict"
    assert "options.num_predict" in error["error"]
    assert "max_tokens" not in error["error"]
    for body, field in (({"model": "toy", "messages": 3}, "messages"), ({"messages": []}, "model")):
        assert field in ask_now(house.app, "/api/chat", body).json()["error"]


def test_the_content_type_matters_only_to_pages(house: House) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert ask_now(house.app, "/api/chat", HELLO, headers=form).status == 200
    refused = ask_now(house.app, "/api/chat", HELLO, headers=form | {"origin": "http://elsewhere"})
    assert refused.status == 415
    assert ask_now(house.app, "/v1/chat/completions", HELLO, headers=form).status == 415


def test_errors_at_the_door_are_in_the_same_form() -> None:
    house = make_house(saying("x"), ServerConfig(api_keys=("key",)))
    refused = ask_now(house.app, "/api/chat", HELLO)
    assert (refused.status, list(refused.json())) == (401, ["error"])
    served = ask_now(house.app, "/api/chat", HELLO, headers={"authorization": "Bearer key"})
    assert served.status == 200


def test_an_answer_that_the_engine_aborts_is_an_error() -> None:
    whole = aborted("/api/chat", HELLO | {"stream": False})
    assert (whole.status, list(whole.json())) == (503, ["error"])
    *parts, last = lines(aborted("/api/chat", HELLO))
    assert parts
    assert list(last) == ["error"]


@pytest.mark.features("grammar")
def test_calls_come_whole_with_objects_as_arguments() -> None:
    place = Place("Let me see. " + CALL + "\n" + CLOCK_CALL)
    whole, parts = both(place.app, "/api/chat", HELLO | {"tools": [TOOL, CLOCK]})
    calls = [
        {"function": {"name": "weather", "arguments": {"city": "Paris"}}},
        {"function": {"name": "clock", "arguments": {}}},
    ]
    assert whole["message"]["tool_calls"] == calls
    assert whole["message"]["content"].strip() == "Let me see."
    assert [part["message"]["tool_calls"] for part in parts if "tool_calls" in part["message"]] == [calls]
    assert "tool_calls" not in parts[-1]["message"]


def test_results_follow_their_calls() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    clock = {"function": {"name": "clock"}}
    messages = [
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call, clock]},
        {"role": "tool", "tool_name": "clock", "content": "noon"},
        {"role": "tool", "content": "rain"},
    ]
    _, asked, noon, rain = chat_of(OllamaChatBody.model_validate({"model": "toy", "messages": messages}), "toy")[
        "messages"
    ]
    assert asked["reasoning_content"] == "Hm."
    first, second = asked["tool_calls"]
    assert json.loads(first["function"]["arguments"]) == {"city": "Paris"}
    assert json.loads(second["function"]["arguments"]) == {}
    assert (noon["tool_call_id"], noon["name"]) == (second["id"], "clock")
    assert (rain["tool_call_id"], rain["name"]) == (first["id"], "weather")
    house = make_house(saying("x"))
    messages[1]["tool_calls"] = [{"function": {"name": "weather", "arguments": "Paris"}}]
    refused = ask_now(house.app, "/api/chat", {"model": "toy", "messages": messages})
    assert (refused.status, refused.json()["param"]) == (400, "messages.1.tool_calls")


@pytest.mark.features("grammar")
def test_thinking_is_told_apart_and_can_be_turned_off() -> None:
    place = Place("First.</think>Yes", THINKING)
    whole, parts = both(place.app, "/api/chat", HELLO)
    assert (whole["message"]["thinking"], whole["message"]["content"]) == ("First.", "Yes")
    assert "".join(part["message"].get("thinking", "") for part in parts) == "First."
    assert place.prompt.endswith("<think>")
    assert ask_now(place.app, "/api/chat", HELLO | {"think": "low"}).status == 200
    ask_now(place.app, "/api/chat", HELLO | {"think": False})
    assert not place.prompt.endswith("<think>")


def test_a_model_that_cannot_think_says_so(house: House) -> None:
    refused = ask_now(house.app, "/api/chat", HELLO | {"think": True})
    assert refused.status == 400
    assert "does not support thinking" in refused.json()["error"]
    assert ask_now(house.app, "/api/chat", HELLO | {"think": False}).status == 200


@pytest.mark.features("grammar")
def test_formats_are_grammars() -> None:
    place = Place('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form in ("json", schema):
        assert ask_now(place.app, "/api/chat", HELLO | {"format": form}).status == 200
        assert place.engine.requests[-1].options["grammar"]
    refused = ask_now(place.app, "/api/chat", HELLO | {"format": "yaml"})
    assert (refused.status, refused.json()["param"]) == (400, "format")
    ask_now(place.app, "/api/chat", HELLO | {"format": ""})
    assert "grammar" not in place.engine.requests[-1].options


def test_images_are_parts_of_the_content() -> None:
    picture = base64.b64encode(b"picture").decode()
    body = OllamaChatBody.model_validate(
        {"model": "toy", "messages": [{"role": "user", "content": "What is it?", "images": [picture]}]}
    )
    (message,) = chat_of(body, "toy")["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    assert message["content"][0]["image_url"]["url"].endswith(picture)


def test_a_prompt_is_answered_as_a_chat_or_continued_raw(house: House) -> None:
    whole, parts = both(house.app, "/api/generate", PROMPT | {"system": "Be brief."})
    assert whole["response"] == "Bonjour, monde" == "".join(part["response"] for part in parts)
    assert "message" not in whole
    assert prompt_of(house) == "[system]Be brief.\n[user]Hello\n[assistant]"
    whole, parts = both(house.app, "/api/generate", PROMPT | {"raw": True})
    assert whole["response"] == "Bonjour, monde" == "".join(part["response"] for part in parts)
    assert whole["eval_count"] == parts[-1]["eval_count"] == 15
    assert prompt_of(house) == "Hello"


def prompt_of(house: House) -> str:
    return TOKENIZER.decode(house.engine.requests[-1].tokens, skip_special_tokens=False)


def test_a_model_without_a_template_continues_prompts() -> None:
    house = make_house(saying("x"), chat=False)
    assert ask_now(house.app, "/api/generate", PROMPT | {"stream": False}).json()["response"] == "x"
    assert prompt_of(house) == "Hello"
    refused = ask_now(house.app, "/api/generate", PROMPT | {"system": "Be brief."})
    assert (refused.status, refused.json()["param"]) == (400, "system")


@pytest.mark.parametrize(("field", "value"), [("template", "{{ .Prompt }}"), ("context", [1, 2])])
def test_fields_of_old_clients_that_are_not_supported(house: House, field: str, value: Any) -> None:
    refused = ask_now(house.app, "/api/generate", PROMPT | {field: value})
    assert (refused.status, refused.json()["param"]) == (400, field)


@pytest.mark.parametrize("raw", [True, False])
def test_log_probabilities_of_chats_and_continuations(house: House, raw: bool) -> None:
    whole, parts = both(house.app, "/api/generate", PROMPT | {"raw": raw, "logprobs": True, "top_logprobs": 2})
    assert [one["token"] for one in whole["logprobs"]] == [*"Bonjour, monde", "</s>"]
    assert whole["logprobs"] == [one for part in parts for one in part.get("logprobs", [])]
    first = whole["logprobs"][0]
    assert first["logprob"] <= 0
    assert len(first["top_logprobs"]) == 2
    assert set(first["top_logprobs"][0]) >= {"token", "logprob"}


def test_a_request_without_content_says_that_the_model_is_loaded(house: House) -> None:
    for path in ("/api/chat", "/api/generate"):
        answer = ask_now(house.app, path, {"model": "toy", "keep_alive": "10m"}).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert not house.engine.requests


def test_models_as_ollama_describes_them(house: House) -> None:
    (model,) = get_now(house.app, "/api/tags").json()["models"]
    assert (model["name"], model["model"], len(model["digest"])) == ("toy", "toy", 64)
    (loaded,) = get_now(house.app, "/api/ps").json()["models"]
    assert loaded["context_length"] == house.engine.info.max_model_len
    shown = ask_now(house.app, "/api/show", {"model": "toy:latest"}).json()
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == house.engine.info.max_model_len
    assert shown["capabilities"] == ["completion"]
    assert get_now(house.app, "/api/version").json()["version"].count(".") == 2


@pytest.mark.features("grammar")
def test_capabilities_are_what_the_model_can_do() -> None:
    shown = ask_now(Place("x", THINKING).app, "/api/show", {"name": "toy"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]


def test_names_with_and_without_a_tag() -> None:
    house = make_house(saying("x"), ServerConfig(served_model_name=("toy", "own:latest")))
    for name in ("toy", "toy:latest", "own:latest"):
        whole = ask_now(house.app, "/api/chat", HELLO | {"model": name, "stream": False}).json()
        assert whole["model"] == name
    for name in ("own", "toy:7b"):
        missing = ask_now(house.app, "/api/chat", HELLO | {"model": name})
        assert missing.status == 404
        assert f"`{name}`" in missing.json()["error"]


def test_pulling_what_is_served_and_what_is_not(house: House) -> None:
    assert lines(ask_now(house.app, "/api/pull", {"model": "toy"})) == [{"status": "success"}]
    assert ask_now(house.app, "/api/pull", {"name": "toy", "stream": False}).json() == {"status": "success"}
    missing = ask_now(house.app, "/api/pull", {"model": "llama3"})
    assert missing.status == 404
    assert "octavo serve" in missing.json()["error"]
    assert ask_now(house.app, "/api/pull", {}).json()["param"] == "model"


def test_routes_that_change_models_are_not_there(house: House) -> None:
    missing = ask_now(house.app, "/api/copy", {"source": "a", "destination": "b"})
    assert missing.status == 404
    assert "can't load, change or copy" in missing.json()["error"]
