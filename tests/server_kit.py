"""What the server's tests share: a byte tokenizer, a scripted engine behind a real front end, and an ASGI visitor."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from fastapi import FastAPI
from tokenizers import decoders, models, pre_tokenizers

from octavo.config import ServerConfig
from octavo.core.request import GenerateRequest
from octavo.engine.fake import FakeEngine, Script, fake_info
from octavo.server.app import create_app
from octavo.server.process.address import bind
from octavo.server.process.lifecycle import Lifecycle
from octavo.server.process.serving import serve
from octavo.server.process.stop import Stop
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend
from octavo.text.tokenizers.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
VOCAB_SIZE = 3 + 256


def make_tokenizer() -> Tokenizer:
    """A token for every byte, after <unk>, <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {char: 3 + place for place, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, named_tokens={"bos_token": "<s>", "eos_token": "</s>"})


TOKENIZER = make_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def saying(*texts: str) -> Script:
    """One text for all choices, or one a choice."""
    if len(texts) == 1:
        return lambda request: ids(texts[0])
    return lambda request: [ids(text) for text in texts]


def echoing(request: GenerateRequest) -> Sequence[int]:
    """The prompt again."""
    return request.tokens


@dataclass
class House:
    """An app and what stands behind it."""

    app: FastAPI
    engine: FakeEngine
    lifecycle: Lifecycle


def make_house(
    script: Script,
    config: ServerConfig | None = None,
    *,
    pace: Callable[[], Awaitable[None]] | None = None,
    chat: bool = True,
    **info: Any,
) -> House:
    engine = FakeEngine(script, info=fake_info(**{"name": "toy", "vocab_size": VOCAB_SIZE, **info}), pace=pace)
    lifecycle = Lifecycle()
    app = create_app(make_frontend(engine, chat=chat), config, lifecycle=lifecycle)
    return House(app, engine, lifecycle)


def make_frontend(engine: FakeEngine, *, chat: bool = True) -> Frontend:
    template = ChatTemplate(TEMPLATE, TOKENIZER) if chat else None
    return Frontend(engine, TOKENIZER, engine.info, chat=template)


@dataclass
class Answer:
    """A response as it came."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)
    ended: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The JSON of every event; asserts the framing, and that the last one is [DONE]."""
        text = self.body.decode()
        assert text.endswith("data: [DONE]\n\n")
        frames = text.removesuffix("\n\n").split("\n\n")
        assert all(frame.startswith("data: ") and len(frame.splitlines()) == 1 for frame in frames)
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]

    def error(self) -> dict[str, Any]:
        """The error object; asserts that it is complete and agrees with the status."""
        assert self.headers["content-type"] == "application/json"
        body = self.json()
        assert list(body) == ["error"]
        error: dict[str, Any] = body["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert error["code"] == self.status
        assert error["message"].strip()
        return error


class Visitor:
    """One request, made by hand, whose client can leave at any moment."""

    def __init__(
        self,
        app: FastAPI,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        parts: Sequence[bytes] | None = None,
    ) -> None:
        self.answer = Answer()
        self.leaves = asyncio.Event()
        self.heard = asyncio.Event()
        """Set with every piece of the body that arrives."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self._parts = list(parts) if parts is not None else [data]
        sent = {"content-type": "application/json", **(headers or {})}
        if parts is None:
            sent.setdefault("content-length", str(len(data)))
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in sent.items()],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def whole(self) -> Answer:
        """The answer, once it is complete."""
        await self.task
        return self.answer

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        answer = self.answer
        if message["type"] == "http.response.start":
            assert not answer.status
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
            return
        assert answer.status
        assert not answer.ended
        if message.get("body"):
            answer.pieces.append(message["body"])
        answer.ended = not message.get("more_body", False)
        self.heard.set()


async def ask(app: FastAPI, path: str, body: Any = None, **options: Any) -> Answer:
    """A request by a client that stays."""
    return await Visitor(app, path, body, **options).whole()


def ask_now(app: FastAPI, path: str, body: Any = None, **options: Any) -> Answer:
    """`ask` for tests that are not coroutines."""
    return asyncio.run(ask(app, path, body, **options))


def get_now(app: FastAPI, path: str, **options: Any) -> Answer:
    return ask_now(app, path, method="GET", **options)


async def eventually(condition: Callable[[], bool]) -> None:
    """Let others run until `condition` holds."""
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0)


@asynccontextmanager
async def running(config: ServerConfig) -> AsyncIterator[tuple[str, socket.socket]]:
    """A real server around a scripted engine: the line that says where it is, and its socket."""
    engine = FakeEngine(saying("Bonjour"), info=fake_info(name="toy", vocab_size=259))
    lines: asyncio.Queue[str] = asyncio.Queue()
    stop, sock = Stop(), bind(config)
    task = asyncio.create_task(serve(make_frontend(engine), config, sock=sock, announce=lines.put_nowait, stop=stop))
    async with asyncio.timeout(240):
        try:
            yield await lines.get(), sock
        finally:
            stop.request()
            stop.request()
            await task
