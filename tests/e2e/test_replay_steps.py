"""A server's record of its steps, computed again by the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import toy_models
from serving import START_S, Server, together

from octavo.core.errors import ConfigError
from octavo.engine.frames import frame
from octavo.engine.record import Gave, Header, Planned, read_records

pytestmark = pytest.mark.e2e

ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3, "n": 2},
    {"temperature": 0, "structured_outputs": {"regex": "[a-f]{10}"}},
    {"temperature": 0.5, "seed": 4, "logprobs": 2},
] * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models.save_decoder(tmp_path_factory.mktemp("model"), seed=1, vocab_size=440, eos_token_id=2)


@pytest.fixture(scope="module")
def record(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(model, tmp_path_factory.mktemp("record"))


def recorded(model: Path, folder: Path, *flags: str) -> Path:
    """Have a server record how it answers requests, of which not all run at once."""
    limits = ("--max-num-seqs", "4", "--max-num-batched-tokens", "8", "--kv-cache-memory-bytes", "4M", "--threads", "1")
    server = Server(str(model), folder / "log", *limits, "--record-steps", str(folder / "steps"), *flags)

    def ask(number: int) -> str:
        body = {"prompt": f"{number} quick brown foxes", "max_tokens": 20, **ASKED[number]}
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=START_S)
        return "" if response.status_code == 200 else response.text

    try:
        server.wait_ready()
        assert set(together(ask, range(len(ASKED)))) == {""}
        assert server.stop() == 0
        assert "Traceback" not in server.output()
    finally:
        server.close()
    return folder / "steps"


def replayed(path: Path, *more: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "octavo.cli.main", "replay-steps", str(path), *more]
    found = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert "Traceback" not in found.stderr, found.stderr
    return found.returncode, found.stdout


def changed(path: Path, new: Path, change: Callable[[Any], Any]) -> Path:
    """Write a record anew, each of its parts after `change`."""
    header, records = read_records(path)
    new.write_bytes(b"".join(frame(msgspec.msgpack.encode(change(one))) for one in (header, *records)))
    return new


def test_a_run_is_computed_again_token_for_token(record: Path) -> None:
    code, said = replayed(record)
    assert code == 0, said
    header, records = read_records(record)
    gave = [one for one in records if isinstance(one, Gave)]
    tokens = sum(len(row) for one in gave if one.output is not None for row in one.output.tokens)
    assert said == f"{len(gave)} steps, {tokens} tokens: all as recorded\n"
    assert tokens > len(ASKED) * 10
    assert header.facts.vocab_size == 440


def test_the_first_difference_is_named(record: Path, tmp_path: Path) -> None:
    _, records = read_records(record)
    names: dict[int, str] = {}
    wrong: tuple[int, int, str] | None = None
    for one in records:
        if isinstance(one, Planned):
            names |= one.names
        rows = [] if not isinstance(one, Gave) or one.output is None else one.output.tokens
        if isinstance(one, Gave) and one.step > 12 and len([row for row in rows if row]) > 1:
            wrong = (one.step, max(number for number, row in enumerate(rows) if row), "")
            break
    assert wrong is not None
    step, row, _ = wrong

    def change(one: Any) -> Any:
        if isinstance(one, Gave) and one.step == step and one.output is not None:
            one.output.tokens[row] = [439]
        return one

    code, said = replayed(changed(record, tmp_path / "steps", change))
    assert code == 1
    assert f"step {step}, row {row}, request " in said
    assert said.split("request ")[1].split("\n")[0] in names.values()
    assert "recorded: [439]" in said
    assert "computed: [" in said


@pytest.mark.slow
def test_a_record_ends_at_its_limit_and_the_server_goes_on(model: Path, tmp_path: Path) -> None:
    path = recorded(model, tmp_path, "--record-steps-limit", "8K")
    assert 4096 < path.stat().st_size <= 8192
    assert "the file has reached its limit (--record-steps-limit)" in (tmp_path / "log").read_text()
    code, said = replayed(path)
    assert (code, "all as recorded" in said) == (0, True), said


@pytest.mark.slow
def test_the_model_may_be_elsewhere_now(record: Path, model: Path, tmp_path: Path) -> None:
    def moved(one: Any) -> Any:
        if isinstance(one, Header):
            one.config["model"]["model"] = str(tmp_path / "gone")
        return one

    path = changed(record, tmp_path / "steps", moved)
    code, _ = replayed(path)
    assert code == 1
    assert replayed(path, "--model", str(model))[0] == 0


def test_other_files_are_no_records(tmp_path: Path, record: Path) -> None:
    (tmp_path / "text").write_text("some text that is longer than a header\n" * 9)
    with pytest.raises(ConfigError, match="text"):
        read_records(tmp_path / "text")
    with pytest.raises(ConfigError, match="none can't be read"):
        read_records(tmp_path / "none")
    later = changed(record, tmp_path / "later", lambda one: one if not isinstance(one, Header) else newer(one))
    with pytest.raises(ConfigError, match="has form 2; this version of Octavo reads records of form 1"):
        read_records(later)


def newer(header: Header) -> Header:
    return msgspec.structs.replace(header, form=2)
