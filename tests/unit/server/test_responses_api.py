"""The Responses API: input items, output items, their events, and responses asked for again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from server_kit import TOKENIZER, VOCAB_SIZE, Answer, Visitor, ask, ask_now, eventually, saying
from test_tools import CALL, CLOCK_CALL, THINKING, WITH_TOOLS

from octavo.config import ServerConfig
from octavo.core.errors import EngineDeadError
from octavo.engine.fake import FakeEngine, fake_info
from octavo.server.app import create_app
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK = {"type": "function", "name": "clock"}


class Place:
    def __init__(self, text: str, template: str = WITH_TOOLS, pace: Any = None) -> None:
        info = fake_info(name="toy", vocab_size=VOCAB_SIZE, features=["grammar"])
        self.engine = FakeEngine(saying(text), info=info, pace=pace)
        frontend = Frontend(self.engine, TOKENIZER, info, chat=ChatTemplate(template, TOKENIZER))
        self.app = create_app(frontend, ServerConfig())

    def ask(self, given: Any = "Hello", **fields: Any) -> Answer:
        return ask_now(self.app, PATH, {"input": given} | fields)

    def both(self, given: Any = "Hello", **fields: Any) -> dict[str, Any]:
        """The response, which must be the same streamed and whole."""
        answer = self.ask(given, **fields)
        assert answer.status == 200, answer.body
        whole: dict[str, Any] = answer.json()
        streamed = followed(self.ask(given, **fields, stream=True).body.decode())
        assert plain(streamed) == plain(whole)
        return whole

    @property
    def prompt(self) -> str:
        return TOKENIZER.decode(self.engine.requests[-1].tokens, skip_special_tokens=False)


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """Without what no two responses share."""
    assert response["id"].startswith("resp_")
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return response | {"id": "", "created_at": 0, "completed_at": 0, "output": items}


def followed(text: str) -> dict[str, Any]:
    """The last event's response; asserts that the events before it tell the same, in order."""
    assert "[DONE]" not in text
    events = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    begun = ["created", *(["queued"] if events[0]["response"]["background"] else []), "in_progress"]
    assert [event["type"] for event in events[: len(begun)]] == [f"response.{kind}" for kind in begun]
    items: list[dict[str, Any]] = []
    for event in events[len(begun) : -1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            continue
        assert event["output_index"] == len(items) - 1
        item = items[-1]
        if kind == "response.content_part.added":
            item["content"].append(event["part"])
        elif kind.endswith("_text.delta"):
            item["content"][0]["text"] += event["delta"]
            item["content"][0].get("logprobs", []).extend(event.get("logprobs", []))
        elif kind.endswith("_text.done"):
            assert event["text"] == item["content"][0]["text"]
        elif kind == "response.function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == item["arguments"]
        elif kind == "response.output_item.done":
            assert event["item"] == item | {"status": event["item"]["status"]}
            items[-1] = event["item"]
    last: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}".replace("cancelled", "incomplete")
    assert last["output"] == items
    return last


def said(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def test_a_response() -> None:
    place = Place("Hi there.")
    response = place.both(instructions="Be kind.", metadata={"a": "b"})
    assert said(response) == "Hi there."
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "toy")
    assert place.prompt == "[system]Be kind.\n[user]Hello\n[assistant]"
    usage = response["usage"]
    assert usage["output_tokens"] == len("Hi there.") + 1
    assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert response["metadata"] == {"a": "b"}


def test_instructions_and_the_developers_messages_are_one_message() -> None:
    place = Place("x")
    items = [{"role": role, "content": role} for role in ("developer", "system", "user", "developer")]
    assert place.ask(items, instructions="Be kind.").status == 200
    assert place.prompt == "[system]Be kind.\ndeveloper\nsystem\n[user]user\n[system]developer\n[assistant]"
    assert place.ask(items[:3]).status == 200
    assert place.prompt == "[system]developer\n[system]system\n[user]user\n[assistant]"


def test_cut_short_and_empty() -> None:
    response = Place("Hi there.").both(max_output_tokens=2)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (said(response), response["output"][0]["status"]) == ("Hi", "incomplete")
    assert said(Place("").both()) == ""


def test_a_late_failure_ends_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("Hello")
    generate = place.engine.generate

    async def dying(request: Any) -> Any:
        async for delta in generate(request):
            yield delta
            raise EngineDeadError("The engine died.")

    monkeypatch.setattr(place.engine, "generate", dying)
    text, error = place.ask(stream=True).body.decode().removesuffix("\n\n").rsplit("\n\n", 1)
    failed = followed(text + "\n\n")
    assert (failed["status"], failed["error"]) == ("failed", {"code": "server_error", "message": "The engine died."})
    assert (said(failed), failed["output"][0]["status"]) == ("H", "incomplete")
    assert ask_now(place.app, f"{PATH}/{failed['id']}", method="GET").json() == failed
    name, data = error.split("\n")
    assert name == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert (told["message"], told["code"]) == ("The engine died.", "503")
    assert told["sequence_number"] == len(text.split("\n\n"))


