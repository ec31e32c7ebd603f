"""Parameters that clients of this ecosystem send and this version does not support.

Silently ignoring one would answer a question that nobody asked. So each is refused by name, unless its value asks for
what happens anyway. A field that nobody knows is ignored, and the answer says so.
"""

from __future__ import annotations

from typing import Any

from octavo.core.errors import UnsupportedError
from octavo.core.request import BACKGROUND
from octavo.server.body import unknown_field
from octavo.server.context import ServerContext
from octavo.server.openai.protocol import GenerationBody
from octavo.server.openai.sampling import BUDGETS

_ABSENT: tuple[Any, ...] = (None,)

_BOTH: dict[str, tuple[Any, ...]] = {
    "kv_transfer_params": (None, {}),
    "logits_processors": (None, []),
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "separate_reasoning": (None, True),
    "spaces_between_special_tokens": (None, True, False),  # fast tokenizers write none, whatever is said
    "stream_reasoning": (None, True),
}
_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": _ABSENT,
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "prompt": _ABSENT,
    "prediction": _ABSENT,
    "verbosity": (None, "medium"),
    "web_search_options": _ABSENT,
}
_INSTEAD = {
    "functions": "declare them as tools",
    "function_call": "declare tools, and say which with tool_choice",
    "logits_processors": "load them at the server's start, with --logits-processors",
}
_NEEDLESS = {"guided_decoding_backend": "there is one backend"}


def check_extras(ctx: ServerContext, body: GenerationBody, *, chat: bool) -> list[str]:
    """Warnings about fields without an effect: nobody knows them, or the model has nothing that they could bear on.

    Raises:
        InvalidRequestError: there is such a field, and with --strict-params that is not let pass.
        UnsupportedError: a known parameter asks for something that this version does not do.
    """
    known = _BOTH | (_CHAT if chat else {})
    strict = ctx.config.strict_params
    warnings = [] if ctx.frontend.answers.reasoning else _idle_budget(body, strict=strict)
    warnings += _idle_priority(body, ctx.frontend.info.scheduling_policy, strict=strict)
    for name, value in body.extra.items():
        if name == "best_of":
            neutral = value is None or _same(value, body.choices)
        elif name in _NEEDLESS:
            warnings.append(f"`{name}` was ignored: {_NEEDLESS[name]}.")
            continue
        elif name in known:
            neutral = any(_same(value, one) for one in known[name])
        else:
            warnings.append(unknown_field(body, name, value, strict=strict))
            continue
        if not neutral:
            remedy = _INSTEAD.get(name, "leave it out")
            raise UnsupportedError(f"{name} is not supported by this version; {remedy}.", param=name, value=value)
    return warnings


def _idle_budget(body: GenerationBody, *, strict: bool) -> list[str]:
    """About a bound on the reasoning of a model that marks none."""
    name, value = next(((name, value) for name in BUDGETS if (value := getattr(body, name)) is not None), ("", -1))
    if value < 0:
        return []
    why = (
        "this model marks no reasoning that could be bounded. Leave it out, or start the server with "
        "--reasoning-parser if the model does reason"
    )
    return [_idle(name, value, why, strict=strict)]


def _idle_priority(body: GenerationBody, policy: str, *, strict: bool) -> list[str]:
    """About a priority under a policy that does not ask for it."""
    value = body.priority or 0
    if value == 0 or value >= BACKGROUND or policy in ("", "priority"):
        return []
    why = f"the server runs with --scheduling-policy {policy}. Leave it out, or start the server with priority"
    return [_idle("priority", value, why, strict=strict)]


def _idle(name: str, value: int, why: str, *, strict: bool) -> str:
    if strict:
        raise UnsupportedError(f"{name} has no effect: {why}.", param=name, value=value)
    return f"`{name}` has no effect: {why}."


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells booleans from numbers, as JSON does."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
