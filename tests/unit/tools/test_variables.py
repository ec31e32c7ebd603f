"""The environment variables that Make and the tools set for the tests."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
FILES = ("Makefile", "tools/deletion.py", "tests/conftest.py", "tests/examples.py")


def test_none_is_named_like_a_setting() -> None:
    """The servers that tests start inherit them, and print a line for each OCTAVO_ variable that they do not read."""
    found = {name: re.findall(r"\bOCTAVO_\w+", (REPOSITORY / name).read_text(encoding="utf-8")) for name in FILES}
    assert not any(found.values()), found