@pytest.mark.features("grammar")
def test_calls_and_reasoning_are_items() -> None:
    response = Place("hm</think>So:\n" + CALL + "\n" + CLOCK_CALL, THINKING).both(tools=[TOOL, CLOCK])
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    call = response["output"][2]
    assert (call["name"], call["arguments"], call["status"]) == ("weather", '{"city": "Paris"}', "completed")
    assert call["call_id"].startswith("call_")
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len("hm</think>")


@pytest.mark.features("grammar")
@pytest.mark.parametrize(
    ("cut", "reason"), [({"max_output_tokens": CALL.index("ris")}, "max_output_tokens"), ({"stop": "ris"}, "stop")]
)
def test_a_call_that_is_cut_off_is_incomplete(cut: dict[str, Any], reason: str) -> None:
    place = Place(CALL)
    response = place.both(tools=[TOOL], **cut)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": reason})
    (call,) = response["output"]
    assert (call["arguments"], call["status"]) == ('{"city": "Pa', "incomplete")
    assert place.ask("And now?", previous_response_id=response["id"]).status == 200
    assert place.prompt == "[user]Hello\n[user]And now?\n[assistant]"


@pytest.mark.features("grammar")
def test_a_call_before_the_cut_is_complete() -> None:
    response = Place(CALL).both(tools=[TOOL], max_output_tokens=CALL.index("}}") + 2)
    (call,) = response["output"]
    assert (response["status"], call["status"], call["arguments"]) == ("incomplete", "completed", '{"city": "Paris"}')


def test_items_become_a_conversation() -> None:
    calls = "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.city }}){% endfor %}"
    place = Place("x", "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + calls + "{% endfor %}{{ tools or '' }}")
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "look", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    assert place.ask(items).status == 200
    assert place.prompt == "[system]Be kind.[user]a\nb[assistant]look(weather Rome)[tool]rain"


@pytest.mark.features("grammar")
def test_reasoning_goes_back_to_the_model() -> None:
    said = "{% for m in messages %}[{{ m.role }}]({{ m.reasoning_content }}){{ m.content }}{{ m.tool_calls | length }}"
    place = Place("hm</think>So:\n" + CALL, "{# </think><tool_call> #}{{ tools or '' }}" + said + "{% endfor %}<think>")
    first = place.ask(tools=[TOOL]).json()
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    call = first["output"][2]["call_id"]
    result = {"type": "function_call_output", "call_id": call, "output": "rain"}
    place.ask([result], previous_response_id=first["id"])
    assert place.prompt == "[user]()Hello0[assistant](hm)So:1[tool]()rain0<think>"
    alone = [one for one in first["output"] if one["type"] != "message"]
    place.ask([{"role": "user", "content": "Hello"}, *alone, result])
    assert place.prompt == "[user]()Hello0[assistant](hm)1[tool]()rain0<think>"


@pytest.mark.features("grammar")
def test_items_can_be_referred_to() -> None:
    place = Place("hm</think>So:\n" + CALL, THINKING)
    first = place.ask(tools=[TOOL]).json()
    result = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "rain"}
    user = {"role": "user", "content": "Hello"}
    place.ask([user, *first["output"], result], tools=[TOOL])
    sent = place.prompt
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    second = place.ask([user, *references, result], tools=[TOOL]).json()
    assert place.prompt == sent
    listed = ask_now(place.app, f"{PATH}/{second['id']}/input_items?order=asc", method="GET").json()["data"]
    assert listed[1:4] == first["output"]
    ask_now(place.app, f"{PATH}/{first['id']}", method="DELETE")
    gone = place.ask([user, *references])
    assert (gone.status, gone.error()["param"]) == (404, "input.1.id")
    assert place.ask([{"type": "item_reference", "id": 5}]).error()["param"] == "input.0.id"


def test_a_conversation_goes_on_from_a_response() -> None:
    place = Place("Fine.")
    first = place.ask("How are you?").json()
    second = place.ask("And now?", previous_response_id=first["id"]).json()
    assert place.prompt == "[user]How are you?\n[assistant]Fine.\n[user]And now?\n[assistant]"
    place.ask("So?", previous_response_id=second["id"])
    assert place.prompt.count("Fine.") == 2
    items = ask_now(place.app, f"{PATH}/{second['id']}/input_items", method="GET").json()["data"]
    assert [item["type"] for item in items] == ["message", "message", "message"]


