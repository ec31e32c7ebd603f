"""A worker in a process of its own computes what one in the engine's process does, and its death is told."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from test_invariance import Faulty, requests
from toy_engine import drive, tiny_config, tokens_of
from toy_models import LLAMA, LLAMA_KV_BYTES_PER_TOKEN, model_files

from octavo.build import build_core
from octavo.core.errors import ConfigError, DeviceLostError, EngineStateError, InvalidRequestError, UnsupportedError
from octavo.core.pausing import PauseMode, SleepTag
from octavo.engine.loop import EngineLoop

Tokens = dict[tuple[str, int], list[int]]
RANK = {"distributed_executor_backend": "mp"}
CROWDED = {
    "async_scheduling": True,
    "max_num_batched_tokens": 8,
    "max_num_seqs": 8,
    "memory_bytes": 192 * LLAMA_KV_BYTES_PER_TOKEN,
    "max_model_len": 160,
}


def engine(config: dict[str, Any] = LLAMA, **settings: Any) -> EngineLoop:
    return build_core(tiny_config(**settings), model_files(config))[0]


def process_of(loop: EngineLoop) -> Any:
    return loop.worker.ranks.processes[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="in step", marks=pytest.mark.slow),
        pytest.param(CROWDED, id="overlap, chunks and preemption"),
    ],
)
def test_tokens_do_not_depend_on_the_process(settings: dict[str, Any]) -> None:
    found: list[Tokens] = []
    for where in ({}, RANK):
        loop = engine(**settings, **where)
        found.append(tokens_of(drive(loop, requests())))
        loop.close()
    assert found[0] == found[1]
    assert process_of(loop).code == 0


def test_a_step_that_fails_in_between_changes_no_tokens() -> None:
    loop = engine(async_scheduling=True)
    expected = tokens_of(drive(loop, requests()))
    loop = engine(async_scheduling=True, **RANK)
    loop._executor = Faulty(loop._executor, 9)
    assert tokens_of(drive(loop, requests())) == expected
    assert loop.stats().num_preemptions > 1
    loop.close()


def life(**where: Any) -> list[Any]:
    """Tokens before a sleep, after it, and with other weights; and what was refused."""
    loop = engine(enable_sleep_mode=True, **where)
    asked = requests()[:3]
    told: list[Any] = [tokens_of(drive(loop, asked))]
    loop.pause(PauseMode.KEEP)
    loop.sleep(2)
    loop.wake_up([SleepTag.WEIGHTS])
    with pytest.raises(EngineStateError, match="The engine sleeps"):
        loop.resume()
    loop.wake_up(list(SleepTag))
    told.append(tokens_of(drive(loop, asked)))
    with pytest.raises(InvalidRequestError, match="load_format must be one of") as refused:
        loop.check_weights().stage_weights(None, "odd")
    told.append((refused.value.param, refused.value.message))
    with pytest.raises(EngineStateError, match="No update of the weights has begun"):
        loop.check_weights().stage_received()
    dropped = loop.check_weights().stage_weights(None, "dummy")
    del dropped
    loop.pause(PauseMode.KEEP)
    loop.update_weights(loop.check_weights().stage_weights(None, "dummy"), "mine")
    loop.resume()
    told += [loop.stats().weight_version, tokens_of(drive(loop, asked))]
    loop.close()
    return told


def test_sleep_and_other_weights_are_the_same_in_a_rank() -> None:
    assert life(**RANK) == life()


def test_a_killed_rank_is_a_lost_device(caplog: pytest.LogCaptureFixture) -> None:
    loop = engine(async_scheduling=True, **RANK)
    for request in requests():
        loop.add(request)
    for _ in range(5):
        loop.step()
    os.kill(process_of(loop).pid, signal.SIGKILL)
    with pytest.raises(
        DeviceLostError, match=r"The device was lost: rank 0 \(.*\): its process was killed by SIGKILL\."
    ):
        list(iter(loop.step, None))
    for call in (lambda: loop.add(requests()[0]), loop.step, loop.idle):
        with pytest.raises(DeviceLostError):
            call()
    assert "the engine stops: The device was lost: rank 0" in caplog.text
    assert process_of(loop).code == -signal.SIGKILL
    loop.close()


def test_a_rank_that_dies_while_nothing_runs_is_missed() -> None:
    loop = engine(**RANK)
    loop.idle()
    rank = process_of(loop)
    os.kill(rank.pid, signal.SIGKILL)
    rank._listener.join()
    with pytest.raises(DeviceLostError, match="SIGKILL"):
        loop.idle()


def test_what_needs_the_engines_own_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="distributed_executor_backend='mp' the model runs in a separate process"):
        engine(logits_processors=[lambda prompt, output, logits: logits], **RANK)
    loop = engine(**RANK)
    with pytest.raises(UnsupportedError, match="Run it on one device"):
        loop.worker.call(print)
    with pytest.raises(UnsupportedError, match="send"):
        loop.check_weights().take_weights([])
    loop.close()


def test_a_rank_that_can_not_start_says_why_as_the_engine_would() -> None:
    for where in ({}, RANK):
        with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 needs an NVIDIA GPU"):
            engine(kv_cache_dtype="fp8", device="cpu", **where)
