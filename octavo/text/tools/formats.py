"""Formats of tool calls: one table of literals, from which both the grammar and the router are made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from octavo.core.errors import ConfigError
from octavo.text.tools.keyed import Keyed


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Calls are written `group_open call (separator call)* group_close`, a call as
    `call_open NAME name_close ARGUMENTS call_close`, the arguments as a JSON object, or one by one.

    Attributes:
        trigger: the text that starts calls inside free text; a prefix of `group_open + call_open`. Empty for formats
            without a mark, where the output is either only calls or no call.
        keyed: how arguments are written one by one; None for a JSON object.
        numbered: separator between a function's name and the number of the call; empty if calls have none.
        id_prefix: prefix of the id of a numbered call; the end of `call_open`.
        id_length: required length of call ids, if the chat template checks it; 0 for any.
    """

    name: str
    trigger: str
    call_open: str
    name_close: str
    call_close: str
    separator: str = "\n"
    group_open: str = ""
    group_close: str = ""
    keyed: Keyed | None = None
    numbered: str = ""
    id_prefix: str = ""
    id_length: int = 0

    @property
    def opening(self) -> str:
        """All text before the first name."""
        return self.group_open + self.call_open

    @property
    def name_end(self) -> str:
        """The text after a name; no name contains it."""
        return self.name_close or self.call_close[0]

    def write(self, name: str, arguments: str, number: int = 0) -> str:
        """Return one call as the model writes it. `arguments` is a JSON object."""
        mark = f"{self.numbered}{number}" if self.numbered else ""
        written = self.keyed.write(arguments) if self.keyed else arguments
        return self.call_open + name + mark + self.name_close + written + self.call_close


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
DEEPSEEK31 = ToolFormat(
    name="deepseek_v31",
    trigger="<｜tool▁calls▁begin｜>",  # noqa: RUF001
    group_open="<｜tool▁calls▁begin｜>",  # noqa: RUF001
    call_open="<｜tool▁call▁begin｜>",  # noqa: RUF001
    name_close="<｜tool▁sep｜>",  # noqa: RUF001
    call_close="<｜tool▁call▁end｜>",  # noqa: RUF001
    separator="",
    group_close="<｜tool▁calls▁end｜>",  # noqa: RUF001
)
KIMI = ToolFormat(
    name="kimi_k2",
    trigger="<|tool_calls_section_begin|>",
    group_open="<|tool_calls_section_begin|>",
    call_open="<|tool_call_begin|>functions.",
    name_close="<|tool_call_argument_begin|>",
    call_close="<|tool_call_end|>",
    separator="",
    group_close="<|tool_calls_section_end|>",
    numbered=":",
    id_prefix="functions.",
)
QWEN_CODER = ToolFormat(
    name="qwen3_coder",
    trigger="<tool_call>",
    call_open="<tool_call>\n<function=",
    name_close=">\n",
    call_close="</function>\n</tool_call>",
    keyed=Keyed(key_open="<parameter=", key_close=">\n", value_close="\n</parameter>\n"),
)
SEED = ToolFormat(
    name="seed_oss",
    trigger="<seed:tool_call>",
    call_open="<seed:tool_call>\n<function=",
    name_close=">\n",
    call_close="</function>\n</seed:tool_call>",
    keyed=Keyed(key_open="<parameter=", key_close=">", value_close="</parameter>\n"),
)
MINIMAX = ToolFormat(
    name="minimax_m2",
    trigger="<minimax:tool_call>",
    group_open="<minimax:tool_call>\n",
    call_open='<invoke name="',
    name_close='">\n',
    call_close="</invoke>\n",
    separator="",
    group_close="</minimax:tool_call>",
    keyed=Keyed(key_open='<parameter name="', key_close='">', value_close="</parameter>\n"),
)
GLM45 = ToolFormat(
    name="glm45",
    trigger="<tool_call>",
    call_open="<tool_call>",
    name_close="\n",
    call_close="</tool_call>",
    keyed=Keyed(key_open="<arg_key>", key_close="</arg_key>\n<arg_value>", value_close="</arg_value>\n"),
)
GLM47 = ToolFormat(
    name="glm47",
    trigger="<tool_call>",
    call_open="<tool_call>",
    name_close="",
    call_close="</tool_call>",
    separator="",
    keyed=Keyed(key_open="<arg_key>", key_close="</arg_key><arg_value>", value_close="</arg_value>"),
)
PYTHONIC = ToolFormat(
    name="pythonic",
    trigger="",
    group_open="[",
    call_open="",
    name_close="(",
    call_close=")",
    separator=", ",
    group_close="]",
    keyed=Keyed(key_open="", key_close="=", value_close="", separator=", ", raw=False),
)
GRANITE = ToolFormat(
    name="granite",
    trigger="<|tool_call|>",
    group_open="<|tool_call|>[",
    call_open='{"name": "',
    name_close='", "arguments": ',
    call_close="}",
    separator=", ",
    group_close="]",
)
PHI4 = ToolFormat(
    name="phi4_mini_json",
    trigger="functools[",
    group_open="functools[",
    call_open='{"name": "',
    name_close='", "arguments": ',
    call_close="}",
    separator=", ",
    group_close="]",
)
JSON = ToolFormat(name="json", trigger="", call_open='{"name": "', name_close='", "arguments": ', call_close="}")

FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        one.name: one
        for one in (
            *(HERMES, QWEN_CODER, LLAMA3, PYTHONIC, MISTRAL, MISTRAL_ARGS, DEEPSEEK, DEEPSEEK31),
            *(GLM45, GLM47, KIMI, MINIMAX, SEED, GRANITE, PHI4, JSON),
        )
    }
)
# Names of these formats in other servers.
_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "glm4_moe": "glm45",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
}
_MARKS: tuple[tuple[str, ToolFormat], ...] = (
    (r"\[ARGS\]", MISTRAL_ARGS),
    (r"\[TOOL_CALLS\]", MISTRAL),
    ("(?s)<｜tool▁calls▁begin｜>.*```json|```json.*<｜tool▁calls▁begin｜>", DEEPSEEK),  # noqa: RUF001
    ("<｜tool▁calls▁begin｜>", DEEPSEEK31),  # noqa: RUF001
    (r"<\|tool_calls_section_begin\|>", KIMI),
    ("<minimax:tool_call>", MINIMAX),
    ("<seed:tool_call>", SEED),
    ("<function=", QWEN_CODER),
    ("</arg_key><arg_value>", GLM47),
    ("<arg_key>", GLM45),
    (r"<\|tool_call\|>", GRANITE),
    (r"functools\[", PHI4),
    (r"<tool_call>", HERMES),
    (r"<\|python_start\|>", PYTHONIC),
    (r"<\|python_tag\|>|Environment: ipython", LLAMA3),
)


def tool_format(name: str, own: Mapping[str, ToolFormat] = MappingProxyType({})) -> ToolFormat:
    """Return the format of a name, or of another server's name for it; `own` are formats that the user declares.

    Raises:
        ConfigError: the name is unknown.
    """
    known = own.get(name) or FORMATS.get(_ALIASES.get(name, name))
    if known is None:
        names = ", ".join([*own, *FORMATS])
        raise ConfigError(f"--tool-call-parser {name!r} is not known; choose auto or one of: {names}.")
    return known


def detect_format(template: str) -> ToolFormat:
    """Return the format of calls in a chat template; Hermes' if it shows none."""
    return next((one for mark, one in _MARKS if re.search(mark, template)), HERMES)


def takes_tools(template: str) -> bool:
    """Return whether a chat template describes tools to the model."""
    return re.search(r"\btools\b", template) is not None
