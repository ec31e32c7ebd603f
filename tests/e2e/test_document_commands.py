"""The commands of the documents, as a reader would type them: each runs here, or it is listed with the reason why not.

A command in a document is a line of a code block that begins with `octavo` or `curl`; quotes may span lines.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import START_S, Server

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
NOT_HERE = {
    "octavo eval ./": "wants a model's folder; tests/golden/test_quantize.py runs it on one",
    "octavo serve": "serves until it is stopped; other tests start servers, and those named here want a model's folder",
    "octavo plan /models/": "wants a model's folder; tests/unit/cli/test_plan.py runs it",
    "octavo chat": "a conversation; with -q it runs",
    "octavo pull HuggingFaceTB/": "needs the Internet",
    "octavo why": "tests/e2e/features/timeline/test_why.py asks servers of its own",
    "octavo replay-steps": "tests/e2e/test_replay_steps.py runs it on a record of its own",
    "octavo simulate": "wants a trace and a profile; tests/unit/cli/test_simulation_commands.py runs it",
    "octavo tune": "wants a trace and a profile; tests/unit/cli/test_simulation_commands.py runs it",
    "octavo spec-train": "takes minutes; tests/unit/features/speculation/test_eagle_training.py trains a tiny head",
    "curl -X POST localhost:8000/st": "a server makes profiles only if it was started for them",
}
SERVED = ("octavo bench serve", "curl ")
LONG = ("octavo bench", "octavo quantize", "octavo eval", "octavo generate --raw", "octavo chat -q")
"""Those that `make test-all` runs."""
ALONE = ("octavo generate", "octavo pull --list", "octavo run-batch", "octavo doctor", *LONG)
AFTER = {"octavo eval smollm2-w8a16": "octavo quantize smollm2 --scheme w8a16 -o smollm2-w8a16"}
"""Commands that need what another one wrote."""
BATCH = {
    "custom_id": "one",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "smollm2", "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4},
}


def commands(text: str) -> Iterator[str]:
    """Commands in indented and fenced code blocks, without prompts and comments."""
    fenced, open_command = False, ""
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
            continue
        if open_command:
            open_command += "\n" + line
        elif (fenced or line.startswith("    ")) and re.match(r"\s*(\$ )?(\.venv/bin/)?(octavo|curl) ", line):
            open_command = re.sub(r"^\s*(\$ )?(\.venv/bin/)?", "", line)
        if open_command and open_command.count("'") % 2 == 0:
            yield re.split(r"\s#\s", open_command)[0].strip()
            open_command = ""


ALL = sorted({command for document in DOCUMENTS for command in commands(document.read_text(encoding="utf-8"))})


SCRIPTS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


def kind(command: str) -> str:
    if command.startswith(tuple(NOT_HERE)) and not command.startswith(("octavo chat -q",)):
        return "not here"
    if command.startswith(SERVED):
        return "served"
    return "alone" if command.startswith(ALONE) else "unknown"


def run(command: str, folder: Path, port: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command with this interpreter's Octavo, and with a server where it expects one; print its seconds."""
    words = shlex.split(command)
    if words[0] == "octavo":
        words = [sys.executable, "-m", "octavo.cli.main", *words[1:]]
        words += [] if port is None else ["--port", str(port)]
    words = [re.sub(r"(127\.0\.0\.1|localhost):8000", f"127.0.0.1:{port}", word) for word in words]
    began = time.perf_counter()
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=START_S, env=os.environ)
    print(f"{time.perf_counter() - began:.1f} s  {command}")
    return done


def test_every_command_is_run_or_says_why_not() -> None:
    assert len(ALL) > 20
    assert [command for command in ALL if kind(command) == "unknown"] == []


def of_kind(name: str) -> list[Any]:
    """The commands of a kind, long ones marked slow."""
    mine = (command for command in ALL if kind(command) == name)
    return [pytest.param(one, marks=pytest.mark.slow) if one.startswith(LONG) else one for one in mine]


@pytest.mark.parametrize("command", of_kind("alone"))
def test_a_command_that_stands_alone(command: str, smollm2_files: object, tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(json.dumps(BATCH) + "\n")
    for start, before in AFTER.items():
        assert before in ALL
        if command.startswith(start):
            assert run(before, tmp_path).returncode == 0
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.strip() or (tmp_path / "results.jsonl").read_text()


@pytest.mark.parametrize("command", of_kind("served"))
def test_a_command_that_needs_a_server(command: str, server: Server, tmp_path: Path) -> None:
    if command.startswith("curl") and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    done = run(command, tmp_path, server.port)
    assert done.returncode == 0, done.stderr
    assert '"error"' not in done.stdout, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.splitlines()[0])
def test_a_program_of_the_readme(script: str, server: Server, smollm2_files: object, tmp_path: Path) -> None:
    program = script.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=START_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
