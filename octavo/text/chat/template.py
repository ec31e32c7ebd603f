"""Rendering of chat messages to a prompt with the model's own Jinja template, in a sandbox."""

from __future__ import annotations

import datetime
import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.text.chat.content_format import ContentFormat, Taken, asks_for_none, taken_by
from octavo.text.chat.guard import ContentGuard
from octavo.text.chat.messages import plain_messages
from octavo.text.tokenizers.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that any chat may use. A template's own roles, such as "ipython", are string constants in its source."""
_SYNONYMS = {"human": "user", "ai": "assistant", "bot": "assistant", "gpt": "assistant", "model": "assistant"}
_REASONING = {"reasoning_content": "reasoning", "reasoning": "reasoning_content"}
"""A message's field with reasoning -> its other name; a template reads one of them."""
_QUOTED = re.compile(r"""(?<=['"])[A-Za-z][\w-]*(?=['"])""")
# Appended to the message that is to be continued, to find the place where the prompt is cut.
_CUT = "\N{OBJECT REPLACEMENT CHARACTER}octavo-continues-here\N{OBJECT REPLACEMENT CHARACTER}"


class ChatTemplate:
    """A compiled template, or several by name: "tool_use" serves requests with tools, "default" all others.

    Args:
        source: Jinja source, or name -> source.
        content_format: form of the contents, unless `render` overrides it.

    Raises:
        ConfigError: the source is not valid Jinja; the message gives the line.
    """

    def __init__(
        self, source: str | Mapping[str, str], tokenizer: Tokenizer, content_format: ContentFormat = "auto"
    ) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        environment = _environment()
        self._templates = {name: _compile(environment, name, text) for name, text in self._sources.items()}
        parsed = {name: environment.parse(text) for name, text in self._sources.items()}
        self._taken = {name: taken_by(template) for name, template in parsed.items()}
        self._asks_for_none = {name: asks_for_none(template) for name, template in parsed.items()}
        self._roles = {*ROLES, *(word for text in self._sources.values() for word in _QUOTED.findall(text))}
        self._reasoning = {
            name: next((one for one in _REASONING if re.search(rf"\b{one}\b", text)), None)
            for name, text in self._sources.items()
        }
        self._tokenizer = tokenizer
        self._tokens = dict(tokenizer.named_tokens)
        self._format: ContentFormat = content_format

    @property
    def source(self) -> str:
        """The Jinja source for requests with tools."""
        return self._sources.get("tool_use") or self._sources.get("default", "")

    def guard(self) -> ContentGuard:
        """Return a new guard for one rendering."""
        return ContentGuard(None if self._tokenizer.special_in_content else self._tokenizer.special)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        content_format: ContentFormat | None = None,
        roles: Collection[str] = (),
        guard: ContentGuard | None = None,
        shown: Callable[[Any], Any] | None = None,
        **variables: Any,
    ) -> str:
        """Render a prompt. It contains the special tokens: encode it with `add_special_tokens=False`.

        If messages, tools or documents spell special tokens, it is a `LiteralText` (unless the tokenizer's
        `special_in_content` is set), so that the model sees them as text.

        Args:
            add_generation_prompt: end with the mark that begins the assistant's answer.
            continue_final_message: end inside the last message, so that the model continues it; no mark is added then.
            template_kwargs, variables: further variables for the template. `template_kwargs` may contain any name, as
                sent by a client (`chat_template_kwargs`); the arguments above take precedence.
            content_format: form of the contents; None for the template's default.
            roles: allowed roles besides `ROLES` and those in the template's source.
            guard: the guard that has already marked the messages; None for a new one.
            shown: changes each content into what the template reads, such as `MessageParts.shown`.

        Raises:
            InvalidRequestError: the messages are invalid, or this template refuses them; `param` is "messages".
        """
        name = self._choose(bool(tools))
        taken = self._taken_in(content_format or self._format, name)
        plain = plain_messages(messages, taken=taken, none=self._asks_for_none[name])
        self._check_roles(plain, roles)
        plain = [_with_reasoning(message, self._reasoning[name]) for message in plain]
        if continue_final_message:
            _check_continuable(plain[-1])
            plain[-1] = plain[-1] | {"content": _to_be_cut(plain[-1]["content"])}
        if shown is not None:
            plain = [message | {"content": shown(message["content"])} for message in plain]
        if guard is None:
            guard = self.guard()
            plain = guard.mark(plain)
        context = {**self._tokens, "documents": None, **(template_kwargs or {}), **variables}
        context |= {
            "documents": guard.mark(context["documents"]),
            "messages": plain,
            "tools": guard.mark(list(tools)) if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        prompt = self._run(self._templates[name], context)
        return guard.read(_cut(prompt) if continue_final_message else prompt)

    def names_role(self, role: str) -> bool:
        """Return whether `role` is a common role or occurs in the template's source."""
        return role in self._roles

    def _check_roles(self, messages: Sequence[Mapping[str, Any]], allowed: Collection[str]) -> None:
        """Refuse misspelled roles, which most templates would write unchecked. Unknown custom roles pass."""
        for message in messages:
            role = message["role"]
            meant = None if self.names_role(role) or role in allowed else _meant(role)
            if meant is not None:
                raise InvalidRequestError(
                    f"The role {role!r} is not in this model's chat template; did you mean {meant}? "
                    f"Roles are {', '.join(ROLES)}.",
                    param="messages",
                    value=role,
                )

    def _taken_in(self, form: ContentFormat, name: str) -> Taken:
        """Return what contents are to be made into for a template."""
        if form == "auto":
            return self._taken[name]
        return "parts" if form == "openai" else "strings"

    def _choose(self, with_tools: bool) -> str:
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if name in self._templates:
                return name
        raise InvalidRequestError(
            f"The model has no default chat template, only: {', '.join(self._templates)}. "
            "Start the server with --chat-template FILE.",
            param="messages",
        )

    def _run(self, template: jinja2.Template, context: dict[str, Any]) -> str:
        try:
            return template.render(context)
        except InvalidRequestError:
            raise
        except Exception as exc:  # any exception of a template is about the messages
            raise InvalidRequestError(
                f"The model's chat template can't render these messages: {exc}", param="messages"
            ) from exc


def chat_template_of(
    tokenizer: Tokenizer, override: str | None = None, content_format: ContentFormat = "auto"
) -> ChatTemplate | None:
    """Return the template: `override` (a file's path, or Jinja source), else the model's; None if there is none.

    Raises:
        ConfigError: `override` looks like a path but is not a readable file, or a template is not valid.
    """
    source = tokenizer.chat_templates if override is None else _read(override)
    return ChatTemplate(source, tokenizer, content_format) if override is not None or source else None


def no_template_error() -> InvalidRequestError:
    """Return the error for chat with a model that has no chat template."""
    return InvalidRequestError(
        "This model has no chat template, so messages can't be made into a prompt. Use /v1/completions, or start the "
        "server with --chat-template FILE.",
        param="messages",
    )


def _read(override: str) -> str:
    if any(mark in override for mark in ("{{", "{%", "{#", "\n")):
        return override
    try:
        return Path(override).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"The chat template {override!r} can't be read: {exc}. Give a file's path, or the Jinja source itself."
        ) from exc


