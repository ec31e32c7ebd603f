"""The documents name files; each must exist, or a reader looks for something that was moved or never was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
# Code spans that look like paths and are none of ours.
OTHERS = {"application/json"}
_SPAN = re.compile(r"`([\w.<>/-]+)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
_OURS = (".py", ".md", ".toml", ".txt", ".sh")


def paths_in(text: str) -> Iterator[str]:
    """Code spans that name a file or folder of the project; a placeholder such as <name> ends the path."""
    for span in _SPAN.findall(text):
        is_path = "/" in span.strip("/") or span.endswith(("/", *_OURS))
        if is_path and not span.startswith(("/", ".venv")) and span not in OTHERS:
            yield span.partition("<")[0]


def exists(path: str) -> bool:
    """Whether the path is there, from the root or from the package; a bare file name may be anywhere in the package."""
    if (ROOT / path).exists() or (ROOT / "octavo" / path).exists():
        return True
    return "/" not in path and any((ROOT / "octavo").rglob(path))


def test_there_are_documents_and_they_name_files() -> None:
    assert {path.name for path in DOCUMENTS} >= {"README.md", "CONTRIBUTING.md", "architecture.md", "request-flow.md"}
    assert len({path for document in DOCUMENTS for path in paths_in(document.read_text(encoding="utf-8"))}) > 50


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_in_it_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert [path for path in paths_in(text) if not exists(path)] == []
    assert [link for link in _LINK.findall(text) if not (document.parent / link).exists()] == []


def test_every_folder_of_the_package_is_explained() -> None:
    """Features explain themselves: `features/` is a floor like any other."""
    package = ROOT / "octavo"
    sources = (path for ending in ("*.py", "*.cpp") for path in package.rglob(ending))
    folders = {path.parent.relative_to(package).as_posix() for path in sources}
    told = {path.rstrip("/") for path in paths_in((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))}
    assert {one for one in folders if one not in told and not one.startswith("features/")} == {".", "entrypoints"}


def test_a_path_that_is_not_there_is_seen() -> None:
    text = "`server/door.py`, `server/gate.py`, `octavo/features/<name>/`, `hooks.py`, `gates.py`, `/health`, `a b/c`"
    assert [path for path in paths_in(text) if not exists(path)] == ["server/gate.py", "gates.py"]
