"""benchmarks/gpu_peers and answer_order.py: what carries packages, sends requests, and turns timings into a table."""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
SHARED = ("workloads", "http_client", "processes", "engines", "machine", "gpu_workloads", "answer_order")
OWN = ("parcel", "lines", "arrivals", "model", "contenders", "summary", "session")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The scripts' modules; they are no package, so they are forgotten afterwards."""
    for folder in (BENCHMARKS, BENCHMARKS / "cpu_peers", BENCHMARKS / "gpu_peers"):
        monkeypatch.syspath_prepend(str(folder))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in (*SHARED, *OWN)})
    for name in (*SHARED, *OWN):
        sys.modules.pop(name, None)


@pytest.fixture
def packed(parts: SimpleNamespace, tmp_path: Path) -> SimpleNamespace:
    """A folder of packages and its parts, of 1,000 bytes each."""
    folder = tmp_path / "site"
    (folder / "package").mkdir(parents=True)
    # Digests do not compress, so there are several parts.
    (folder / "package" / "data.bin").write_bytes(b"".join(hash_bytes(n) for n in range(100)))
    (folder / "package" / "__pycache__").mkdir()
    (folder / "package" / "__pycache__" / "x.pyc").write_bytes(b"x")
    written = parts.parcel.pack(folder, tmp_path / "parts", 1000)
    return SimpleNamespace(folder=folder, parts=tmp_path / "parts", written=written)


