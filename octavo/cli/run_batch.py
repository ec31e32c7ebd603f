"""`octavo run-batch`: answer a file of requests in OpenAI's batch format, without a server."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.flags import units
from octavo.cli.flags.args import add_engine_settings, add_settings, engine_from, server_from, values
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.flags.table import SERVER_GROUPS, flags_of
from octavo.config import EngineConfig, ServerConfig
from octavo.core.errors import ConfigError
from octavo.core.terminal import say

if TYPE_CHECKING:
    from octavo.server.batch.offline import Tally
    from octavo.text.frontend import Frontend

_TOLD_EVERY_S = 10.0
# The server settings that affect answers, not HTTP.
_SERVER_FLAGS = frozenset(
    {
        "served-model-name",
        "skip-model-name-validation",
        "chat-template",
        "chat-template-content-format",
        "default-chat-template-kwargs",
        "response-role",
        "tool-call-parser",
        "tool-parser-plugin",
        "reasoning-parser",
        "reasoning-config",
        "return-tokens-as-token-ids",
        "enable-prompt-tokens-details",
        "strict-params",
        "max-body-bytes",
        "max-stop-strings",
        "max-n",
        "max-prompts",
        "max-inputs",
        "max-schema-bytes",
        "max-batch-lines",
        "trust-request-chat-template",
        "enable-log-requests",
        "log-level",
    }
)


def run(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    found = values(parser, args)
    folder = args.output_tmp_dir
    with local_input(args.input_file, folder) as source, local_output(args.output_file, folder) as output:
        asyncio.run(answer(source, output, engine_from(found), server_from(found), args.max_inflight))
    return 0


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo run-batch",
        words="-i FILE -o FILE",
        description="Answer every line of a JSONL file, each a request in the format of OpenAI's batches. An "
        "interrupted run resumes where it stopped when the same command is given again.",
    )
    where = "path or http(s) URL of the"
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help=f"{where} requests")
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help=f"{where} results, which a URL gets by PUT"
    )
    parser.add_argument(
        "--output-tmp-dir", type=Path, metavar="DIR", help="where files of URLs are kept during the run"
    )
    parser.add_argument(
        "--max-inflight", type=units.count, metavar="N", help="requests at once (default: as --max-num-seqs)"
    )
    add_engine_settings(parser, positional=False)
    names = {flag.name for flag in flags_of(SERVER_GROUPS)}
    add_settings(parser, SERVER_GROUPS, without=frozenset(names - _SERVER_FLAGS))
    return parser


@contextmanager
def local_input(name: str, folder: Path | None) -> Iterator[Path]:
    """Provide the input as a local file."""
    if not is_url(name):
        path = Path(name)
        if not path.is_file():  # checked before the model is loaded
            raise ConfigError(f"--input-file {name}: there is no such file; give the path of a JSONL file or its URL.")
        yield path
        return
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".jsonl") as file:
        path = Path(file.name)
        download(name, path)
        yield path


@contextmanager
def local_output(name: str, folder: Path | None) -> Iterator[Path]:
    """Provide a local path for the output. Upload it at the end if `name` is a URL."""
    if not is_url(name):
        path = Path(name)
        if not path.parent.is_dir():
            raise ConfigError(f"--output-file {name}: there is no folder {path.parent}; make it first.")
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            what = "that is a folder" if path.is_dir() else f"the folder {path.parent} can't be written to"
            raise ConfigError(f"--output-file {name}: {what}; give the path of a file for the results.")
        yield path
        return
    with tempfile.TemporaryDirectory(dir=folder) as made:
        path = Path(made) / "output.jsonl"
        yield path
        upload(path, name)


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def download(url: str, path: Path) -> None:
    """Download a URL to a file.

    Raises:
        ConfigError: the download failed.
    """
    import httpx

    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=60) as response, path.open("wb") as file:
            response.raise_for_status()
            for part in response.iter_bytes():
                file.write(part)
    except httpx.HTTPError as exc:
        raise ConfigError(f"--input-file {url} can't be fetched: {exc}") from exc


def upload(path: Path, url: str) -> None:
    """Upload a file by HTTP PUT.

    Raises:
        ConfigError: the upload failed.
    """
    import httpx

    try:
        with path.open("rb") as file:
            httpx.put(url, content=file, timeout=600).raise_for_status()
    except httpx.HTTPError as exc:
        kept = path.rename(Path.cwd() / path.name)
        raise ConfigError(f"--output-file {url} did not take the results, which are in {kept}: {exc}") from exc


async def answer(
    source: Path, output: Path, engine: EngineConfig, server: ServerConfig, max_inflight: int | None
) -> None:
    """Start the engine, answer the file, and report the outcome."""
    from octavo.cli.start import open_frontend

    async with open_frontend(engine, server) as frontend:
        began = time.monotonic()
        tally = await answer_with(frontend, source, output, server, max_inflight)
        seconds = time.monotonic() - began
    parts = [f"{tally.outcomes['completed']} answered", f"{tally.outcomes['failed']} failed"]
    if tally.resumed:
        parts.append(f"{tally.resumed} answered by an earlier run")
    say(f"{tally.total} requests in {seconds:.1f} s: {', '.join(parts)}")


async def answer_with(
    frontend: Frontend, source: Path, output: Path, config: ServerConfig, max_inflight: int | None
) -> Tally:
    """Answer the file with a running engine."""
    from octavo.server.app import background_executor, make_context
    from octavo.server.batch.offline import read_input, run_file

    executor = background_executor(make_context(frontend, config))
    lines = read_input(source, executor, max_lines=config.max_batch_lines, max_line_bytes=config.max_body_bytes)
    told = time.monotonic()

    def progress(tally: Tally) -> None:
        nonlocal told
        if time.monotonic() - told > _TOLD_EVERY_S:
            told = time.monotonic()
            say(f"{tally.resumed + tally.outcomes.total()} of {tally.total} requests answered")

    def ill() -> str | None:
        health = frontend.engine.health()
        return None if health.ok else health.reason

    concurrency = max_inflight or frontend.info.max_num_seqs
    return await run_file(lines, source, output, executor, concurrency=concurrency, ill=ill, progress=progress)
