from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
SZ = REPOSITORY / "tools" / "sz.py"


def run(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SZ), str(root)], capture_output=True, text=True, check=False)


def make(root: Path, name: str, lines: int) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x = 1\n" * lines, encoding="utf-8")


def test_a_file_at_the_limit_passes_and_is_counted(tmp_path: Path) -> None:
    make(tmp_path, "octavo/core/plan.py", 500)
    make(tmp_path, "octavo/core/deep/er.py", 7)
    result = run(tmp_path)
    assert result.returncode == 0, result.stderr
    assert "octavo/core" in result.stdout
    assert "507 lines" in " ".join(result.stdout.split())


def test_a_file_over_the_limit_fails_and_is_named(tmp_path: Path) -> None:
    make(tmp_path, "octavo/core/plan.py", 501)
    result = run(tmp_path)
    assert result.returncode == 1
    assert "octavo/core/plan.py has 501 lines" in result.stderr


def test_long_tests_are_allowed(tmp_path: Path) -> None:
    make(tmp_path, "octavo/a.py", 1)
    make(tmp_path, "tests/test_long.py", 900)
    assert run(tmp_path).returncode == 0


def test_test_files_of_the_same_name_fail_and_are_named(tmp_path: Path) -> None:
    make(tmp_path, "octavo/a.py", 1)
    make(tmp_path, "tests/unit/test_pool.py", 1)
    make(tmp_path, "tests/property/test_pool.py", 1)
    make(tmp_path, "tests/property/test_tree.py", 1)
    result = run(tmp_path)
    assert result.returncode == 1
    assert "tests/property/test_pool.py and tests/unit/test_pool.py" in result.stderr
    assert "test_tree.py" not in result.stderr