def _compile(environment: jinja2.Environment, name: str, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as exc:
        raise ConfigError(
            f"The chat template {name!r} is not valid Jinja: {exc.message} (line {exc.lineno}). "
            "Give another one with --chat-template FILE."
        ) from exc


def _meant(role: str) -> str | None:
    """Return the common role that a misspelled or foreign one means; None for custom roles."""
    word = role.strip().lower()
    near = [_SYNONYMS[word]] if word in _SYNONYMS else difflib.get_close_matches(word, ROLES, n=1, cutoff=0.75)
    return near[0] if near else None


def _with_reasoning(message: dict[str, Any], field: str | None) -> dict[str, Any]:
    """Return the message with its reasoning under the name that the template reads; None for none."""
    if field is None or message.get(field) or not message.get(_REASONING[field]):
        return message
    return message | {field: message[_REASONING[field]]}


def _check_continuable(message: Mapping[str, Any]) -> None:
    """Refuse to continue a message with calls: templates write them after the content, where the prompt is cut."""
    if message.get("tool_calls"):
        raise InvalidRequestError(
            "The final message has tool_calls, so it can't be continued; send the results of the calls after it, or "
            "leave out the calls.",
            param="messages",
        )


def _to_be_cut(content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    """Return the content with the mark after its last text."""
    if isinstance(content, str):
        return content + _CUT
    *before, last = content or [{"type": "text", "text": ""}]
    return [*before, last | {"text": last["text"] + _CUT}]


def _cut(prompt: str) -> str:
    place = prompt.rfind(_CUT)
    if place < 0:
        raise InvalidRequestError(
            "continue_final_message is set, but the chat template leaves the final message out of the prompt.",
            param="messages",
        )
    return prompt[:place]


def _environment() -> jinja2.Environment:
    """Return the environment that Hugging Face's chat templates expect."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; when serving, its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON that is not escaped for HTML, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
