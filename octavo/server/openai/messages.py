"""Rendering of a request's messages to a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.core.errors import ConfigError, InvalidRequestError, UnsupportedError
from octavo.server.context import ServerContext
from octavo.server.openai.protocol import Message
from octavo.text.aside import aside
from octavo.text.chat.template import ChatTemplate
from octavo.text.prompts.message_parts import MessageParts
from octavo.text.tools.tool import Tool, explain_in_words

_AROUND = 16
"""Characters that a template writes around a message: a thousand short messages are a long conversation, too."""


async def render(
    ctx: ServerContext,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    options: dict[str, Any] | None,
    template: str | None = None,
    tools: Sequence[Tool] = (),
    parts: MessageParts | None = None,
) -> str:
    """Render `messages` with the chat template; a long conversation in a thread.

    Args:
        options: additional variables for the template.
        template: the request's own template.
        parts: those other than text, which the messages' contents mark.
        tools: described to the model by the template, or in the system message if the template does not support tools.

    Raises:
        InvalidRequestError: the flags contradict each other, a message is incomplete, or the template refuses.
    """
    variables = options or {}
    own = _own_template(ctx, template)
    goes_on = bool(continue_final_message)
    _check_options(variables, contradiction=goes_on and bool(add_generation_prompt))
    answers = ctx.frontend.answers
    chat = own or ctx.frontend.chat
    generate = not goes_on if add_generation_prompt is None else add_generation_prompt

    def work() -> str:
        plain = [template_message(number, message) for number, message in enumerate(messages)]
        declared = [tool.declared() for tool in tools] if answers.template_tools else []
        guard = None
        if (
            chat
            and not answers.template_tools
            and (tools or any(m["role"] == "tool" or m.get("tool_calls") for m in plain))
        ):
            guard = chat.guard()
            plain = explain_in_words(plain, tools, answers.tools, guard)
        write = own.render if own else ctx.frontend.render_chat
        return write(
            plain,
            add_generation_prompt=generate,
            continue_final_message=goes_on,
            tools=declared,
            template_kwargs=variables,
            roles=(ctx.config.response_role,),
            guard=guard,
            shown=None if parts is None else parts.shown,
        )

    return await aside(sum(_AROUND + len(message.text) for message in messages), work)


def _check_options(variables: dict[str, Any], *, contradiction: bool) -> None:
    """Refuse a request to both continue a message and begin one, and variables that are fields of the request."""
    if contradiction:
        raise InvalidRequestError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True. Choose one.",
            param="continue_final_message",
            value=True,
        )
    for name in ("messages", "add_generation_prompt", "continue_final_message", "tools"):
        if name in variables:
            raise InvalidRequestError(
                f"chat_template_kwargs can't set {name}; set it in the request itself.", param="chat_template_kwargs"
            )


def template_message(number: int, message: Message) -> dict[str, Any]:
    """Convert a message for chat templates. The role "developer" becomes "system".

    Raises:
        InvalidRequestError: the message has no content.
    """
    if message.content is None and message.role != "assistant":
        raise InvalidRequestError(
            f"messages.{number}.content is required for the role {message.role}; give it a string.",
            param=f"messages.{number}.content",
        )
    plain = message.model_dump(exclude_none=True)
    content = message.content
    if isinstance(content, list):
        plain["content"] = [{"type": "text", "text": text} for text in content]
    elif content is None and not message.tool_calls:
        plain["content"] = ""
    if message.role == "developer":
        plain["role"] = "system"
    return plain


def _own_template(ctx: ServerContext, source: str | None) -> ChatTemplate | None:
    """Compile the template in a request, if the server allows it."""
    if source is None:
        return None
    if not ctx.config.trust_request_chat_template:
        raise UnsupportedError(
            "chat_template is not accepted in requests; start the server with --trust-request-chat-template.",
            param="chat_template",
            value=source,
        )
    try:
        return ChatTemplate(source, ctx.frontend.tokenizer, ctx.config.chat_template_content_format)
    except ConfigError as exc:
        raise InvalidRequestError(str(exc), param="chat_template") from None
