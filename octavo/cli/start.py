"""Starting an engine with output for the user: download, phases and memory use."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from octavo.cli.flags.units import show_bytes
from octavo.cli.progress import open_display
from octavo.config import EngineConfig, ServerConfig
from octavo.core.errors import ConfigError
from octavo.core.info import ModelInfo
from octavo.core.terminal import say

if TYPE_CHECKING:
    from octavo.text.frontend import Frontend


@contextlib.asynccontextmanager
async def open_frontend(config: EngineConfig, server: ServerConfig | None = None) -> AsyncIterator[Frontend]:
    """Open the front end of an engine in its own process, for the time of the block.

    Args:
        server: the settings of a server, which also gets a table of memory use; None otherwise.
    """
    from octavo.python_api.async_llm import AsyncLLM
    from octavo.server.process.log import log_settings

    settings = server or ServerConfig(log_level="warning")
    if settings.api_server_count > 1 and config.parallel.replicas > 1:
        raise ConfigError(
            f"--api-server-count {settings.api_server_count}: several API processes share one engine, and with "
            f"--data-parallel-size {config.parallel.replicas} there are several. Leave one of them out."
        )
    with open_display() as display:
        llm = await AsyncLLM.start(
            config,
            chat_template=settings.chat_template,
            tool_call_parser=settings.tool_call_parser,
            tool_parser_plugin=settings.tool_parser_plugin,
            reasoning_parser=settings.reasoning_parser,
            reasoning_config=settings.reasoning_config,
            chat_template_content_format=settings.chat_template_content_format,
            stall_after_s=settings.stall_after_s,
            max_unread_tokens=server.max_unread_tokens if server else None,
            log=log_settings(settings),
            on_phase=display.phase,
            progress=display.download,
        )
    async with llm:
        if server:
            hooks = llm.frontend.preparer.hooks
            print_rows([*memory_rows(llm.info), *(row for hook in hooks for row in hook.start_rows())])
        yield llm.frontend


def memory_rows(info: ModelInfo) -> list[tuple[str, str]]:
    """Return the engine's memory use as rows of a table."""
    context = f"{info.max_model_len:,} tokens"
    together = info.kv_tokens // info.max_model_len
    started = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in info.phases.items())
    return [
        ("model", f"{info.name} ({info.architecture}), {info.dtype} on {info.device}"),
        *((part.replace("kv_cache", "KV cache"), show_bytes(size)) for part, size in info.memory.items()),
        *([("weights are", info.weights)] if info.weights else []),
        *([("kernels", info.kernels)] if info.kernels else []),
        *([("advice", info.advice)] if info.advice else []),
        *_cache_rows(info),
        ("longest request", f"{context}; {together} of that length fit at once" if together > 1 else context),
        ("in one step", f"{info.max_num_seqs} sequences and {info.max_num_batched_tokens:,} tokens at most"),
        *([("started in", started)] if started else []),
    ]


def _cache_rows(info: ModelInfo) -> list[tuple[str, str]]:
    if not info.num_blocks:
        return []
    size = f"{info.num_blocks:,} blocks of {info.block_size}, {show_bytes(info.kv_bytes_per_token)} a token"
    form = f", {info.kv_form}" if info.kv_form else ""
    return [("KV cache holds", f"{info.kv_tokens:,} tokens ({size}{form})")]


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print a table to standard error."""
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        say(f"{label:{width}}  {value}")
