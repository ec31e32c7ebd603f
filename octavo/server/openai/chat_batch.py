"""`POST /v1/chat/completions/batch`: several conversations in one request."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError
from octavo.server.body import parse_body, require
from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.openai.chat import Chat, prepare_chat, whole
from octavo.server.openai.logprobs import LogprobWriter, tokens_as_ids
from octavo.server.openai.protocol import ChatBatchBody, ChatBody
from octavo.server.openai.reply import Reply
from octavo.server.openai.unsupported import check_extras
from octavo.server.stream import until_disconnect


async def chat_completions_batch(ctx: ServerContext, request: Request) -> Response:
    """Answer several conversations; each choice's index is its conversation's position."""
    body = await parse_body(request, ChatBatchBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_request(request, body.model, body)
    reply = Reply.of(ctx, request, body, "chatcmpl-", check_extras(ctx, body, chat=True))
    chats = await _prepare(ctx, body, reply.id)
    params = chats[0].job.request.params
    writer = LogprobWriter(ctx.frontend.tokenizer, params, as_ids=tokens_as_ids(ctx, body))
    return json_response(await until_disconnect(request.receive, whole(ctx, chats, reply, writer)))


async def _prepare(ctx: ServerContext, body: ChatBatchBody, name: str) -> Sequence[Chat]:
    require(not body.streamed, "stream", True, "Several conversations can't be streamed; send them one by one.")
    require(body.choices == 1, "n", body.n, "n must be 1 for several conversations.")
    limit, count = ctx.config.max_prompts, len(body.messages)
    text = f"messages must have at most {limit} conversations on this server, got {count}."
    require(count <= limit, "messages", f"{count} conversations", text)
    idle = {one.field for hook in ctx.frontend.preparer.hooks for one in hook.idle(body)}
    extra = {name: value for name, value in (body.model_extra or {}).items() if name not in idle}
    chats = []
    for number, messages in enumerate(body.messages):
        one = ChatBody.model_construct(**{**body.__dict__, **extra, "messages": messages})
        try:
            chats.append(await prepare_chat(ctx, one, name))
        except InvalidRequestError as exc:
            if exc.param != "messages":
                raise
            raise InvalidRequestError(exc.message, param=f"messages.{number}", value=exc.value) from None
    return chats
