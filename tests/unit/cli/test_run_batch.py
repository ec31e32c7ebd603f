"""`octavo run-batch` on a played engine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.server
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.cli import run_batch, start
from octavo.cli.flags.table import SERVER_GROUPS, flags_of
from octavo.core.errors import ConfigError
from octavo.engine.fake import FakeEngine, fake_info
from octavo.text.frontend import Frontend
from octavo.text.tokenizers.tokenizer import Tokenizer

URL = "/v1/completions"


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({"</s>": 0} | {char: 1 + n for n, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, named_tokens={"eos_token": "</s>"})


TOKENIZER = byte_tokenizer()


def make_engine(pace: Any = None) -> FakeEngine:
    """It says what it was told."""
    info = fake_info(vocab_size=257, eos_token_ids=[0])
    return FakeEngine(lambda request: request.tokens, info=info, pace=pace)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = make_engine()

    @contextlib.asynccontextmanager
    async def open_frontend(*_: object) -> AsyncIterator[Frontend]:
        yield Frontend(engine, TOKENIZER, engine.info)

    monkeypatch.setattr(start, "open_frontend", open_frontend)
    return engine


def line(number: int, **body: Any) -> dict[str, Any]:
    asked = {"prompt": f"say {number}", "max_tokens": 20} | body
    return {"custom_id": f"c{number}", "method": "POST", "url": URL, "body": asked}


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return str(path)


def texts(path: Path) -> list[str]:
    found = [json.loads(one) for one in path.read_text().splitlines()]
    return [one["response"]["body"]["choices"][0]["text"] for one in found]


def test_results_come_in_order_with_errors_among_them(
    tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in", [line(n) for n in range(9)] + [line(9, temperature=-1)])
    output = tmp_path / "out"
    assert run_batch.run(["-i", source, "-o", str(output), "--model", "any", "--max-inflight", "2"]) == 0
    found = [json.loads(one) for one in output.read_text().splitlines()]
    assert [one["custom_id"] for one in found] == [f"c{n}" for n in range(10)]
    assert [one["response"]["status_code"] for one in found] == [200] * 9 + [400]
    assert found[3]["response"]["body"]["choices"][0]["text"] == "say 3"
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}
    assert "9 answered, 1 failed" in capsys.readouterr().err


def test_lines_are_answered_as_a_server_with_these_flags_would(tmp_path: Path, engine: FakeEngine) -> None:
    source, output = write(tmp_path / "in", [line(0, model="another")]), tmp_path / "out"
    for flags, status in (([], 404), (["--skip-model-name-validation", "--enable-prompt-tokens-details"], 200)):
        assert run_batch.run(["-i", source, "-o", str(output), *flags]) == 0
        answer = json.loads(output.read_text())["response"]
        assert answer["status_code"] == status
    assert "cached_tokens" in answer["body"]["usage"]["prompt_tokens_details"]


def test_every_flag_of_a_servers_that_is_taken_exists() -> None:
    """A name that is not a flag's would drop out without a word."""
    assert {flag.name for flag in flags_of(SERVER_GROUPS)} >= run_batch._SERVER_FLAGS


def test_a_run_that_was_cut_short_goes_on(tmp_path: Path, engine: FakeEngine) -> None:
    source = write(tmp_path / "in", [line(n) for n in range(8)])
    output = tmp_path / "out"
    allowed = asyncio.Semaphore(0)

    async def first_run() -> None:
        slow = make_engine(allowed.acquire)
        frontend = Frontend(slow, TOKENIZER, slow.info)
        config = run_batch.server_from({})
        task = asyncio.create_task(run_batch.answer_with(frontend, Path(source), output, config, 1))
        journal = tmp_path / "out.journal"
        async with asyncio.timeout(120):
            while not journal.exists() or journal.read_bytes().count(b"\n") < 4:  # its source, and three answers
                allowed.release()
                await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(first_run())
    assert not output.exists()
    assert run_batch.run(["-i", source, "-o", str(output)]) == 0
    assert len(engine.requests) == 5
    assert texts(output) == [f"say {n}" for n in range(8)]
    assert not (tmp_path / "out.journal").exists()


