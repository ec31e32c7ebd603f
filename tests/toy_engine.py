"""Engines over the models of `toy_models`, and how tests drive them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from octavo.config import EngineConfig
from octavo.core.output import TokenDelta
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop


def tiny_config(**settings: Any) -> EngineConfig:
    """Random weights in float32, 4 MiB of KV cache and one thread, unless the settings say otherwise."""
    tiny = {"load_format": "dummy", "dtype": "float32", "memory_bytes": 1 << 22, "seed": 11, "threads": 1}
    return EngineConfig.of(**tiny | settings)


def drive(loop: EngineLoop, asked: Sequence[GenerateRequest], *, at_once: int = 2) -> Iterator[TokenDelta]:
    """The news of requests that come a few a step, until all have ended and nothing is left of them."""
    waiting = list(asked)
    while waiting or loop.busy:
        for request in waiting[:at_once]:
            loop.add(request)
        del waiting[:at_once]
        yield from loop.step()
    loop.check_idle()


def tokens_of(news: Iterable[TokenDelta]) -> dict[tuple[str, int], list[int]]:
    """Request and choice -> its tokens; none of them may have failed."""
    tokens: dict[tuple[str, int], list[int]] = {}
    for delta in news:
        assert delta.error is None, delta.error
        tokens.setdefault((delta.id, delta.index), []).extend(delta.tokens)
    return tokens
