"""Parameters of OpenAI's API and of other engines that are not supported or have no effect."""

from __future__ import annotations

from typing import Any

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.server.context import ServerContext
from octavo.server.extras import LEAVE_OUT, Limited, check_undeclared
from octavo.server.openai.protocol import ChatBody, GenerationBody, Message
from octavo.text.chat.template import ROLES

_BOTH: dict[str, Limited] = {
    "kv_transfer_params": (LEAVE_OUT, (None, {})),
    "logits_processors": ("load them at the server's start, with --logits-processors", (None, [])),
    "separate_reasoning": (LEAVE_OUT, (None, True)),
    "spaces_between_special_tokens": (LEAVE_OUT, (None, True, False)),  # fast tokenizers never write any
    "stream_reasoning": (LEAVE_OUT, (None, True)),
}
_CHAT: dict[str, Limited] = {
    "audio": ("it writes only text", (None,)),
    "function_call": ("declare tools, and say which with tool_choice", (None, "none", "auto")),
    "conversation": ("send previous_response_id, or the earlier items as input", (None,)),
    "functions": ("declare them as tools", (None, [])),
    "mcp_servers": ("declare the tools, and run them yourself", (None, [])),
    "modalities": ("it writes only text", (None, ["text"])),
    "prompt": ("send messages, or the prompt to /v1/completions", (None,)),
    "prediction": (LEAVE_OUT, (None,)),
    "verbosity": (LEAVE_OUT, (None, "medium")),
    "web_search_options": (LEAVE_OUT, (None,)),
}


def check_extras(ctx: ServerContext, body: GenerationBody, *, chat: bool) -> list[str]:
    """Return warnings about fields that are unknown or have no effect on this model.

    Also warns about tools that the template does not support, since describing them takes prompt tokens.

    Raises:
        InvalidRequestError: there is such a field, and --strict-params is set.
        UnsupportedError: a known parameter requests an unsupported feature.
    """
    strict = ctx.config.strict_params
    idle = [one for hook in ctx.frontend.preparer.hooks for one in hook.idle(body)]
    warnings = [_idle(one.field, one.value, one.reason, strict=strict) for one in idle]
    warnings += _idle_priority(body, ctx.frontend.info.scheduling_policy, strict=strict)
    warnings += _own_roles(ctx, body) if isinstance(body, ChatBody) else []
    warnings += [] if ctx.frontend.answers.template_tools else _described_tools(body)
    known = _BOTH | (_CHAT if chat else {}) | {"best_of": (LEAVE_OUT, (None, body.choices))}
    claimed = {name for hook in ctx.frontend.preparer.hooks for name in hook.body_fields}
    return warnings + check_undeclared(body, strict=strict, known=known, claimed=claimed)


def _own_roles(ctx: ServerContext, body: ChatBody) -> list[str]:
    """Warn about roles that the chat template does not name; most templates write any role."""
    template = ctx.frontend.chat
    if template is None or body.chat_template is not None:
        return []
    given: list[Any] = list(body.messages)
    messages: list[Message] = [one for part in given for one in (part if isinstance(part, list) else [part])]
    odd = dict.fromkeys(one.role for one in messages if not template.names_role(one.role))
    odd.pop(ctx.config.response_role, None)
    if odd and ctx.config.strict_params:
        role = next(iter(odd))
        raise InvalidRequestError(
            f"The role {role!r} is not one that the chat template names; choose one of {', '.join(ROLES)}.",
            param="messages",
            value=role,
        )
    return [f"The chat template does not name the role `{role}`; the role was passed to it unchanged." for role in odd]


def _described_tools(body: GenerationBody) -> list[str]:
    if not isinstance(body, ChatBody) or not body.tools or body.tool_choice == "none":
        return []
    return [
        "The model's chat template does not support `tools`: they were described in the system message, which counts "
        "as part of the prompt's tokens."
    ]


def _idle_priority(body: GenerationBody, policy: str, *, strict: bool) -> list[str]:
    """Warn about a priority under a policy without priorities."""
    value = body.priority or 0
    if value == 0 or policy in ("", "priority"):
        return []
    why = f"the server runs with --scheduling-policy {policy}. Leave it out, or start the server with priority"
    return [_idle("priority", value, why, strict=strict)]


def _idle(name: str, value: int, why: str, *, strict: bool) -> str:
    if strict:
        raise UnsupportedError(f"{name} has no effect: {why}.", param=name, value=value)
    return f"`{name}` has no effect: {why}."