@pytest.mark.features("grammar")
def test_a_conversation_goes_on_from_a_call_that_was_cut() -> None:
    place = Place("So:\n" + CALL)
    first = place.ask(tools=[TOOL], max_output_tokens=60).json()
    assert [(item["type"], item["status"]) for item in first["output"]] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]
    assert place.ask("Go on.", previous_response_id=first["id"]).status == 200
    assert place.prompt == "[user]Hello\n[assistant]So:\n[user]Go on.\n[assistant]"


def test_input_items_are_told_in_pages() -> None:
    place = Place("x")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = f"{PATH}/{place.ask(turns).json()['id']}/input_items"
    whole = ask_now(place.app, path, method="GET").json()
    kind = {"user": "input_text", "assistant": "output_text"}
    assert [(one["role"], one["type"], one["status"]) for one in whole["data"]] == [
        (role, "message", "completed") for role in ("user", "assistant", "user")
    ]
    assert [one["content"][0]["text"] for one in whole["data"]] == ["c", "b", "a"]
    assert all(one["content"][0]["type"] == kind[one["role"]] for one in whole["data"])
    first = ask_now(place.app, f"{path}?order=asc&limit=2", method="GET").json()
    assert ([one["content"][0]["text"] for one in first["data"]], first["has_more"]) == (["a", "b"], True)
    rest = ask_now(place.app, f"{path}?order=asc&after={first['last_id']}", method="GET").json()
    assert ([one["content"][0]["text"] for one in rest["data"]], rest["has_more"]) == (["c"], False)
    assert ask_now(place.app, f"{path}?limit=0", method="GET").error()["param"] == "limit"


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}], ids=str)
def test_only_what_streams_in_the_background_has_events_later(fields: dict[str, Any]) -> None:
    async def visit() -> None:
        place = Place("x")
        made = await ask(place.app, PATH, {"input": "Hello"} | fields)
        name = followed(made.body.decode())["id"] if "stream" in fields else made.json()["id"]
        path = f"{PATH}/{name}"
        assert (await ask(place.app, f"{path}?stream=true", method="GET")).error()["param"] == "stream"
        assert (await ask(place.app, f"{path}?stream=false", method="GET")).status == 200

    asyncio.run(visit())


def test_responses_can_be_asked_for_and_forgotten() -> None:
    place = Place("x")
    kept, free = place.ask().json(), place.ask(store=False).json()
    path = f"{PATH}/{kept['id']}"
    assert ask_now(place.app, path, method="GET").json() == kept
    assert ask_now(place.app, f"{PATH}/{free['id']}", method="GET").status == 404
    assert ask_now(place.app, f"{path}/cancel").error()["param"] == "response_id"
    assert ask_now(place.app, path, method="DELETE").json() == {"id": kept["id"], "object": "response", "deleted": True}
    assert ask_now(place.app, path, method="GET").status == 404
    gone = place.ask(previous_response_id=kept["id"])
    assert (gone.status, gone.error()["param"]) == (404, "previous_response_id")


def test_in_the_background() -> None:
    async def visit() -> None:
        gate = asyncio.Event()
        place = Place("Done.", pace=gate.wait)
        first = (await ask(place.app, PATH, {"input": "Hello", "background": True})).json()
        assert first["status"] == "queued"
        await eventually(lambda: bool(place.engine.running))
        path = f"{PATH}/{first['id']}"
        assert (await ask(place.app, path, method="GET")).json()["status"] == "in_progress"
        early = await ask(place.app, PATH, {"input": "x", "previous_response_id": first["id"]})
        assert early.error()["param"] == "previous_response_id"
        gate.set()
        await eventually(lambda: not place.engine.running)
        done = (await ask(place.app, path, method="GET")).json()
        assert (done["status"], said(done)) == ("completed", "Done.")

    asyncio.run(visit())


