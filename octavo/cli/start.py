"""Starting an engine under a user's eyes: the download, the phases, and what the memory went to."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from octavo.cli.parser import say
from octavo.cli.progress import download_bar
from octavo.cli.units import show_bytes
from octavo.config import EngineConfig
from octavo.core.info import ModelInfo

if TYPE_CHECKING:
    from octavo.text.frontend import Frontend


@contextlib.asynccontextmanager
async def open_frontend(config: EngineConfig, *, table: bool = False) -> AsyncIterator[Frontend]:
    """The front end of an engine of its own, which lives as long as the block.

    Args:
        table: print what the memory went to once it is ready.
    """
    from octavo.async_llm import AsyncLLM
    from octavo.hub.resolve import resolve

    model = config.model
    with download_bar() as progress:
        await asyncio.to_thread(
            resolve, model.model, revision=model.revision, weights=model.load_format != "dummy", progress=progress
        )
    with PhaseLine(model.model) as phases:
        llm = await AsyncLLM.start(config, on_phase=phases)
    async with llm:
        if table:
            print_memory(llm.frontend.info)
        yield llm.frontend


class PhaseLine:
    """Shows which phase of the start is running: a spinner on a terminal, else nothing until the summary."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._done: list[str] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> PhaseLine:
        from rich.console import Console
        from rich.status import Status

        self._status = Status(f"starting {self._model}", console=Console(stderr=True))
        if sys.stderr.isatty():
            self._stack.enter_context(self._status)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._stack.close()
        if kind is None and self._done:
            say(f"started {self._model}: {', '.join(self._done)}")

    def __call__(self, phase: str, seconds: float | None) -> None:
        """A phase begins (`seconds` is None), or has ended after so long."""
        if seconds is None:
            self._status.update(f"starting {self._model}: {phase}")
        else:
            self._done.append(f"{phase} {seconds:.1f} s")


def memory_rows(info: ModelInfo) -> list[tuple[str, str]]:
    """What the engine holds, as rows of a table."""
    context = f"{info.max_model_len:,} tokens"
    together = info.kv_tokens // info.max_model_len
    return [
        ("model", f"{info.name} ({info.architecture}), {info.dtype} on {info.device}"),
        *((part.replace("kv_cache", "KV cache"), show_bytes(size)) for part, size in info.memory.items()),
        (
            "KV cache holds",
            f"{info.kv_tokens:,} tokens ({info.num_blocks:,} blocks of {info.block_size}, "
            f"{show_bytes(info.kv_bytes_per_token)} a token)",
        ),
        ("longest request", f"{context}; {together} of that length fit at once" if together > 1 else context),
        ("a step takes", f"{info.max_num_seqs} sequences and {info.max_num_batched_tokens:,} tokens at most"),
    ]


def print_memory(info: ModelInfo) -> None:
    """The table, on standard error."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in memory_rows(info):
        table.add_row(*row)
    Console(stderr=True, highlight=False).print(table)
