"""The deletion test tested: on a made-up package it must pass where a feature is optional and fail where it is not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def deletion() -> ModuleType:
    spec = importlib.util.spec_from_file_location("octavo_deletion_tool", REPOSITORY / "tools" / "deletion.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TABLE = """
import importlib
def build(name):
    try:
        return importlib.import_module(f"mini.features.{name}").NAME
    except ModuleNotFoundError:
        return None
"""


def make_package(root: Path, *, core: str) -> None:
    files = {
        "mini/__init__.py": "",
        "mini/core.py": core,
        "mini/features/__init__.py": TABLE,
        "mini/features/wings/__init__.py": "NAME = 'wings'\n",
        "mini/features/wheels/__init__.py": "NAME = 'wheels'\n",
        "tests/test_core.py": "from mini import core\n\ndef test_core_works():\n    assert core.answer() == 42\n",
        "tests/features/wings/test_wings.py": (
            "from mini.features.wings import NAME\n\ndef test_wings():\n    assert NAME == 'wings'\n"
        ),
    }
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


INDEPENDENT = "def answer():\n    return 42\n"
DEPENDENT = "from mini.features.wings import NAME\n\ndef answer():\n    return 42 if NAME else 0\n"
HIDDEN = (
    'import importlib\n\ndef answer():\n    importlib.import_module("mini.features." + "sgniw"[::-1])\n    return 42\n'
)


def run(deletion: ModuleType, root: Path, *extra: str) -> int:
    return int(deletion.main(["--root", str(root), "--package", "mini", *extra]))


def test_passes_where_features_are_optional(deletion: ModuleType, tmp_path: Path) -> None:
    make_package(tmp_path, core=INDEPENDENT)
    assert run(deletion, tmp_path) == 0


def test_a_core_file_that_imports_a_feature_is_named(
    deletion: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_package(tmp_path, core=DEPENDENT)
    assert run(deletion, tmp_path, "--static") == 1
    assert "mini/core.py:1 names the feature 'wings'" in capsys.readouterr().err


def test_one_feature_may_not_name_another(deletion: ModuleType, tmp_path: Path) -> None:
    make_package(tmp_path, core=INDEPENDENT)
    (tmp_path / "mini/features/wheels/__init__.py").write_text("from mini.features import wings\n", encoding="utf-8")
    complaints = deletion.static_check(tmp_path, "mini")
    assert len(complaints) == 1
    assert "wheels" in complaints[0].split(":")[0]


def test_a_dependency_that_reading_misses_is_found_by_running(
    deletion: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_package(tmp_path, core=HIDDEN)
    assert deletion.static_check(tmp_path, "mini") == []
    assert run(deletion, tmp_path) == 1
    assert "the tests fail without: wings" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("planted", "text"),
    [
        ("wings_of = 1", "wings_of"),
        ("class FoldedWings: ...", "FoldedWings"),
        ("def f(settings): return settings.wings", "wings"),
        ("f = dict(wings=1)", "wings"),
        ("def f(wings): ...", "wings"),
        ("NAME = 'wings'", "wings"),
        ("import os as wings", "wings"),
        ("PATH = 'mini/features/wings.py'", "mini/features/wings.py"),
    ],
)
def test_a_planted_mention_is_found(deletion: ModuleType, tmp_path: Path, planted: str, text: str) -> None:
    make_package(tmp_path, core=f"{INDEPENDENT}{planted}\n")
    (complaint,) = deletion.static_check(tmp_path, "mini")
    assert complaint.startswith(f"mini/core.py:3 names the feature 'wings' ({text})")


def test_prose_and_other_words_are_no_mentions(deletion: ModuleType, tmp_path: Path) -> None:
    make_package(tmp_path, core=f'"""Birds have wings."""\n{INDEPENDENT}SAID = "it has wings"\nwingspan = 1\n')
    assert deletion.static_check(tmp_path, "mini") == []


def test_public_words_are_let_pass_in_their_file_and_must_be_used(deletion: ModuleType, tmp_path: Path) -> None:
    make_package(tmp_path, core=f"{INDEPENDENT}wings = 1\n")
    allowed = (deletion.public("core.py", "wings", "wings", "a field of requests"),)
    assert deletion.static_check(tmp_path, "mini", allowed) == []
    make_package(tmp_path, core=INDEPENDENT)
    (complaint,) = deletion.static_check(tmp_path, "mini", allowed)
    assert "core.py no longer names the feature 'wings'" in complaint


def test_no_features_is_said(deletion: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mini").mkdir()
    assert run(deletion, tmp_path) == 0
    assert "holds no feature" in capsys.readouterr().out


@pytest.mark.slow  # `make check` has it, too
def test_octavo_itself_names_no_feature_in_core(deletion: ModuleType) -> None:
    assert deletion.static_check(REPOSITORY, "octavo", deletion.PUBLIC) == []