def hash_bytes(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def test_packages_arrive_as_they_were(parts: SimpleNamespace, packed: SimpleNamespace, tmp_path: Path) -> None:
    assert len(packed.written) > 2
    assert all(path.stat().st_size <= 1000 for path in packed.written)
    parts.parcel.unpack(packed.parts, tmp_path / "there")
    there = tmp_path / "there" / "package"
    assert (there / "data.bin").read_bytes() == (packed.folder / "package" / "data.bin").read_bytes()
    assert not (there / "__pycache__").exists()


def test_damaged_and_missing_parts_are_named(parts: SimpleNamespace, packed: SimpleNamespace, tmp_path: Path) -> None:
    whole = packed.written[1].read_bytes()
    packed.written[1].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(parts.parcel.ParcelError, match=r"part-001 differs .* copy it again"):
        parts.parcel.unpack(packed.parts, tmp_path / "there")
    packed.written[1].unlink()
    with pytest.raises(parts.parcel.ParcelError, match=r"part-001 is missing"):
        parts.parcel.unpack(packed.parts, tmp_path / "there")
    (packed.parts / "manifest.json").unlink()
    with pytest.raises(parts.parcel.ParcelError, match=r"manifest.json is missing"):
        parts.parcel.unpack(packed.parts, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_all_engines_get_the_same_requests(parts: SimpleNamespace) -> None:
    for line in parts.lines.LINES.values():
        assert line.make(0, 49152, 0.05) == line.make(0, 49152, 0.05)
        assert [r.prompt for r in line.make(0, 49152, 0.05)] != [r.prompt for r in line.make(1, 49152, 0.05)]
    sizes = {name: line.make(0, 49152, 1.0) for name, line in parts.lines.LINES.items()}
    assert [(len(r.prompt), r.output_tokens) for r in sizes["documents"]] == [(14_000, 512)] * 4
    assert {(len(r.prompt), r.output_tokens) for r in sizes["short"]} == {(32, 32)}
    assert len(sizes["short"]) == 2000


def test_figures_count_what_the_unit_says(parts: SimpleNamespace) -> None:
    requests = [parts.workloads.Request([1] * 30, 10), parts.workloads.Request([1] * 10, 30)]
    assert parts.lines.LINES["chat"].figure(requests, 4.0) == 10.0
    assert parts.lines.LINES["prefill"].figure(requests, 8.0) == 5.0
    assert parts.lines.LINES["long"].figure(requests, 4.0) == 4.0


def test_arrivals_depend_on_the_seed_alone(parts: SimpleNamespace) -> None:
    traffic = parts.arrivals.Traffic(rate=20, seconds=5, prompt=8, answer=4)
    one, again, other = (traffic.arrivals(seed, 5000) for seed in (0, 0, 1))
    assert one == again
    assert one != other
    assert [due for due, _ in one] == sorted(due for due, _ in one)
    assert one[-1][0] < 5
    assert {(len(r.prompt), r.output_tokens) for _, r in one} == {(8, 4)}


def test_the_client_times_every_event_with_text(parts: SimpleNamespace, answering: type) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    # The second event's mark is cut in two; the last event has no text.
    pieces = [head + b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"te', b'xt":"b"}]}\n\n']
    server = answering([*pieces, b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n'])
    try:
        address = parts.http_client.Address(server.port, "model", {})
        arrivals = [(0.0, parts.workloads.Request([1], 2)), (0.01, parts.workloads.Request([2], 2))]
        for timing in parts.arrivals.run(address, arrivals):
            assert timing.tokens == 2
            assert len(timing.events) == 2
            assert 0 < timing.events[0] <= timing.events[1]
        with pytest.raises(RuntimeError, match="asked for 3 tokens, got 2"):
            parts.arrivals.run(address, [(0.0, parts.workloads.Request([1], 3))])
    finally:
        server.close()


def test_latencies_of_timings(parts: SimpleNamespace) -> None:
    timings = [parts.arrivals.Timing([0.1, 0.2, 0.4], 4), parts.arrivals.Timing([0.3, 0.4, 0.5], 3)]
    figures = parts.arrivals.figures(timings)
    assert figures["requests"] == 2
    assert figures["ttft_p50_ms"] == pytest.approx(200)
    assert figures["itl_p50_ms"] == pytest.approx(100)
    assert figures["tpot_p50_ms"] == pytest.approx(100)
    assert figures["itl_p99_ms"] == pytest.approx(197)


ENGINES = {
    "vllm": {
        "policy": "fcfs",
        "lines": {"chat": [100.0, 110.0, 90.0], "long": [12.0]},
        "http": {"20": [{"ttft_p50_ms": 30.0, "ttft_p99_ms": 60.0, "itl_p50_ms": 6.0, "tpot_p50_ms": 6.0}]},
        "start_cold_s": 60.0,
    },
    "octavo": {
        "policy": "fcfs",
        "lines": {"chat": [150.0, 151.0, 149.0], "long": [10.0]},
        "http": {"20": [{"ttft_p50_ms": 20.0, "ttft_p99_ms": 40.0, "itl_p50_ms": 5.0, "tpot_p50_ms": 5.0}]},
        "start_cold_s": 12.0,
    },
    "octavo longest-first": {"policy": "longest-first", "lines": {"chat": [200.0]}},
}


def test_ratios_and_spreads(parts: SimpleNamespace) -> None:
    found = {(row["name"], row["figure"]): row for row in parts.summary.summarize(ENGINES)}
    by_name = {name: row for (name, _), row in found.items()}
    assert by_name["chat"]["medians"] == {"octavo": 150.0, "vllm": 100.0}
    assert by_name["chat"]["octavo_times_as_fast_as"] == {"vllm": 1.5}
    assert by_name["chat"]["spread"] == {"octavo": 0.0133, "vllm": 0.2}
    # A peer has no other order: its own stands beside each of Octavo's.
    assert by_name["chat, longest-first"]["octavo_times_as_fast_as"] == {"vllm": 2.0}
    assert by_name["long"]["octavo_times_as_fast_as"] == {"vllm": 1.2}  # seconds: fewer are faster
    assert by_name["long"]["spread"] == {}
    assert by_name["start"]["octavo_times_as_fast_as"] == {"vllm": 5.0}
    first = found["HTTP 20/s", "time to first token, p50, ms"]
    assert first["octavo_times_as_fast_as"] == {"vllm": 1.5}


def test_the_table_has_octavo_first_and_all_rows(parts: SimpleNamespace) -> None:
    lines = parts.summary.table(ENGINES).splitlines()
    assert lines[0] == "|  |  | octavo | vllm | octavo / vllm |"
    assert (
        "| chat | 1,000 requests, about 214 in, 215 out, output tok/s | 150.0 ± 0.7 % | 100.0 ± 10.0 % | 1.50 |"
        in lines
    )
    assert len(lines) == 2 + 3 + 4 + 1


def test_an_engine_that_failed_leaves_what_it_has(parts: SimpleNamespace) -> None:
    table = parts.summary.table({"octavo": ENGINES["octavo"], "vllm": {"policy": "fcfs", "failed": "no memory"}})
    assert "| long | 32 requests, 8,192 in, 256 out, s | 10.00 |  |  |" in table


def test_every_token_of_the_made_up_tokenizer_is_a_word(parts: SimpleNamespace, tmp_path: Path) -> None:
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps({"vocab_size": 3000, "bos_token_id": 1, "eos_token_id": [2, 5]}))
    folder = parts.model.prepare(shape, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == parts.model.vocab_size(folder) == 3000
    assert tokenizer.decode([7, 2999]) == " t7 t2999"
    assert tokenizer.decode([1, 7, 2]) == " t7"


def test_how_engines_are_started(parts: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 131072}')
    setup = parts.contenders.Setup(Path("python"), tmp_path / "site", tmp_path)
    orders = {}
    for name, contender in parts.contenders.CONTENDERS.items():
        launch = contender.worker(setup, tmp_path / "caches")
        assert Path(launch.command[1]).is_file()
        settings = json.loads(launch.command[2])
        assert settings["max_model_len"] == 16_384
        orders[name] = settings.get("scheduling_policy")
        assert str(tmp_path / "site") in launch.environment["PYTHONPATH"]
    assert orders == {"octavo": "fcfs", "octavo longest-first": "longest-first", "vllm": None}
    vllm = parts.contenders.CONTENDERS["vllm"]
    assert vllm.server(setup, tmp_path).environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    (tmp_path / "site" / "flashinfer").mkdir(parents=True)
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in vllm.server(setup, tmp_path).environment


def test_seconds_since_exec_are_those_that_the_parent_sees(parts: SimpleNamespace) -> None:
    code = "from machine import seconds_since_exec; print(seconds_since_exec())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    seen = time.monotonic() - began
    assert 0 < float(done.stdout) <= seen + 0.02  # the kernel counts in hundredths


def test_what_max_tokens_says_in_each_case(parts: SimpleNamespace) -> None:
    for case in parts.answer_order.CASES:
        asks = parts.answer_order.asks(case, seed=0, vocab_size=5000, scale=0.05)
        assert len(asks) == 50
        assert all(ask.max_tokens >= ask.true_tokens for ask in asks)
        assert all(ask.max_tokens == ask.true_tokens for ask in asks) == (case == "exact")
