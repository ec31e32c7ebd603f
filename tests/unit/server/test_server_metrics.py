"""What /metrics tells is what happened."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from server_kit import HELLO, House, Visitor, ask_now, eventually, get_now, make_house, saying

from octavo.config import ServerConfig
from octavo.core.errors import InvalidRequestError, SlowReaderError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.engine.fake import FakeEngine, fake_info
from octavo.server.metrics.engine import ENGINE_METRICS
from octavo.server.metrics.histogram import BucketCounts
from octavo.server.metrics.log_line import StatsLine
from octavo.server.metrics.metrics import PREFIXES, Metrics
from octavo.server.metrics.requests import HISTOGRAMS, RequestHistograms

CHAT = "/v1/chat/completions"


class Scrape:
    """A scrape, parsed as Prometheus does."""

    def __init__(self, house: House) -> None:
        answer = get_now(house.app, "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        self.families: list[Metric] = list(text_string_to_metric_families(answer.body.decode()))
        names = [family.name for family in self.families]
        assert len(names) == len(set(names)), "a family is told twice"

    def value(self, name: str, **labels: str) -> float:
        found = [
            sample.value
            for sample in self._samples(name)
            if all(sample.labels.get(key) == value for key, value in labels.items())
        ]
        assert len(found) == 1, f"{name}{labels}: {found}"
        return found[0]

    def names(self, prefix: str) -> set[str]:
        return {family.name.removeprefix(prefix) for family in self.families if family.name.startswith(prefix)}

    def _samples(self, name: str) -> Iterator[Any]:
        return (sample for family in self.families for sample in family.samples if sample.name == name)


def test_both_prefixes_tell_the_same() -> None:
    house = make_house(saying("hi"), ServerConfig(served_model_name=("m",)))
    house.engine.current = EngineStats(
        num_waiting=3, num_waiting_deferred=1, waits_for="step_tokens", num_blocks=10, num_blocks_used=4
    )
    ask_now(house.app, CHAT, HELLO)
    scrape = Scrape(house)
    ours, theirs = (scrape.names(prefix) for prefix in PREFIXES)
    assert ours == theirs
    assert {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens",
        "generation_tokens",
        "num_preemptions",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "cache_config_info",
        "kv_waste_mean",
    } <= ours
    for prefix in PREFIXES:
        assert scrape.value(f"{prefix}num_requests_waiting", model_name="m", engine="0") == 3
        assert scrape.value(f"{prefix}num_requests_waiting_by_reason", reason="capacity") == 2
        assert scrape.value(f"{prefix}num_requests_waiting_by_reason", reason="deferred") == 1
        assert scrape.value(f"{prefix}num_requests_waiting_by_limit", limit="step_tokens") == 2
        assert scrape.value(f"{prefix}num_requests_waiting_by_limit", limit="seats") == 0
        assert scrape.value(f"{prefix}kv_cache_usage_perc") == 0.4
        assert scrape.value(f"{prefix}cache_config_info", block_size="16", num_gpu_blocks="1024") == 1


def test_a_server_that_is_to_end_says_so() -> None:
    house = make_house(saying("hi"))
    assert Scrape(house).value("octavo:server_draining") == 0
    house.lifecycle.drain()
    assert Scrape(house).value("octavo:server_draining") == 1


def test_each_replica_has_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [FakeEngine(saying("hi"), info=fake_info(pid=os.getpid())) for _ in range(2)]
    for number, one in enumerate(replicas):
        one.current = EngineStats(num_waiting=3 + number, num_steps=5 + number)
    replicas[0].die("The engine core was killed by SIGKILL.")
    monkeypatch.setattr(FakeEngine, "replicas", replicas)
    scrape = Scrape(make_house(saying("hi"), ServerConfig()))
    for number in range(2):
        assert scrape.value("vllm:num_requests_waiting", engine=str(number)) == 3 + number
        assert scrape.value("octavo:engine_steps_total", engine=str(number)) == 5 + number
        assert scrape.value("octavo:engine_healthy", engine=str(number)) == number
    # Both are this process here: what is used is added up, and when it was started is not.
    assert scrape.value("octavo_engine_process_resident_memory_bytes") > scrape.value("process_resident_memory_bytes")
    assert scrape.value("octavo_engine_process_start_time_seconds") == scrape.value("process_start_time_seconds")


def test_every_counter_of_the_engine_is_told() -> None:
    house = make_house(saying("hi"))
    others = ("steps_by_tokens", "waits_for", "weight_version", "feature_changed", "features", "waits")
    numbers = [name for name in EngineStats.__struct_fields__ if name not in others]
    fields = {name: float(place) for place, name in enumerate(numbers, 1)}
    house.engine.current = EngineStats(**{name: int(value) for name, value in fields.items()})
    scrape = Scrape(house)
    told = {value for metric in ENGINE_METRICS for _, value in metric.samples(house.engine.current)}
    untold = {name for name, value in fields.items() if value not in told}
    # The block size is a label of cache_config_info; sampled tokens are part of a sum.
    assert untold <= {
        *("num_running", "num_waiting", "num_waiting_deferred", "block_size", "paused", "sleep_level"),
        "step_sampled",
    }
    assert scrape.value("octavo:generation_tokens_total") == fields["generation_tokens"]
    assert (
        scrape.value("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == fields["prompt_tokens_cached"]
    )
    assert scrape.value("vllm:iteration_tokens_total_sum") == fields["step_prompt_tokens"] + fields["step_sampled"]
    assert scrape.value("octavo:kv_waste_mean") == fields["waste_sum"] / fields["waste_samples"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_requests_leave_behind(stream: bool) -> None:
    house = make_house(saying("hello", "hi"))
    ask_now(house.app, CHAT, HELLO | {"n": 2, "stream": stream, "max_tokens": 50})
    ask_now(house.app, CHAT, HELLO | {"n": 2, "stream": stream, "max_tokens": 2})
    ask_now(house.app, CHAT, HELLO | {"n": 0, "stream": stream})
    scrape = Scrape(house)
    prompt = len("[user]Hello\n[assistant]")
    expected = {
        "request_prompt_tokens_sum": 2 * prompt,
        "request_prompt_tokens_count": 2,
        "request_generation_tokens_sum": 6 + 3 + 2 + 2,
        "request_max_num_generation_tokens_sum": 6 + 2,
        "request_params_n_sum": 4,
        "request_params_max_tokens_sum": 52,
        "request_prefill_kv_computed_tokens_sum": 2 * prompt,
        "time_to_first_token_seconds_count": 2,
        "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_count": 2,
        "request_decode_time_seconds_count": 2,
        # Streams tell every gap of every choice; whole answers those of the longest one.
        "inter_token_latency_seconds_count": (5 + 2 + 1 + 1) if stream else (5 + 1),
    }
    for name, value in expected.items():
        assert scrape.value(f"octavo:{name}") == value, name
        assert scrape.value(f"vllm:{name}") == value, name
    for reason, count in {"stop": 2, "length": 2, "abort": 0, "error": 0}.items():
        assert scrape.value("octavo:request_success_total", finished_reason=reason) == count
    assert scrape.value("http_requests_total", handler=CHAT, method="POST", status="2xx") == 2
    assert scrape.value("http_requests_total", handler=CHAT, method="POST", status="4xx") == 1
    assert scrape.value("http_request_duration_seconds_count", handler=CHAT, method="POST") == 3


def test_strangers_make_no_labels() -> None:
    house = make_house(saying("x"))
    for number in range(5):
        get_now(house.app, f"/stranger/{number}")
    ask_now(house.app, CHAT, HELLO, method="BREW")
    scrape = Scrape(house)
    assert scrape.value("http_requests_total", handler="none", method="GET", status="4xx") == 5
    assert scrape.value("http_requests_total", method="other", status="4xx") == 1


def test_a_line_for_each_request_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ask_now(make_house(saying("hi")).app, CHAT, HELLO)
    assert "ended" not in caplog.text
    app = make_house(saying("hi"), ServerConfig(enable_log_requests=True)).app
    ask_now(app, CHAT, HELLO, headers={"x-request-id": "mine"})
    (record,) = [record for record in caplog.records if record.name == "octavo.server.requests"]
    line = record.getMessage()
    assert "chatcmpl-mine" in line
    assert "(stop): 23 prompt tokens, 0 of them cached, 3 generated" in line


def _ends(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "octavo.server.requests"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_abandoned_request_had_generated_is_counted(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tokens = 4

    async def scenario() -> House:
        steps = asyncio.Semaphore(tokens)
        house = make_house(saying("hello there"), ServerConfig(enable_log_requests=True), pace=steps.acquire)  # type: ignore[arg-type]
        visitor = Visitor(house.app, CHAT, HELLO | {"stream": stream})
        await eventually(lambda: steps.locked() and bool(house.engine.requests))
        await eventually(lambda: house.engine.received(house.engine.requests[0].id).tokens == tokens)
        visitor.leaves.set()
        await visitor.whole()
        return house

    scrape = Scrape(asyncio.run(scenario()))
    assert scrape.value("octavo:request_generation_tokens_sum") == tokens
    assert scrape.value("octavo:request_success_total", finished_reason="abort") == 1
    (line,) = _ends(caplog)
    assert f"ended (abort): 23 prompt tokens, 0 of them cached, {tokens} generated" in line


@pytest.mark.parametrize(
    ("ending", "cause"),
    [
        ("leaves", "its client left or cancelled it"),
        ("abort", "aborted for a pause, /abort_requests or new weights"),
        ("shutdown", "aborted for the shutdown"),
        ("slow", "its output was read too slowly"),
    ],
)
def test_the_log_always_says_who_ended_a_request_early(
    ending: str, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        steps = asyncio.Semaphore(2)
        house = make_house(saying("hello there"), pace=steps.acquire)  # type: ignore[arg-type]
        visitor = Visitor(house.app, CHAT, HELLO)
        await eventually(lambda: steps.locked() and bool(house.engine.running))
        (name,) = house.engine.running
        if ending == "leaves":
            visitor.leaves.set()
        elif ending == "slow":
            (record,) = house.app.state.metrics.requests.live
            record.fail(SlowReaderError(10))
            visitor.leaves.set()
        else:
            if ending == "shutdown":
                house.lifecycle.drain()
            await house.engine.abort(name)
        await visitor.whole()
        (ended,) = house.app.state.metrics.requests.recent
        assert cause in ended.cause
        assert list(ended.reasons) == ["abort"]
        assert not house.app.state.metrics.requests.live

    asyncio.run(scenario())
    (line,) = _ends(caplog)
    assert "ended (abort): 23 prompt tokens" in line
    assert cause in line


def test_the_last_requests_are_kept_without_their_prompts() -> None:
    house = make_house(saying("hello"))
    for _ in range(1030):
        house.app.state.metrics.requests.begin(GenerateRequest(id="x", tokens=[1], params=SamplingParams())).end()
    ask_now(house.app, CHAT, HELLO)
    recent = house.app.state.metrics.requests.recent
    assert len(recent) == 1024
    ended = recent[-1]
    assert (ended.prompt_tokens, ended.generated, ended.cause) == (23, 6, "")
    assert ended.arrival <= ended.begun <= ended.first_output <= ended.last_output <= ended.ended
    assert not hasattr(ended, "request")


def test_a_request_that_fails_is_no_abort_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """A message about a field may quote it, so the log only names the field."""
    caplog.set_level(logging.INFO)

    def refuse(request: GenerateRequest) -> list[int]:
        raise InvalidRequestError("Rule 'private' not found", param="guided_grammar", value="private")

    house = make_house(refuse, ServerConfig(enable_log_requests=True))
    assert ask_now(house.app, CHAT, HELLO).status == 400
    scrape = Scrape(house)
    assert scrape.value("octavo:request_success_total", finished_reason="error") == 1
    assert scrape.value("octavo:request_success_total", finished_reason="abort") == 0
    (line,) = _ends(caplog)
    assert "ended (error)" in line
    assert line.endswith(" s: refused for its guided_grammar")
    assert "private" not in line


def test_the_log_says_that_the_engine_died_under_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def die() -> Awaitable[None]:
        house.engine.die("The engine core was killed by SIGKILL.")
        return asyncio.sleep(0)

    house = make_house(saying("hello"), ServerConfig(enable_log_requests=True), pace=die)
    assert ask_now(house.app, CHAT, HELLO).status == 503
    (line,) = _ends(caplog)
    assert "ended (error)" in line
    assert "The engine core was killed by SIGKILL." in line


@given(st.lists(st.floats(0, 10), max_size=30), st.lists(st.floats(0, 10), min_size=1, max_size=6, unique=True))
def test_a_histogram_counts_what_is_at_or_below_each_bound(values: list[float], bounds: list[float]) -> None:
    bounds = sorted(bounds)
    histogram = BucketCounts(bounds)
    for value in values:
        histogram.observe(value)
    assert [count for _, count in histogram.buckets()] == [
        sum(value <= bound for value in values) for bound in (*bounds, float("inf"))
    ]
    assert [float(bound) for bound, _ in histogram.buckets()] == [*bounds, float("inf")]
    assert histogram.total == pytest.approx(sum(values))


def test_the_line_in_the_log() -> None:
    line = StatsLine(EngineStats(), 0.0)
    assert line.next(EngineStats(), 10.0) is None
    busy = EngineStats(
        step_prompt_tokens=1000,
        generation_tokens=505,
        num_running=3,
        num_waiting=2,
        num_blocks=8,
        num_blocks_used=2,
        prefix_cache_queries=200,
        prefix_cache_hits=50,
    )
    assert line.next(busy, 20.0) == (
        "Engine 000: Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 50.5 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, GPU KV cache usage: 25.0%, Prefix cache hit rate: 25.0%"
    )
    short = msgspec.structs.replace(busy, num_preemptions=2, waits_for="kv_blocks")
    told = line.next(short, 25.0)
    assert told is not None
    assert told.endswith("rate: 25.0%, Preempted: 2 reqs, Waiting for: KV cache (--kv-cache-memory-bytes)")
    idle = EngineStats(
        step_prompt_tokens=1000,
        num_preemptions=2,
        generation_tokens=505,
        prefix_cache_queries=200,
        prefix_cache_hits=50,
    )
    last = line.next(idle, 30.0)
    assert last is not None
    assert "Avg generation throughput: 0.0 tokens/s, Running: 0 reqs" in last
    assert line.next(idle, 40.0) is None


def test_memory_of_the_engines_process_is_told() -> None:
    engine = FakeEngine(saying("hi"), info=fake_info(pid=os.getppid()))
    families = {family.name for family in Metrics(engine, "m").collect()}
    assert {"process_resident_memory_bytes", "octavo_engine_process_resident_memory_bytes"} <= families


def test_the_log_line_of_a_request_says_that_it_was_preempted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    request = GenerateRequest(id="r", tokens=[1, 2], params=SamplingParams(max_tokens=4))
    for preemptions in (0, 2):
        record = RequestHistograms(log_requests=True).begin(request)
        record.observe_whole(None, cached=0, preemptions=preemptions)
        record.end()
    assert [", preempted 2 times" in line for line in caplog.messages] == [False, True]


def test_the_line_survives_a_snapshot_that_is_updated_in_place() -> None:
    stats = EngineStats()
    line = StatsLine(stats, 0.0)
    stats.generation_tokens = 100
    told = line.next(stats, 10.0)
    assert told is not None
    assert "Avg generation throughput: 10.0 tokens/s" in told


def test_the_docs_name_every_metric() -> None:
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for metric in ENGINE_METRICS:
        assert f"`{metric.name}`" in text
        assert metric.help in text
    for name, (meaning, _) in HISTOGRAMS.items():
        assert f"| `{name}` | histogram | {meaning} |" in text