@pytest.mark.parametrize("begun", [True, False])
def test_the_background_can_be_cancelled(begun: bool) -> None:
    async def visit() -> None:
        gate = asyncio.Event()
        place = Place("Done.", pace=gate.wait)
        first = (await ask(place.app, PATH, {"input": "Hello", "background": True})).json()
        if begun:
            await eventually(lambda: bool(place.engine.running))
        cancelled = (await ask(place.app, f"{PATH}/{first['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        await eventually(lambda: not place.engine.running)
        assert (await ask(place.app, f"{PATH}/{first['id']}", method="GET")).json()["status"] == "cancelled"

    asyncio.run(visit())


STREAMED = {"input": "Hello", "background": True, "stream": True}


def named(body: bytes) -> str:
    """The id of a response in its first event."""
    name: str = json.loads(body.split(b"\n")[1].removeprefix(b"data: "))["response"]["id"]
    return name


def test_a_stream_in_the_background_goes_on_without_its_client() -> None:
    """Clients that reconnect get the events after any number: earlier ones at once, new ones as they come."""

    async def visit() -> None:
        gate = asyncio.Event()
        place = Place("Done.", pace=gate.wait)
        client = Visitor(place.app, PATH, STREAMED)
        await client.heard.wait()
        client.leaves.set()
        path = f"{PATH}/{named((await client.whole()).body)}"
        readers = [Visitor(place.app, f"{path}?stream=true", method="GET") for _ in range(2)]
        await readers[1].heard.wait()
        gate.set()
        bodies = [(await one.whole()).body for one in readers]
        assert bodies[0] == bodies[1]
        done = followed(bodies[0].decode())
        assert (done["status"], said(done), done["background"]) == ("completed", "Done.", True)
        assert (await ask(place.app, path, method="GET")).json() == done
        frames = bodies[0].split(b"\n\n")
        for number in (0, 3, len(frames) - 3):
            found = await ask(place.app, f"{path}?stream=true&starting_after={number}", method="GET")
            assert found.body.split(b"\n\n") == frames[number + 1 :]
        for number in (len(frames) - 2, 10**9):
            found = await ask(place.app, f"{path}?stream=true&starting_after={number}", method="GET")
            assert (found.status, found.body) == (200, b"")

    asyncio.run(visit())


@pytest.mark.parametrize("ended", ["cancel", "delete"])
@pytest.mark.parametrize("begun", [True, False])
def test_a_stream_in_the_background_ends_with_its_response(begun: bool, ended: str) -> None:
    async def visit() -> None:
        gate = asyncio.Event()
        place = Place("Done.", pace=gate.wait)
        client = Visitor(place.app, PATH, STREAMED)
        await eventually(lambda: bool(place.engine.running) if begun else bool(client.answer.pieces))
        path = f"{PATH}/{named(client.answer.body)}"
        found = await (ask(place.app, f"{path}/cancel") if ended == "cancel" else ask(place.app, path, method="DELETE"))
        assert found.status == 200
        assert followed((await client.whole()).body.decode())["status"] == "cancelled"
        await eventually(lambda: not place.engine.running)

    asyncio.run(visit())


def test_a_failure_in_the_background_is_the_end_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("Hello")

    async def dying(request: Any) -> Any:
        raise EngineDeadError("The engine died.")
        yield

    monkeypatch.setattr(place.engine, "generate", dying)

    async def visit() -> None:
        body = (await ask(place.app, PATH, STREAMED)).body
        text, error = body.decode().removesuffix("\n\n").rsplit("\n\n", 1)
        failed = followed(text + "\n\n")
        assert (failed["status"], failed["error"]["message"]) == ("failed", "The engine died.")
        assert error.startswith("event: error\n")
        again = await ask(place.app, f"{PATH}/{failed['id']}?stream=true", method="GET")
        assert again.body == body

    asyncio.run(visit())


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=maybe", "stream"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true&starting_after=" + 5000 * "9", "starting_after"),
        ("starting_after=1", "starting_after"),
    ],
)
def test_a_wrong_query_is_named(query: str, param: str) -> None:
    place = Place("x")
    path = f"{PATH}/{place.ask().json()['id']}?{query}"
    answer = ask_now(place.app, path, method="GET")
    assert (answer.status, answer.error()["param"]) == (400, param)


@pytest.mark.features("grammar")
def test_a_form_of_output_and_logprobs() -> None:
    place = Place("{}")
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}
    response = place.both(text=form, top_logprobs=2)
    assert "grammar" in place.engine.requests[-1].options
    (part,) = response["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]).startswith("{}")
    assert response["text"] == form


@pytest.mark.features("grammar")
@pytest.mark.parametrize("text", ["\N{GRINNING FACE}!", "<b>"])
def test_logprobs_of_tokens_before_the_first_text(text: str) -> None:
    response = Place(text).both(tools=[TOOL], top_logprobs=1)
    (part,) = response["output"][0]["content"]
    read = bytes(byte for entry in part["logprobs"] for byte in entry["bytes"])
    assert (part["text"], read.decode()) == (text, text + "</s>")
    for shown in (True, False):
        response = Place(f"hm</think>{text}", THINKING).both(top_logprobs=1, include_reasoning=shown)
        assert response["output"][-1]["content"] == [part]


@pytest.mark.features("grammar")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "message"}]}, "input.0"),
        ({"input": [{"type": "web_search_call"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"background": True, "store": False}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "a" * 5000}, "input"),
        ({"temperature": 7}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    answer = ask_now(Place("x").app, PATH, {"input": "Hello"} | fields)
    assert answer.status == 400
    error = answer.error()
    assert error["param"] == param
    assert not any(name in error["message"] for name in ("max_completion_tokens", "response_format", "=messages"))
