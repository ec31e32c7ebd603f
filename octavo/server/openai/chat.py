"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.core.output import CompletionOutput
from octavo.core.params import OutputKind, SamplingParams
from octavo.server.body import parse_body, require
from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.openai.generation import GenerationJob, UsageCounter, extended, prepare, run
from octavo.server.openai.logprobs import LogprobWriter, tokens_as_ids
from octavo.server.openai.messages import render
from octavo.server.openai.protocol import ChatBody
from octavo.server.openai.reply import Reply
from octavo.server.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
)
from octavo.server.openai.routing import AccumulatedMessage, ChoiceDelta, Routed
from octavo.server.openai.sampling import chat_params
from octavo.server.openai.tools import tool_use
from octavo.server.openai.unsupported import check_extras
from octavo.server.stream import EventStream, event, until_disconnect
from octavo.text.answers.plan import OutputPlan
from octavo.text.aside import aside
from octavo.text.prompts.message_parts import MessageParts
from octavo.text.prompts.prompt import Prompt
from octavo.text.tools.tool import ToolUse


async def chat_completions(ctx: ServerContext, request: Request) -> Response:
    """Answer one conversation, streamed or whole."""
    body = await parse_body(request, ChatBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_request(request, body.model, body)
    reply = Reply.of(ctx, request, body, "chatcmpl-", check_extras(ctx, body, chat=True))
    chat = await prepare_chat(ctx, body, reply.id)
    params = chat.job.request.params
    writer = LogprobWriter(ctx.frontend.tokenizer, params, as_ids=tokens_as_ids(ctx, body))
    if body.streamed:
        return EventStream(_stream(ctx, chat, reply, writer), keep_alive_s=ctx.config.sse_keep_alive_s)
    return json_response(await until_disconnect(request.receive, whole(ctx, [chat], reply, writer)))


@dataclass(slots=True, frozen=True)
class Chat:
    """A conversation, ready for the engine, and how to parse the answer."""

    job: GenerationJob
    plan: OutputPlan
    show_reasoning: bool
    role: str
    """Role of the answer's message."""
    prefix: str = ""
    """Text before the answer: with `echo`, the message that the answer continues."""

    def choices(self) -> list[Routed]:
        return [Routed(self.plan, show_reasoning=self.show_reasoning) for _ in range(self.job.request.params.n)]


async def prepare_chat(ctx: ServerContext, body: ChatBody, response_id: str) -> Chat:
    """Check a chat request, render its prompt and plan its answer.

    Raises:
        InvalidRequestError: a field is invalid, or the conversation does not fit.
    """
    params = chat_params(ctx, body)
    use = tool_use(body)
    if body.parts is not None:
        ctx.frontend.preparer.check_parts(body.parts)
    text = await _prompt_text(ctx, body, use)
    answers = ctx.frontend.answers
    plan = OutputPlan(
        format=answers.tools,
        tools=use,
        reasoning=answers.reasoning,
        inside=answers.reasoning is not None and text.rstrip().endswith(answers.reasoning.begin),
        content=params.structured_outputs,
    )
    params = _planned(ctx, params, plan)
    # The template has written the special tokens.
    special = bool(body.add_special_tokens)
    prompt = text if body.parts is None else _with_parts(body, body.parts, text)
    try:
        job = await prepare(ctx, prompt, params, body, response_id, add_special_tokens=special, param="messages")
    except InvalidRequestError as exc:
        if exc.param == "max_tokens" and body.max_completion_tokens is not None:
            raise InvalidRequestError(exc.message, param="max_completion_tokens", value=exc.value) from None
        raise
    last = body.messages[-1]
    prefix = last.text if body.echo and last.role == "assistant" else ""
    continues = body.continue_final_message or body.add_generation_prompt is False
    role = last.role if continues else ctx.config.response_role
    job = replace(job, ender=plan.ender) if plan.ends_at_repetition else job
    return Chat(job, plan, body.include_reasoning is not False, role, prefix)


async def count_chat(ctx: ServerContext, body: ChatBody) -> int:
    """Return the number of tokens of a conversation, which may be more than the context has.

    Raises:
        InvalidRequestError: a field is invalid.
    """
    if body.parts is not None:
        return len((await prepare_chat(ctx, body, "count")).job.prompt_tokens)
    refusal = ctx.frontend.why_no_chat()
    if refusal is not None:
        raise refusal
    text = await _prompt_text(ctx, body, tool_use(body))
    special, encode = bool(body.add_special_tokens), ctx.frontend.tokenizer.encode
    return len(await aside(len(text), lambda: encode(text, add_special_tokens=special)))


async def _prompt_text(ctx: ServerContext, body: ChatBody, use: ToolUse | None) -> str:
    _check_documents(ctx, body)
    return await render(
        ctx,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        options=_template_options(ctx, body),
        template=body.chat_template,
        tools=use.offered if use else (),
        parts=body.parts,
    )


def _with_parts(body: ChatBody, parts: MessageParts, text: str) -> Prompt:
    for name, value in (("echo", body.echo), ("add_special_tokens", body.add_special_tokens)):
        require(not value, name, value, f"{name} can't be combined with content parts other than text; leave it out.")
    return parts.prompt(text)


def _check_documents(ctx: ServerContext, body: ChatBody) -> None:
    chat = ctx.frontend.chat
    if body.documents and chat is not None and body.chat_template is None and "documents" not in chat.source:
        raise UnsupportedError(
            "The chat template of this model has no place for documents; put them into a message.", param="documents"
        )


def _template_options(ctx: ServerContext, body: ChatBody) -> dict[str, Any]:
    options = ctx.config.default_chat_template_kwargs | (body.chat_template_kwargs or {})
    if body.documents is not None:
        options["documents"] = body.documents
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            options.setdefault("enable_thinking", False)
    return options


def _planned(ctx: ServerContext, params: SamplingParams, plan: OutputPlan) -> SamplingParams:
    """Return the sampling parameters that the plan requires."""
    tokenizer = ctx.frontend.tokenizer
    special = {tokenizer.token_text(token) for token in tokenizer.special_ids}
    shown = any(one in mark for mark in plan.marks() for one in special)
    return params.replace(
        structured_outputs=plan.form(tokenizer),
        skip_special_tokens=params.skip_special_tokens and not shown,
        output_kind=OutputKind.DELTA if plan.reasoning else params.output_kind,
    )


@dataclass(slots=True)
class _ChoiceAccumulator:
    """One choice as it accumulates."""

    message: AccumulatedMessage = field(default_factory=AccumulatedMessage)
    output: CompletionOutput | None = None
    finish: str | None = None

    def add(self, choice: CompletionOutput, news: ChoiceDelta) -> None:
        self.message.add(news)
        self.finish = news.finish
        if self.output is None:
            self.output = choice
            return
        self.output.token_ids += choice.token_ids
        self.output.stop_reason = choice.stop_reason
        self.output.extra = choice.extra
        if self.output.logprobs is not None:
            self.output.logprobs += choice.logprobs or []


async def whole(ctx: ServerContext, chats: Sequence[Chat], reply: Reply, writer: LogprobWriter) -> Any:
    """Return the answers to one conversation, or one answer to each of several, as `json_response` takes them."""
    jobs = [chat.job for chat in chats]
    counter = UsageCounter(ctx, jobs)
    routed = [chat.choices() for chat in chats]
    answers = [[_ChoiceAccumulator() for _ in choices] for choices in routed]
    prompt = None
    async with aclosing(run(ctx, jobs)) as outputs:
        async for number, output in outputs:
            counter.add(number, output)
            prompt = output.prompt_logprobs
            for choice in output.outputs:
                answers[number][choice.index].add(choice, routed[number][choice.index].take(choice))
    _count_reasoning(counter, chats[0], [one for choices in routed for one in choices])
    told = [(chat, answer) for chat, found in zip(chats, answers, strict=True) for answer in found]
    alone = len(chats) == 1
    answer = ChatCompletion(
        id=reply.id,
        created=reply.created,
        model=reply.model,
        choices=[_choice(index, answer, chat, reply, writer) for index, (chat, answer) in enumerate(told)],
        usage=counter.usage(),
        system_fingerprint=reply.fingerprint,
        prompt_token_ids=jobs[0].prompt_tokens if reply.return_token_ids and alone else None,
        prompt_logprobs=writer.prompt(prompt) if alone else None,
        prompt_text=str(jobs[0].text or "") if reply.return_prompt_text and alone else None,
        metrics=counter.timings(),
        warnings=reply.warnings,
    )
    return extended(answer, [one.output for _, one in told if one.output is not None])


def _choice(index: int, answer: _ChoiceAccumulator, chat: Chat, reply: Reply, writer: LogprobWriter) -> ChatChoice:
    output = answer.output
    assert output is not None
    return ChatChoice(
        index,
        said(chat, answer.message),
        writer.chat(output),
        answer.finish,
        output.stop_reason,
        output.token_ids if reply.return_token_ids else None,
    )


def said(chat: Chat, message: AccumulatedMessage) -> ChatMessage:
    """Return the assistant's message of an answer."""
    told = chat.plan.reasoning is not None and chat.show_reasoning
    reasoning = (message.reasoning or None) if told else UNSET
    content = chat.prefix + message.content
    forced = chat.plan.tools is not None and chat.plan.tools.forced
    nothing = not content and not forced and (bool(message.calls) or bool(message.reasoning))
    return ChatMessage(
        chat.role,
        None if nothing else content,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=message.calls or UNSET,
    )


def _count_reasoning(counter: UsageCounter, chat: Chat, routed: list[Routed]) -> None:
    if chat.plan.reasoning is not None:
        counter.reasoning_tokens = sum(one.reasoning_tokens for one in routed)


async def _stream(ctx: ServerContext, chat: Chat, reply: Reply, writer: LogprobWriter) -> AsyncGenerator[bytes, None]:
    counter = UsageCounter(ctx, [chat.job])
    routed = chat.choices()
    finished = 0
    opening = _opening(reply, counter, chat)
    async with aclosing(run(ctx, [chat.job])) as outputs:
        async for number, output in outputs:
            counter.add(number, output)
            events, opening = opening, []
            for choice in output.outputs:
                finished += choice.finish_reason is not None
                delta = _delta(choice, routed[choice.index].take(choice), reply, writer)
                _count_reasoning(counter, chat, routed)
                if delta is not None:
                    last = finished == len(routed) and choice is output.outputs[-1]
                    chunk = reply.chunk(ChatChunk, counter, [delta], ends=reply.ends(last=last))
                    events.append(event(chunk if choice.extra is None else extended(chunk, [choice])))
            if events:
                yield b"".join(events)
    if reply.include_usage:
        yield event(reply.chunk(ChatChunk, counter, [], ends=True))


def _opening(reply: Reply, counter: UsageCounter, chat: Chat) -> list[bytes]:
    """Return the chunks that give each choice its role; they are sent with the first text."""
    job, delta = chat.job, ChatDelta(chat.role, chat.prefix)
    return [
        event(
            ChatChunk(
                id=reply.id,
                created=reply.created,
                model=reply.model,
                choices=[ChatChunkChoice(index, delta)],
                usage=reply.chunk_usage(counter),
                prompt_token_ids=job.prompt_tokens if reply.return_token_ids and index == 0 else UNSET,
                prompt_text=str(job.text or "") if reply.return_prompt_text and index == 0 else UNSET,
            )
        )
        for index in range(job.request.params.n)
    ]


def _delta(choice: CompletionOutput, news: ChoiceDelta, reply: Reply, writer: LogprobWriter) -> ChatChunkChoice | None:
    """Return the new parts of a choice, or None if there is nothing to show."""
    ends = news.finish is not None
    ids = choice.token_ids if reply.return_token_ids else UNSET
    logprobs = writer.chat(choice) if choice.logprobs else None
    said = news.content or news.reasoning or news.calls
    if not (said or ends or ids or logprobs):
        return None
    return ChatChunkChoice(
        choice.index,
        ChatDelta(
            content=news.content if news.content or not said else UNSET,
            reasoning=news.reasoning or UNSET,
            reasoning_content=news.reasoning or UNSET,
            tool_calls=news.calls or UNSET,
        ),
        logprobs,
        news.finish,
        choice.stop_reason if ends else UNSET,
        ids,
    )
