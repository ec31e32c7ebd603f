"""Chat and generate against a played server and a played engine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import tokenizers

from octavo.cli import bench, chat, generate, start
from octavo.cli.talk import LocalSpeaker, RemoteSpeaker, StreamedAnswer
from octavo.config import EngineConfig
from octavo.core.errors import ConfigError, InvalidRequestError, OctavoError
from octavo.core.request import GenerateRequest
from octavo.engine.fake import FakeEngine, fake_info
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend
from octavo.text.tokenizers.tokenizer import Tokenizer

WORDS = ["<unk>", "<bos>", "<eos>", "user:", "system:", "assistant:", "hello", "Paris", "is", "it", "again"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant:"


def make_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<bos>", "<eos>"])
    return Tokenizer(backend, named_tokens={"eos_token": "<eos>"}, chat_templates={"default": TEMPLATE})


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


class Stage:
    """A front end whose engine answers every request with the same words."""

    def __init__(self, says: str = "Paris it is", *, template: bool = True) -> None:
        tokenizer = make_tokenizer()
        self.engine = FakeEngine(lambda request: ids(says), info=fake_info(vocab_size=len(WORDS)))
        self.frontend = Frontend(
            self.engine,
            tokenizer,
            self.engine.info,
            chat=ChatTemplate(TEMPLATE, tokenizer) if template else None,
        )

    @property
    def requests(self) -> list[GenerateRequest]:
        return self.engine.requests

    @contextlib.asynccontextmanager
    async def open(self, config: EngineConfig) -> AsyncIterator[Frontend]:
        yield self.frontend

    def speaker(self, **fields: Any) -> LocalSpeaker:
        return LocalSpeaker(self.frontend, fields, contextlib.AsyncExitStack())


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def delta(text: str, finish: str | None = None) -> str:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}])


STREAM = (
    event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    + delta("Par")
    + delta("is", "stop")
    + event(
        choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    )
    + "data: [DONE]\n\n"
)


def served(
    answer: Callable[[dict[str, Any]], httpx.Response], models: httpx.Response | None = None
) -> httpx.AsyncClient:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return models or httpx.Response(200, json={"data": [{"id": "first"}, {"id": "second"}]})
        assert request.url.path == "/v1/chat/completions"
        return answer(json.loads(request.content))

    return httpx.AsyncClient(transport=httpx.MockTransport(handle))


async def connect(client: httpx.AsyncClient, *, model: str | None = None, **fields: Any) -> RemoteSpeaker:
    return await RemoteSpeaker.connect("http://server:1/v1/", fields, model=model, api_key="key", client=client)


async def collect(speaker: RemoteSpeaker | LocalSpeaker, answer: StreamedAnswer) -> list[str]:
    return [piece async for piece in speaker.answer([{"role": "user", "content": "hello"}], answer)]


def test_a_servers_answer_is_streamed_and_counted() -> None:
    bodies: list[dict[str, Any]] = []

    def play(body: dict[str, Any]) -> httpx.Response:
        bodies.append(body)
        return httpx.Response(200, text=STREAM)

    async def go() -> None:
        client = served(play)
        speaker = await connect(client, temperature=0)
        answer = StreamedAnswer()
        assert await collect(speaker, answer) == ["Par", "is"]
        assert (answer.text, answer.prompt_tokens, answer.output_tokens) == ("Paris", 7, 2)
        assert (answer.cached_tokens, answer.finish_reason) == (4, "stop")
        assert client.headers["authorization"] == "Bearer key"
        assert "7 tokens in, 4 of them cached, 2 out" in answer.stats()
        await speaker.close()

    asyncio.run(go())
    [body] = bodies
    assert (body["model"], body["temperature"], body["stream"]) == ("first", 0, True)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), "too long"),
        (httpx.Response(500, text="oops"), "HTTP 500: oops"),
        (httpx.Response(200, text=delta("a") + event(error={"message": "it died"})), "it died"),
    ],
)
def test_a_servers_error_is_told(response: httpx.Response, message: str) -> None:
    async def go() -> None:
        speaker = await connect(served(lambda body: response))
        with pytest.raises(OctavoError, match=message):
            await collect(speaker, StreamedAnswer())
        await speaker.close()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (httpx.Response(401, json={"error": {"message": "a key is needed"}}), "a key is needed"),
        (httpx.Response(200, json={"data": []}), "give --model-name"),
        (httpx.Response(200, text="<html>"), "no server answers"),
    ],
)
def test_what_is_no_usable_server_is_refused(models: httpx.Response, message: str) -> None:
    async def go() -> None:
        async with served(lambda body: httpx.Response(500), models) as client:
            with pytest.raises(ConfigError, match=message):
                await connect(client)

    asyncio.run(go())


def test_our_own_engine_answers_through_the_chat_template() -> None:
    stage = Stage()
    answer = StreamedAnswer()
    pieces = asyncio.run(collect(stage.speaker(max_tokens=50), answer))
    assert "".join(pieces).split() == ["Paris", "it", "is"]
    assert stage.requests[0].tokens == ids("user: hello assistant:")
    assert stage.requests[0].params.max_tokens == 50
    assert (answer.prompt_tokens, answer.finish_reason) == (3, "stop")
    assert answer.output_tokens in (3, 4)


def test_without_max_tokens_the_answer_may_fill_the_context() -> None:
    stage = Stage()
    asyncio.run(collect(stage.speaker(), StreamedAnswer()))
    assert stage.requests[0].params.max_tokens == stage.engine.info.max_model_len - 3


def test_a_bad_sampling_field_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="temperature"):
        asyncio.run(collect(Stage().speaker(temperature=-1.0), StreamedAnswer()))


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes `input` return these lines, then the end of the file."""

    def lines(*texts: str | type[BaseException]) -> None:
        waiting: Iterator[str | type[BaseException]] = iter(texts)

        def read(prompt: str = "") -> str:
            line = next(waiting, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)

    return lines


