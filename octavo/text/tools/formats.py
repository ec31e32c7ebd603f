"""How models write tool calls: one table of literals, from which both the grammar and the router are made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from octavo.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Calls are written `group_open call (separator call)* group_close`, a call as
    `call_open NAME name_close ARGUMENTS call_close`, the arguments as a JSON object.

    Attributes:
        trigger: where it appears in free text, calls begin; a beginning of `group_open + call_open`. Empty for formats
            without a mark, in which the whole output is calls or none of it is.
        id_length: of the ids of calls, where the chat template insists; 0 for any.
    """

    name: str
    trigger: str
    call_open: str
    name_close: str
    call_close: str
    separator: str = "\n"
    group_open: str = ""
    group_close: str = ""
    id_length: int = 0

    @property
    def opening(self) -> str:
        """All that stands before the first name."""
        return self.group_open + self.call_open

    def write(self, name: str, arguments: str) -> str:
        """One call, as the model writes it."""
        return self.call_open + name + self.name_close + arguments + self.call_close


HERMES = ToolFormat(
    name="hermes",
    trigger="<tool_call>",
    call_open='<tool_call>\n{"name": "',
    name_close='", "arguments": ',
    call_close="}\n</tool_call>",
)
LLAMA3 = ToolFormat(
    name="llama3_json",
    trigger="",
    call_open='{"name": "',
    name_close='", "parameters": ',
    call_close="}",
    separator="; ",
)
MISTRAL = ToolFormat(
    name="mistral",
    trigger="[TOOL_CALLS]",
    group_open="[TOOL_CALLS][",
    call_open='{"name": "',
    name_close='", "arguments": ',
    call_close="}",
    separator=", ",
    group_close="]",
    id_length=9,
)
MISTRAL_ARGS = ToolFormat(
    name="mistral_args",
    trigger="[TOOL_CALLS]",
    call_open="[TOOL_CALLS]",
    name_close="[ARGS]",
    call_close="",
    separator="",
    id_length=9,
)
DEEPSEEK = ToolFormat(
    name="deepseek_v3",
    trigger="<｜tool▁calls▁begin｜>",  # noqa: RUF001
    group_open="<｜tool▁calls▁begin｜>",  # noqa: RUF001
    call_open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",  # noqa: RUF001
    name_close="\n```json\n",
    call_close="\n```<｜tool▁call▁end｜>",  # noqa: RUF001
    group_close="<｜tool▁calls▁end｜>",  # noqa: RUF001
)
JSON = ToolFormat(name="json", trigger="", call_open='{"name": "', name_close='", "arguments": ', call_close="}")

FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {one.name: one for one in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, DEEPSEEK, JSON)}
)
# Names under which other servers know these.
_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
}
_MARKS: tuple[tuple[str, ToolFormat], ...] = (
    (r"\[ARGS\]", MISTRAL_ARGS),
    (r"\[TOOL_CALLS\]", MISTRAL),
    ("<｜tool▁calls▁begin｜>", DEEPSEEK),  # noqa: RUF001
    (r"<tool_call>", HERMES),
    (r"<\|python_tag\|>|Environment: ipython", LLAMA3),
)


def tool_format(name: str) -> ToolFormat:
    """By its name, or by another server's name for it.

    Raises:
        ConfigError: nobody knows it.
    """
    known = FORMATS.get(_ALIASES.get(name, name))
    if known is None:
        raise ConfigError(f"--tool-call-parser {name!r} is not known; choose auto or one of: {', '.join(FORMATS)}.")
    return known


def detect_format(template: str) -> ToolFormat:
    """The format in which a chat template shows calls; Hermes' where it shows none."""
    return next((one for mark, one in _MARKS if re.search(mark, template)), HERMES)


def takes_tools(template: str) -> bool:
    """Whether a chat template tells the model about tools."""
    return re.search(r"\btools\b", template) is not None
