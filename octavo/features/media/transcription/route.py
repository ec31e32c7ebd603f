"""Serve a request: read the form, decode the file, ask the model, and return what it says."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from octavo.core.errors import InvalidRequestError
from octavo.core.request import PLACEHOLDER
from octavo.features.media.payload import NAME, MediaInfo
from octavo.features.media.transcription.answers import (
    DurationUsage,
    InputTokens,
    TextDelta,
    TextDone,
    TokenUsage,
    Transcription,
    VerboseTranscription,
)
from octavo.features.media.transcription.form import Form
from octavo.features.media.transcription.styles import AUDIO, STYLES, TRANSLATE, Style, Told
from octavo.server.batch.upload import read_upload
from octavo.server.context import ServerContext, answer_id
from octavo.server.errors import ApiError, json_response
from octavo.server.openai.generation import GenerationJob, UsageCounter, prepare, run
from octavo.server.openai.messages import render
from octavo.server.openai.protocol import ChatBody
from octavo.server.openai.sampling import chat_params
from octavo.server.stream import EventStream, event, until_disconnect
from octavo.server.validation import explain
from octavo.text.prompts.prompt import Prompt
from octavo.text.tokenizers.literal import LiteralText


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, ready for the engine."""

    job: GenerationJob
    form: Form
    style: Style
    task: str
    seconds: float

    def told(self, answer: str, *, whole: bool) -> Told | None:
        return self.style.told(answer, self.form.language, whole=whole)

    def usage(self, counter: UsageCounter) -> TokenUsage:
        used = counter.usage()
        audio = self.job.prompt_tokens.count(PLACEHOLDER)
        return TokenUsage(
            input_tokens=used.prompt_tokens,
            output_tokens=used.completion_tokens,
            total_tokens=used.total_tokens,
            input_token_details=InputTokens(audio, used.prompt_tokens - audio),
        )


async def transcribe(ctx: ServerContext, info: MediaInfo, request: Request, task: str) -> Response:
    """Answer with what is said in a file, streamed or whole."""
    data, form = await _read(request, info)
    ctx = await ctx.for_request(request, form.model)
    asked = await _prepare(ctx, info, request, task, data, form)
    if form.streamed:
        return EventStream(_stream(ctx, asked), keep_alive_s=ctx.config.sse_keep_alive_s)
    return await until_disconnect(request.receive, _whole(ctx, asked))


async def _read(request: Request, info: MediaInfo) -> tuple[bytes, Form]:
    upload = await read_upload(request, info.max_bytes, flag="--max-audio-bytes")
    with upload.content as file:
        form = Form.of(upload.fields)
        return await asyncio.to_thread(file.read), form


async def _prepare(ctx: ServerContext, info: MediaInfo, request: Request, task: str, data: bytes, form: Form) -> _Asked:
    """Decode the file and render the conversation.

    Raises:
        InvalidRequestError: the file can't be read, or the model can't do what is asked for.
    """
    from octavo.features.media.audio.decode import decoded  # imported here: it needs NumPy
    from octavo.features.media.audio.mel import RATE

    style = STYLES[str(info.config["architectures"][0])]
    if task not in style.tasks:
        raise ApiError(404, "This model transcribes only; ask /v1/audio/transcriptions.")
    prefill = style.prefill(form.language)
    messages = style.messages(task, form.language, form.prompt)
    threads = ctx.frontend.preparer.hook(NAME).threads
    samples = await asyncio.get_running_loop().run_in_executor(threads, decoded, data, info.max_seconds, "file")
    body = _chat(messages, (samples, RATE), form)
    params = chat_params(ctx, body)
    prompt = await _prompt(ctx, body, prefill)
    response_id = answer_id(request, None, "trsc-")
    try:
        job = await prepare(ctx, prompt, params, body, response_id, add_special_tokens=False, param="messages")
    except InvalidRequestError as exc:
        raise _of_file(exc) from None
    return _Asked(job, form, style, task, len(samples) / RATE)


def _chat(messages: list[dict[str, Any]], audio: Any, form: Form) -> ChatBody:
    def part(piece: Any) -> dict[str, Any]:
        return {"type": "audio", "audio": audio} if piece is AUDIO else {"type": "text", "text": piece}

    filled = [
        {**one, "content": [part(piece) for piece in one["content"]]} if isinstance(one["content"], list) else one
        for one in messages
    ]
    try:
        return ChatBody.model_validate({"messages": filled, "stream": form.streamed, **form.sampling})
    except ValidationError as exc:
        raise explain(exc) from None


async def _prompt(ctx: ServerContext, body: ChatBody, prefill: str) -> Prompt:
    """Render the conversation; without a chat template, its texts follow each other."""
    assert body.parts is not None
    if ctx.frontend.chat is None:
        text = "".join("".join(message.content or "") for message in body.messages)
    else:
        text = await render(
            ctx,
            body.messages,
            add_generation_prompt=True,
            continue_final_message=False,
            options=dict(ctx.config.default_chat_template_kwargs),
            parts=body.parts,
        )
    literal = text.literal if isinstance(text, LiteralText) else ()
    return body.parts.prompt(LiteralText(text + prefill, literal) if literal else text + prefill)


def _of_file(exc: InvalidRequestError) -> InvalidRequestError:
    """Return an error of the conversation as one of the file."""
    if exc.param is None or not exc.param.startswith("messages"):
        return exc
    return InvalidRequestError(exc.message.replace(exc.param, "file", 1), param="file", value=exc.value)


async def _whole(ctx: ServerContext, asked: _Asked) -> Response:
    counter = UsageCounter(ctx, [asked.job])
    answer = ""
    async with aclosing(run(ctx, [asked.job])) as outputs:
        async for number, output in outputs:
            counter.add(number, output)
            answer += output.outputs[0].text
    told = asked.told(answer, whole=True) or Told(answer)
    text = told.text.strip()
    if asked.form.format == "text":
        return PlainTextResponse(text + "\n")
    if asked.form.format == "json":
        return json_response(Transcription(text=text, usage=asked.usage(counter)))
    language = "English" if asked.task == TRANSLATE else told.language
    return json_response(
        VerboseTranscription(
            task=asked.task,
            language=language,
            duration=round(asked.seconds, 3),
            text=text,
            usage=DurationUsage(seconds=math.ceil(asked.seconds)),
        )
    )


async def _stream(ctx: ServerContext, asked: _Asked) -> AsyncGenerator[bytes, None]:
    counter = UsageCounter(ctx, [asked.job])
    answer, sent = "", ""
    async with aclosing(run(ctx, [asked.job])) as outputs:
        async for number, output in outputs:
            counter.add(number, output)
            answer += output.outputs[0].text
            told = asked.told(answer, whole=output.finished)
            text = "" if told is None else told.text
            if len(text) > len(sent):
                delta: Struct = TextDelta(delta=text[len(sent) :])
                sent = text
                yield event(delta)
    yield event(TextDone(text=sent, usage=asked.usage(counter)))