def test_answers_to_another_input_are_not_mixed_in(tmp_path: Path, engine: FakeEngine) -> None:
    source = write(tmp_path / "in", [line(0)])
    (tmp_path / "out.journal").write_text('{"kind":"source","sha256":"other"}\n')
    with pytest.raises(ConfigError, match="another input"):
        run_batch.run(["-i", source, "-o", str(tmp_path / "out")])
    assert not engine.requests


def test_an_engine_that_dies_ends_the_run_and_keeps_the_answers(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [line(n) for n in range(3)])

    async def run() -> None:
        count = 0

        async def pace() -> None:
            nonlocal count
            count += 1
            if count == 12:  # within the second line
                engine.die("The core is gone.")

        engine = make_engine(pace)
        frontend = Frontend(engine, TOKENIZER, engine.info)
        with pytest.raises(ConfigError, match=r"The core is gone.*resumes from there"):
            await run_batch.answer_with(frontend, Path(source), tmp_path / "out", run_batch.server_from({}), 1)

    asyncio.run(run())
    assert (tmp_path / "out.journal").read_bytes().count(b"\n") == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no requests"),
        ('{"custom_id": 1}\n', "line 1: custom_id must be a string"),
        (json.dumps(line(0) | {"url": "/v1/dreams"}), "line 1: url must be"),
    ],
)
def test_a_file_that_is_no_batch_is_told(tmp_path: Path, engine: FakeEngine, content: str, words: str) -> None:
    (tmp_path / "in").write_text(content)
    with pytest.raises(ConfigError, match=words):
        run_batch.run(["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")])


def test_files_that_are_not_there_are_told(tmp_path: Path, engine: FakeEngine) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        run_batch.run(["-i", str(tmp_path / "none"), "-o", str(tmp_path / "out")])
    (tmp_path / "in").touch()
    with pytest.raises(ConfigError, match="--output-file"):
        run_batch.run(["-i", str(tmp_path / "in"), "-o", str(tmp_path / "no" / "out")])
    with pytest.raises(ConfigError, match="that is a folder; give the path of a file"):
        run_batch.run(["-i", str(tmp_path / "in"), "-o", str(tmp_path)])


class Store(http.server.BaseHTTPRequestHandler):
    content: bytes = b""
    stored: bytes = b""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/in" else 404)
        self.end_headers()
        self.wfile.write(Store.content)

    def do_PUT(self) -> None:
        Store.stored = self.rfile.read() if "content-length" not in self.headers else self._sized()
        self.send_response(201 if self.path == "/out" else 403)
        self.end_headers()

    def _sized(self) -> bytes:
        return self.rfile.read(int(self.headers["content-length"]))

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def store() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Store) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_files_may_be_urls(tmp_path: Path, engine: FakeEngine, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Store.content = (json.dumps(line(1)) + "\n").encode()
    assert run_batch.run(["-i", f"{store}/in", "-o", f"{store}/out", "--output-tmp-dir", str(tmp_path)]) == 0
    assert json.loads(Store.stored)["custom_id"] == "c1"
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="can't be fetched"):
        run_batch.run(["-i", f"{store}/nothing", "-o", "out"])
    with pytest.raises(ConfigError, match=r"did not take.*output\.jsonl"):
        run_batch.run(["-i", f"{store}/in", "-o", f"{store}/forbidden"])
    assert json.loads((tmp_path / "output.jsonl").read_text())["custom_id"] == "c1"


@pytest.mark.parametrize("answers", [3, -1], ids=["later", "at-the-start"])
def test_a_full_disk_is_one_error_and_the_answers_so_far_are_kept(
    answers: int, tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = write(tmp_path / "in", [line(n) for n in range(8)]), tmp_path / "out"
    room, pwrite = iter(range(1 + answers)), os.pwrite  # for the journal's source, and the answers

    def write_while_there_is_room(descriptor: int, data: bytes, offset: int) -> int:
        if next(room, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", write_while_there_is_room)
        with pytest.raises(ConfigError, match="No space left on device") as caught:
            run_batch.run(["-i", source, "-o", str(output)])
    assert str(output) in str(caught.value)
    assert f"the {max(answers, 0)} answers so far are in {output}.journal" in str(caught.value)
    before = len(engine.requests)
    assert run_batch.run(["-i", source, "-o", str(output)]) == 0
    assert len(engine.requests) - before == 8 - max(answers, 0)
    assert texts(output) == [f"say {n}" for n in range(8)]
