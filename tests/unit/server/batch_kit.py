"""What the tests of files and batches share: a server without a network, and clients of its routes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from server_kit import Answer, ask, eventually

from octavo.server.batch.service import BatchService

CHAT = "/v1/chat/completions"


def service_of(app: FastAPI) -> BatchService:
    service: BatchService = app.state.batches
    return service


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[FastAPI]:
    """The app with its batches at work, as a server would have it."""
    await service_of(app).start()
    try:
        yield app
    finally:
        await service_of(app).stop()


def line(custom_id: str, content: str = "hi", url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": asked}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def form(content: bytes, filename: str = "in.jsonl", **fields: str) -> tuple[bytes, dict[str, str]]:
    """A multipart body and its headers."""
    parts = [
        f'--XX\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()
    ]
    head = f'--XX\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n\r\n'
    body = "".join(parts).encode() + head.encode() + content + b"\r\n--XX--\r\n"
    return body, {"content-type": "multipart/form-data; boundary=XX"}


async def upload(app: FastAPI, content: bytes, **fields: str) -> Answer:
    body, headers = form(content, **({"purpose": "batch"} | fields))
    return await ask(app, "/v1/files", body, headers=headers)


async def get(app: FastAPI, path: str) -> Answer:
    return await ask(app, path, method="GET")


async def begin(app: FastAPI, lines: Sequence[Any], window: str = "24h", **more: Any) -> str:
    """Upload the lines and start a batch over them; its id."""
    file_id = (await upload(app, jsonl(lines))).json()["id"]
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": window, **more}
    answer = await ask(app, "/v1/batches", body)
    assert answer.status == 200, answer.body
    batch_id: str = answer.json()["id"]
    return batch_id


async def ended(app: FastAPI, batch_id: str) -> dict[str, Any]:
    """The batch once it has ended."""
    batch = await service_of(app).get(batch_id)
    await eventually(lambda: batch.ended)
    answer: dict[str, Any] = (await get(app, f"/v1/batches/{batch_id}")).json()
    return answer


async def results(app: FastAPI, file_id: str) -> list[dict[str, Any]]:
    answer = await get(app, f"/v1/files/{file_id}/content")
    assert answer.status == 200
    return [json.loads(one) for one in answer.body.splitlines()]


def journal_of(folder: Path, batch_id: str) -> Path:
    return folder / "batches" / f"{batch_id}.journal"
