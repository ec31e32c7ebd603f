"""The record of requests: what it says, what it must not say, and how it ends."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.traces import read_trace
from octavo.cache.cache import KVCache
from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyDevice
from octavo.features import FeatureContext
from octavo.features.traffic.engine import BLOCK_TOKENS, LimitedFile, TrafficRecorder, build_engine
from octavo.features.traffic.hashes import BlockHashes
from octavo.features.traffic.settings import TrafficSettings
from octavo.schedule.limits import Limits
from octavo.schedule.policy import make_policy
from octavo.schedule.request import Request
from octavo.schedule.scheduler import Scheduler

PROMPT = list(range(40))


def loop(path: Path, limit: int = 1 << 20, num_blocks: int = 64) -> EngineLoop:
    recorder = TrafficRecorder(LimitedFile(path, limit))
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
    scheduler = Scheduler(KVCache(num_blocks, 4), limits, make_policy("fcfs"), hooks=[recorder])
    return EngineLoop(scheduler, ToyDevice(num_blocks, 4))


def request(name: str, tokens: Sequence[int] = PROMPT, **changes: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 30, "ignore_eos": True} | changes.pop("params", {}))
    return GenerateRequest(id=name, tokens=list(tokens), params=params, **{"arrival": time.monotonic()} | changes)


def run(engine: EngineLoop, *requests: GenerateRequest) -> None:
    for one in requests:
        engine.add(one)
    while engine.busy:
        engine.step()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_lengths_times_and_what_was_asked(tmp_path: Path) -> None:
    run(loop(tmp_path / "t"), request("a", priority=3))
    (line,) = lines(tmp_path / "t")
    assert (line["input_length"], line["output_length"], line["max_tokens"]) == (40, 30, 30)
    assert (line["priority"], line["finish"], line["cached"], line["block_size"]) == (3, "length", 0, 16)
    assert 0 <= line["ttft"] <= line["latency"]
    assert (len(line["hash_ids"]), len(line["answer_ids"])) == (3, 2)


def test_no_token_id_and_no_other_key_is_written(tmp_path: Path) -> None:
    run(loop(tmp_path / "t"), request("secret-name", [123456 + token for token in PROMPT], params={"max_tokens": 2}))
    text = (tmp_path / "t").read_text()
    assert "secret" not in text
    assert "123456" not in text
    known = {"timestamp", "input_length", "output_length", "hash_ids", "block_size", "max_tokens", "finish"}
    assert set(lines(tmp_path / "t")[0]) - known <= {"n", "priority", "answer_ids", "cached", "ttft", "latency"}


def test_a_later_prompt_that_continues_an_answer_has_its_numbers(tmp_path: Path) -> None:
    engine = loop(tmp_path / "t")
    news = []
    engine.add(request("a"))
    while engine.busy:
        news += [token for delta in engine.step() for token in delta.tokens]
    run(engine, request("b", [*PROMPT, *news, 1, 2, 3, 4, 5]))
    first, second = lines(tmp_path / "t")
    shared = first["hash_ids"][:2] + first["answer_ids"]
    assert second["hash_ids"][: len(shared)] == shared
    assert second["cached"] > 40


def test_all_choices_make_one_line(tmp_path: Path) -> None:
    run(loop(tmp_path / "t"), request("a", params={"n": 3}))
    (line,) = lines(tmp_path / "t")
    assert (line["n"], line["output_length"]) == (3, 30)


def test_a_request_that_is_released_twice_has_one_line(tmp_path: Path) -> None:
    recorder = TrafficRecorder(LimitedFile(tmp_path / "t", 1 << 20))
    released = []
    recorder_release = recorder.on_release

    def twice(one: Request) -> None:
        released.append(one)
        recorder_release(one)
        recorder_release(one)

    recorder.on_release = twice  # type: ignore[method-assign]
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
    scheduler = Scheduler(KVCache(64, 4), limits, make_policy("fcfs"), hooks=[recorder])
    run(EngineLoop(scheduler, ToyDevice(64, 4)), request("a", params={"n": 2}), request("b"))
    assert len(released) == 3
    assert [line.get("n", 1) for line in lines(tmp_path / "t")] in ([1, 2], [2, 1])


def test_an_aborted_request_is_there_with_what_it_had(tmp_path: Path) -> None:
    engine = loop(tmp_path / "t")
    engine.add(request("a"))
    engine.step()
    engine.abort("a")
    engine.step()
    (line,) = lines(tmp_path / "t")
    assert (line["finish"], line["output_length"]) == ("abort", 1)


def test_what_no_front_end_sent_or_samples_nothing_is_left_out(tmp_path: Path) -> None:
    run(loop(tmp_path / "t"), request("warm-up", arrival=0.0), request("vector", prompt_only=True))
    assert (tmp_path / "t").read_text() == ""


def test_at_its_limit_the_file_ends_and_the_engine_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = loop(tmp_path / "t", limit=500)
    run(engine, *(request(f"r{number}") for number in range(6)))
    assert 0 < (tmp_path / "t").stat().st_size <= 500
    assert len(read_trace(tmp_path / "t")) == len(lines(tmp_path / "t"))
    assert caplog.text.count("reached its limit (--record-traffic-limit)") == 1


def test_a_full_disk_ends_the_record_only() -> None:
    run(loop(Path("/dev/full")), request("a"), request("b"))


def test_a_file_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "t"
    code = (
        "import sys; from pathlib import Path; from octavo.features.traffic.engine import LimitedFile\n"
        "file = LimitedFile(Path(sys.argv[1]), 9); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match=r"is being written by another engine.*%p"):
            LimitedFile(path, 9)
        other.stdin.close()
    LimitedFile(path, 9).write(b"x")


def test_a_file_that_cant_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be written"):
        LimitedFile(tmp_path / "none" / "t", 9)


def test_settings(tmp_path: Path) -> None:
    context = FeatureContext(vocab_size=9, eos_token_ids=(), load_tokenizer=lambda: pytest.fail("unused"))
    assert build_engine(context) is None
    with pytest.raises(ConfigError, match="--record-traffic-limit 5 is for --record-traffic"):
        TrafficSettings(record_traffic_limit=5)
    settings = TrafficSettings(record_traffic=str(tmp_path / "t-%p"))
    assert build_engine(dataclasses.replace(context, settings={"traffic": settings})) is not None
    (made,) = tmp_path.iterdir()
    assert made.name.removeprefix("t-").isdecimal()


@given(st.lists(st.integers(0, 1 << 31), min_size=1, max_size=90), st.data())
def test_numbers_are_equal_exactly_as_far_as_blocks_are(tokens: list[int], data: st.DataObject) -> None:
    hashes = BlockHashes(BLOCK_TOKENS)
    changed = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:changed], tokens[changed] + 1, *tokens[changed + 1 :]]
    prompt = data.draw(st.integers(1, len(tokens)))
    one, two = (hashes.of("", each, prompt) for each in (tokens, other))
    assert len(one[0]) == -(-prompt // BLOCK_TOKENS)
    assert len(one[0][: prompt // BLOCK_TOKENS]) + len(one[1]) == len(tokens) // BLOCK_TOKENS
    same = changed // BLOCK_TOKENS
    full = prompt // BLOCK_TOKENS
    chains = [each[0][:full] + each[1] for each in (one, two)]
    assert chains[0][:same] == chains[1][:same]
    assert not set(chains[0][same:]) & set(chains[1][same:])
    assert hashes.of("x", tokens, prompt)[0][0] != one[0][0]
    assert BlockHashes(BLOCK_TOKENS).of("", tokens, prompt)[0][0] != one[0][0]


def test_digests_of_images_count_like_tokens() -> None:
    hashes = BlockHashes(4)
    assert hashes.of("", [1, b"a", 2, 3], 4) == hashes.of("", [1, b"a", 2, 3], 4) != hashes.of("", [1, b"b", 2, 3], 4)
