"""Formats of tool calls that a user declares in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.errors import ConfigError
from octavo.text.answers.formats import AnswerFormats
from octavo.text.tools.formats import HERMES

HEAD = "from octavo.text.tools.formats import HERMES, ToolFormat\n"
MINE = 'MINE = ToolFormat(name="mine", trigger="<fn>", call_open="<fn>", name_close="|", call_close="</fn>")\n'


def plugin(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return str(folder / "mine.py")


def test_a_declared_format_is_chosen_by_name(tmp_path: Path) -> None:
    file = plugin(tmp_path, HEAD + MINE)
    assert AnswerFormats.of(None, tools="mine", plugin=file).tools.write("f", "{}") == "<fn>f|{}</fn>"
    assert AnswerFormats.of(None, tools="hermes", plugin=file).tools is HERMES
    assert AnswerFormats.of(None, plugin=file).tools is HERMES
    with pytest.raises(ConfigError, match="'yours' is not known; choose auto or one of: mine, hermes"):
        AnswerFormats.of(None, tools="yours", plugin=file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD, "declares no format.*Parsers for other servers can't be used"),
        ("1/0", "fails: ZeroDivisionError"),
        (HEAD + MINE.replace('"mine"', '"hermes"'), "its name is that of a built-in format"),
        (HEAD + MINE.replace('call_close="</fn>"', 'call_close=""'), "call_close must not be empty"),
        (HEAD + MINE.replace('trigger="<fn>"', 'trigger="x"'), "its trigger 'x' is not a prefix of '<fn>'"),
    ],
)
def test_what_is_no_format_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        AnswerFormats.of(None, tools="mine", plugin=plugin(tmp_path, text))


def test_a_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give an existing"):
        AnswerFormats.of(None, plugin=str(tmp_path / "none.py"))
