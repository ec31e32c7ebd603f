from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
LOWEST = REPOSITORY / "tools" / "lowest.py"
PROJECT = """
[project]
dependencies = ["torch>=2.11", {more}]
[project.optional-dependencies]
tracing = ["opentelemetry-sdk>=1.30"]
transformers = ["transformers>=5.17"]
test = ["octavo[tracing]", "transformers>=5.22", "pytest-xdist>=3.6", "triton>=3.7; sys_platform == 'linux'"]
"""


def run(root: Path, more: str) -> subprocess.CompletedProcess[str]:
    (root / "pyproject.toml").write_text(PROJECT.format(more=more), encoding="utf-8")
    (root / "constraints.txt").write_text(
        "# all\npytest_xdist==3.8.0\ntorch==2.13.0\ntransformers==5.23.0\ntriton==3.7.1\n", encoding="utf-8"
    )
    return subprocess.run([sys.executable, str(LOWEST), str(root)], capture_output=True, text=True, check=False)


def test_bounds_become_versions_and_tools_keep_theirs(tmp_path: Path) -> None:
    result = run(tmp_path, "\"uvloop>=0.21; sys_platform != 'win32'\"")
    assert result.stdout.splitlines() == [
        "torch==2.11",
        "uvloop==0.21; sys_platform != 'win32'",
        "opentelemetry-sdk==1.30",
        "pytest_xdist==3.8.0",
    ]


def test_a_dependency_without_a_bound_fails_and_is_named(tmp_path: Path) -> None:
    result = run(tmp_path, '"rich"')
    assert result.returncode == 1
    assert "rich in pyproject.toml has no lower bound" in result.stderr
