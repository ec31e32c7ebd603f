"""Starts under limits on memory: an engine serves, or ends soon with one error that names a remedy."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
from serving import START_S

from octavo.hub.files import ModelFiles

pytestmark = pytest.mark.e2e

MIB = 1 << 20
LLM = "import sys; from octavo import LLM; LLM(sys.argv[1])"
LARGE_STEPS = ("--max-num-seqs", "8192", "--max-num-batched-tokens", "8192")


def limited(mib: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with an address space of `mib` MiB (ulimit -v)."""
    limit = (mib * MIB, mib * MIB)
    return subprocess.run(
        [sys.executable, *arguments],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
        capture_output=True,
        text=True,
        timeout=START_S,
    )


@pytest.mark.parametrize(
    ("mib", "flags", "remedy"),
    [
        pytest.param(150, (), "ulimit -v", marks=pytest.mark.slow),
        (300, (), "ulimit -v"),
        (700, (), "ulimit -v"),
        pytest.param(2048, ("--kv-cache-memory-bytes", "2G"), "Lower --kv-cache-memory-bytes", marks=pytest.mark.slow),
        pytest.param(4096, LARGE_STEPS, "Lower --max-num-seqs", marks=pytest.mark.slow),
        pytest.param(
            4096,
            (*LARGE_STEPS, "--kv-cache-memory-bytes", "1G"),
            "Lower --kv-cache-memory-bytes",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("command", [pytest.param("generate", marks=pytest.mark.slow), "serve"])
def test_too_little_memory_is_one_error_with_a_remedy(
    smollm2_files: ModelFiles, command: str, mib: int, flags: tuple[str, ...], remedy: str
) -> None:
    words = ["generate", "Hello", "--model"] if command == "generate" else ["serve", "--port", "0"]
    done = limited(mib, "-m", "octavo.cli.main", *words, str(smollm2_files.path), "--dtype", "bfloat16", *flags)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert remedy in done.stderr
    assert sum("error" in line for line in done.stderr.splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_enough_memory_serves(smollm2_files: ModelFiles) -> None:
    words = ["generate", "Hello", "--max-tokens", "2", "--max-num-seqs", "4", "--model", str(smollm2_files.path)]
    done = limited(4096, "-m", "octavo.cli.main", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_script_learns_it_when_it_imports_the_engine(smollm2_files: ModelFiles) -> None:
    done = limited(620, "-c", LLM, str(smollm2_files.path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("octavo.core.errors.ConfigError: The engine's libraries need")
