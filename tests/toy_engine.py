"""Engines over the models of `toy_models`, and how tests drive them: on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from octavo.config import EngineConfig
from octavo.core.output import TokenDelta
from octavo.core.pausing import PauseMode, SleepTag
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop

GPU = torch.cuda.is_available()
_ONLY_CPUS_HAVE = {"attention_backend": ("torch", "native"), "kv_cache_dtype": ("int8", "int8_per_token_head")}
_FEW = {"max_num_seqs": 16, "max_num_batched_tokens": 256}
"""Limits on a GPU. By default it records graphs for 50 sizes of steps, which takes longer than any test's requests."""


def device_of(settings: Mapping[str, Any]) -> str:
    """Return where `tiny_config` runs these settings: on the GPU, unless there is none or a setting is for CPUs."""
    for_cpus = any(settings.get(name) in values for name, values in _ONLY_CPUS_HAVE.items())
    device: str = settings.get("device") or ("cuda" if GPU and not for_cpus else "cpu")
    return device


def tiny_config(**settings: Any) -> EngineConfig:
    """Random weights in float32, 4 MiB of KV cache and one thread, unless the settings say otherwise."""
    tiny = {"load_format": "dummy", "dtype": "float32", "memory_bytes": 1 << 22, "seed": 11, "threads": 1}
    device = device_of(settings)
    return EngineConfig.of(**tiny | (_FEW if device == "cuda" else {}) | settings | {"device": device})


def strict(loop: EngineLoop) -> EngineLoop:
    """Return the loop, which from now on raises what fails in a step, instead of recovering, which would hide it."""

    def fail(error: str) -> list[TokenDelta]:
        raise AssertionError(error)

    loop._scheduler.recover = fail  # type: ignore[method-assign]
    return loop


def drive(loop: EngineLoop, asked: Sequence[GenerateRequest], *, at_once: int = 2) -> Iterator[TokenDelta]:
    """The news of requests that come a few a step, until all have ended and nothing is left of them."""
    waiting = list(asked)
    while waiting or loop.busy:
        for request in waiting[:at_once]:
            loop.add(request)
        del waiting[:at_once]
        yield from loop.step()
    loop.check_idle()


def one_by_one(loop: EngineLoop, asked: Sequence[GenerateRequest]) -> Iterator[TokenDelta]:
    """The news of requests of which each begins when the one before has ended."""
    for request in asked:
        yield from drive(loop, [request])


def tokens_of(news: Iterable[TokenDelta]) -> dict[tuple[str, int], list[int]]:
    """Request and choice -> its tokens; none of them may have failed."""
    tokens: dict[tuple[str, int], list[int]] = {}
    for delta in news:
        assert delta.error is None, delta.error
        tokens.setdefault((delta.id, delta.index), []).extend(delta.tokens)
    return tokens


RENEWALS = "sleep", "reset", "weights"


def renew(loop: EngineLoop, how: str) -> None:
    """Do to an idle engine what drops its cached contents: one of `RENEWALS`."""
    if how == "sleep":
        loop.pause(PauseMode.KEEP)
        loop.sleep(2)
        loop.idle()
        loop.wake_up(list(SleepTag))
    elif how == "weights":
        loop.pause(PauseMode.KEEP)
        loop.update_weights(loop.check_weights().stage_weights(None, "dummy"), "same", flush_cache=True)
        loop.resume()
    else:
        loop.reset_prefix_cache()
