"""Files, headings, classes and their attributes that the documents name must exist."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from octavo.cli.flags.table import ENGINE_GROUPS, POOL_GROUPS, SERVER_GROUPS, flags_of

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
# Code spans that look like paths and are none of ours.
OTHERS = {"application/json"}
_SPAN = re.compile(r"`([\w.<>/-]+)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
_ANCHOR = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
_ATTRIBUTE = re.compile(r"`([A-Z]\w*)\.(\w+)")
_CLASS = re.compile(r"`([A-Z]\w*[a-z]\w*)[`(.]")
_FLAG = re.compile(r"`[^`\n]*?--(?:no-)?([a-z][a-z0-9-]+)")
# Pages about the code: every class that they name is one of the package's, or one of these.
DESIGN = {"CONTRIBUTING.md", "architecture.md", "request-flow.md", "adding-a-feature.md", "adding-a-model.md"}
BORROWED = {"None"}
# Where flags are defined, in quotes, with or without their dashes.
COMMANDS = ("octavo", "benchmarks", "tools", "conformance")
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


def headings(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", without_code, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def lost_anchors(document: Path, text: str) -> list[str]:
    """Links to headings that are not there."""
    lost = []
    for path, anchor in _ANCHOR.findall(text):
        target = text if not path else (document.parent / path).read_text(encoding="utf-8")
        if anchor not in headings(target):
            lost.append(f"{path}#{anchor}")
    return lost


@dataclass
class Definition:
    """Names of a class: its own, and those of its bases by the bases' names."""

    names: set[str] = field(default_factory=set)
    bases: set[str] = field(default_factory=set)


@functools.cache
def definitions() -> dict[str, Definition]:
    """Everything that the package defines with a capital letter. Classes of the same name are taken together."""
    found: dict[str, Definition] = defaultdict(Definition)
    for path in (ROOT / "octavo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].names |= set(assigned(node))
                found[node.name].bases |= set(filter(None, map(named, node.bases)))
            elif isinstance(node, ast.Assign):
                aliases = [target.id for target in node.targets if isinstance(target, ast.Name)]
                for alias in aliases:
                    if alias[:1].isupper():
                        found[alias].bases |= {named(node.value)} - {"", alias}
    found["LLM"].bases |= {"BeamSearchMethods", "PoolingMethods"}  # the methods that features bring
    found["AsyncLLM"].bases.add("AsyncPoolingMethods")
    return dict(found)


def named(value: ast.expr) -> str:
    """The name of a base class or of an alias's value, without parameters; "" for other expressions."""
    value = value.value if isinstance(value, ast.Subscript) else value
    return value.id if isinstance(value, ast.Name) else ""


def assigned(node: ast.ClassDef) -> Iterator[str]:
    """Methods, fields and attributes of `self` that a class defines."""
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield part.name
        elif isinstance(part, ast.AnnAssign | ast.Assign):
            for target in part.targets if isinstance(part, ast.Assign) else [part.target]:
                if isinstance(target, ast.Name):
                    yield target.id
                elif isinstance(target, ast.Attribute):
                    yield target.attr


def has(name: str, attribute: str) -> bool:
    """Whether a class of the package, or a base of it there, has the attribute. Other classes are not judged."""
    left, seen = [name], set()
    while left:
        one = left.pop()
        if one in seen or not known(one):
            continue
        seen.add(one)
        if attribute in definitions()[one].names:
            return True
        left += definitions()[one].bases
    return not seen


def known(name: str) -> bool:
    return name in definitions()


def lost_attributes(text: str) -> list[str]:
    """Attributes in code spans that their class does not have."""
    return [f"{name}.{attribute}" for name, attribute in _ATTRIBUTE.findall(text) if not has(name, attribute)]


def lost_classes(text: str) -> set[str]:
    """Names in code spans, written as classes are, that the package does not define."""
    return {name for name in _CLASS.findall(text) if not known(name)} - BORROWED


@functools.cache
def flags() -> set[str]:
    """The flags of all settings, and every quoted word of our programs that may be a flag's name."""
    sources = (path.read_text(encoding="utf-8") for folder in COMMANDS for path in (ROOT / folder).rglob("*.py"))
    names = {name for source in sources for name in re.findall(r"[\"'](?:--)?([a-z][a-z0-9-]+)[\"'=]", source)}
    return names.union(*((flag.name, *flag.aliases) for flag in flags_of(ENGINE_GROUPS, SERVER_GROUPS, POOL_GROUPS)))


def lost_flags(text: str) -> list[str]:
    """The first flag of each code span, if no program has it; `--x` stands for any."""
    return [name for name in _FLAG.findall(text) if name not in flags() | {"x", "no-x"}]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_in_it_exists(document: Path) -> None:
    assert lost_flags(document.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_heading_and_attribute_in_it_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert lost_anchors(document, text) == []
    assert lost_attributes(text) == []


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.name in DESIGN], ids=lambda path: path.name)
def test_every_class_in_a_page_about_the_code_exists(document: Path) -> None:
    assert lost_classes(document.read_text(encoding="utf-8")) == set()


def test_headings_and_names_that_are_not_there_are_seen() -> None:
    text = "# A `b` page\n[x](#a-b-page) [y](#no) `Scheduler.plan` `Scheduler.plane` `LLM.embed` `Roster` `Runner(x)`"
    assert lost_anchors(ROOT / "README.md", text) == ["#no"]
    assert lost_attributes(text) == ["Scheduler.plane"]
    assert lost_classes(text) == {"Roster"}
    assert lost_flags("`--no-async-scheduling` `--steps-ahead 1` `octavo serve --port 1`") == ["steps-ahead"]