def converse(stage: Stage, *argv: str) -> int:
    args = chat.make_parser().parse_args(list(argv))
    with asyncio.Runner() as runner:
        return chat.Conversation(runner, stage.speaker(), args).run()


def test_a_conversation_remembers(typed: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    typed("hello", "", "again", "/exit", "never asked")
    assert converse(stage, "--system-prompt", "it", "--stats") == 0
    assert [request.tokens for request in stage.requests] == [
        ids("system: it user: hello assistant:"),
        ids("system: it user: hello assistant: Paris it is user: again assistant:"),
    ]
    captured = capsys.readouterr()
    assert captured.out.count("Paris it is") == 2
    assert captured.err.count("tokens in") == 2


def test_clear_forgets_all_but_the_system_prompt(typed: Callable[..., None]) -> None:
    stage = Stage()
    typed("hello", "/clear", "again")
    assert converse(stage, "--system-prompt", "it") == 0
    assert stage.requests[1].tokens == ids("system: it user: again assistant:")


def test_unknown_slashes_show_help(typed: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    typed("/what")
    converse(stage)
    assert "/clear" in capsys.readouterr().out
    assert stage.requests == []


def test_quick_asks_once(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    assert converse(stage, "-q", "hello") == 0
    assert capsys.readouterr().out.split() == ["Paris", "it", "is"]
    assert len(stage.requests) == 1


def test_interrupting_an_answer_keeps_the_conversation(
    typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while the answer comes: it stops, what came of it is remembered, and the next question is answered."""
    stage = Stage()
    typed("hello", "again")
    answers = iter([KeyboardInterrupt, None])

    class Interrupted:
        name = "test"

        async def answer(self, messages: list[dict[str, str]], answer: StreamedAnswer) -> AsyncIterator[str]:
            seen.append([m["content"] for m in messages])
            answer.add("Paris")
            yield "Paris"
            if error := next(answers):
                raise error

        async def close(self) -> None: ...

    seen: list[list[str]] = []
    args = chat.make_parser().parse_args([])
    with asyncio.Runner() as runner:
        assert chat.Conversation(runner, Interrupted(), args).run() == 0
    assert seen == [["hello"], ["hello", "Paris", "again"]]
    assert "[stopped]" in capsys.readouterr().out
    assert stage.requests == []


def test_a_failed_question_is_forgotten(typed: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    typed("hello " * 2000, "again")
    assert converse(stage) == 0
    assert "maximum context length" in capsys.readouterr().err
    assert [request.tokens for request in stage.requests] == [ids("user: again assistant:")]


def complete(stage: Stage, monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(start, "open_frontend", stage.open)
    return generate.run(list(argv))


def test_a_sampling_flag_out_of_range_is_told_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    monkeypatch.setattr(stage, "open", lambda config: pytest.fail("the model was loaded"))
    with pytest.raises(InvalidRequestError, match=r"temperature must be non-negative, got -1\.0"):
        complete(stage, monkeypatch, "hello", "--temperature", "-1")


def test_a_bench_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["sreve"]) == 2
    said = capsys.readouterr().err
    assert "unknown bench 'sreve'" in said
    assert "throughput" in said


def test_generate_uses_the_template_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage()
    assert complete(stage, monkeypatch, "hello", "--system-prompt", "it", "--temperature", "0") == 0
    assert stage.requests[0].tokens == ids("system: it user: hello assistant:")
    assert stage.requests[0].params.temperature == 0
    assert capsys.readouterr().out == "Paris it is\n"


@pytest.mark.parametrize(("template", "argv"), [(True, ["--raw"]), (False, [])])
def test_generate_continues_a_raw_prompt(monkeypatch: pytest.MonkeyPatch, template: bool, argv: list[str]) -> None:
    stage = Stage(template=template)
    assert complete(stage, monkeypatch, "hello again", *argv) == 0
    assert stage.requests[0].tokens == ids("hello again")


def test_only_a_raw_prompt_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    for argv in (["--raw"], ["--raw", "--max-tokens", "7"], []):
        assert complete(stage, monkeypatch, "hello", *argv) == 0
    limits = [request.params.max_tokens for request in stage.requests]
    assert limits[:2] == [generate.RAW_TOKENS, 7]
    assert limits[2] > generate.RAW_TOKENS


def test_an_answer_that_is_printed_at_its_end_shows_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "PROGRESS_S", -1.0)
    assert complete(Stage(), monkeypatch, "hello", "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["completion_tokens"] > 1
    assert "1 tokens so far" in said.err


def test_generate_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete(Stage(), monkeypatch, "hello", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"].split() == ["Paris", "it", "is"]
    assert (result["prompt_tokens"], result["finish_reason"]) == (3, "stop")
    assert result["seconds"] >= result["ttft_s"] >= 0


def test_a_system_prompt_needs_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--system-prompt needs a chat"):
        complete(Stage(), monkeypatch, "hello", "--raw", "--system-prompt", "it")


def test_sampling_flags_reach_the_request() -> None:
    line = (
        "--temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --max-tokens 1k --min-tokens 2 --seed 7 --stop a --stop b "
        "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --ignore-eos"
    )
    args = chat.make_parser().parse_args(shlex.split(line))
    assert chat.sampling_fields(args) == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "max_tokens": 1000, "min_tokens": 2, "seed": 7,
        "stop": ["a", "b"], "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "ignore_eos": True,
    }  # fmt: skip
    assert chat.sampling_fields(chat.make_parser().parse_args([])) == {}


def test_the_server_on_this_machine_is_talked_to_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, Any]] = []

    async def local_server() -> str:
        return "http://here"

    async def connect(url: str, fields: dict[str, Any], *, model: Any, api_key: Any, client: Any) -> LocalSpeaker:
        await client.aclose()
        asked.append((model, api_key))
        return Stage().speaker()

    monkeypatch.setattr(chat, "local_server", local_server)
    monkeypatch.setattr(chat.RemoteSpeaker, "connect", connect)
    monkeypatch.setenv("OCTAVO_API_KEY", "k")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert chat.run(["--model-name", "second", "-q", "hello"]) == 0
    assert chat.run(["--api-key", "other", "-q", "hello"]) == 0
    assert asked == [("second", "k"), (None, "other")]


def test_a_model_on_the_command_line_means_an_engine_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[EngineConfig] = []

    async def local_server() -> str | None:
        raise AssertionError("no server should be looked for")

    async def own_engine(parser: Any, args: argparse.Namespace, fields: dict[str, Any]) -> LocalSpeaker:
        opened.append(chat.engine_config(parser, args))
        return Stage().speaker()

    monkeypatch.setattr(chat, "local_server", local_server)
    monkeypatch.setattr(chat, "own_engine", own_engine)
    assert chat.run(["other/model", "--threads", "1", "-q", "hello"]) == 0
    assert (opened[0].model.model, opened[0].device.threads) == ("other/model", 1)
