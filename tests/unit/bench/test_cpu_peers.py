"""benchmarks/cpu_peers and cpu_scaling.py: what turns events into figures, and what keeps engines still."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
MODULES = (
    "limits",
    "workloads",
    "http_client",
    "floors",
    "report",
    "processes",
    "cpu_scaling",
    "machine",
    "install",
    "variants",
)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The scripts' modules; they are no package, so they are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "cpu_peers"))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def machine(parts: SimpleNamespace) -> SimpleNamespace:
    shape = parts.floors.Shape(body=1000, head=100, heads=2, kv_heads=1, head_size=4, layers=3, vocab_size=5000)
    return SimpleNamespace(shape=shape, limits=parts.floors.Machine(read=100.0, products=1e12, attention=1e12))


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def test_the_client_counts_the_tokens_that_the_last_event_tells(parts: SimpleNamespace, answering: type) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    # The count is cut in two by the frames of two chunks.
    events = [chunk(b'data: {"choices": [{"text": "a"}]}\n\n'), chunk(b'data: {"usage": {"completion_tokens": 2')]
    server = answering([head, *events, chunk(b"56}}\n\ndata: [DONE]\n\n"), b"0\r\n\r\n"])
    try:
        request = parts.workloads.Request([1, 2], 256)
        address = parts.http_client.Address(server.port, "model", {})
        one = parts.http_client.run(address, [request])
        assert one.tokens == [256]
        assert one.first is not None
        assert one.first <= one.last
        assert parts.http_client.run(address, [request] * 3).tokens == [256] * 3
    finally:
        server.close()


def test_a_refused_request_is_an_error_with_the_servers_words(parts: SimpleNamespace, answering: type) -> None:
    server = answering([b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": "prompt too long"}'])
    try:
        with pytest.raises(RuntimeError, match=r"400.*prompt too long"):
            parts.http_client.run(parts.http_client.Address(server.port, "m", {}), [parts.workloads.Request([1], 1)])
    finally:
        server.close()


def test_one_stream_can_be_no_faster_than_its_reads(parts: SimpleNamespace, machine: SimpleNamespace) -> None:
    shape = machine.shape
    outcome = parts.floors.floor([parts.workloads.Request([1] * 10, 3)], shape, 2000, machine.limits)
    assert outcome.first == pytest.approx(2000 / 100)
    cached = shape.kv_bytes_per_token * (11 + 12)
    assert outcome.last - outcome.first == pytest.approx((2 * 2000 + cached) / 100)


def test_a_shared_beginning_is_computed_once(parts: SimpleNamespace, machine: SimpleNamespace) -> None:
    slow = parts.floors.Machine(read=1e12, products=1.0, attention=1e12)
    head = list(range(100))
    requests = [parts.workloads.Request([*head, own], 1) for own in (1000, 2000, 3000)]
    outcome = parts.floors.floor(requests, machine.shape, 1, slow)
    body, outputs = (100 + 3) * 2 * machine.shape.body, 3 * 2 * machine.shape.head
    assert outcome.last == pytest.approx(body + outputs)


def test_ratios_say_how_many_times_as_fast_octavo_is(parts: SimpleNamespace) -> None:
    figures = {"B": {"octavo q8_0": 300.0, "x": 200.0, "y": 100.0}, "E": {"octavo q8_0": 2.0, "x": 3.0}}
    ratios = parts.report.ratios(figures)
    assert ratios["B"]["octavo q8_0"] == {"x": 1.5, "y": 3.0, "best peer": 1.5}
    assert ratios["E"]["octavo q8_0"] == {"x": 1.5, "best peer": 1.5}  # seconds: fewer are faster


def test_equal_seeds_give_all_engines_the_same_requests(parts: SimpleNamespace) -> None:
    for workload in parts.workloads.WORKLOADS.values():
        first, again = workload.requests("0", 49152), workload.requests("0", 49152)
        other = workload.requests("1", 49152)
        assert first == again
        assert [r.prompt for r in first] != [r.prompt for r in other]
        assert [(len(r.prompt), r.output_tokens) for r in first] == [(len(r.prompt), r.output_tokens) for r in other]


def test_a_frozen_engine_stands_still_with_its_children(parts: SimpleNamespace) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # the child runs
        pids = parts.processes.tree(process.pid)
        assert len(pids) == 2
        parts.processes.freeze(process.pid)
        assert [state(pid) for pid in pids] == ["T", "T"]
        rss, pss = parts.processes.memory(pids)
        assert 0 < pss <= rss
        parts.processes.thaw(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(60) == 0  # both ran on to their ends
    finally:
        parts.processes.end(process)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
    assert not any(runs(pid) for pid in pids)


FAKE = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: print(sys.argv[1], "was asked to end", file=sys.stderr, flush=True))
signal.signal(signal.SIGUSR1, lambda *_: sys.exit())
print("ready", flush=True)
while True:
    signal.pause()
"""
GROUP = f"""
import os, signal, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
import comparison, engines, processes

class Fake(engines.RunningEngine):
    def wait(self): self._process.stdout.readline()
    def run(self, requests): return SimpleNamespace(first=0.0)
    def _spawn(self, launch, cores): return self._popen(launch, cores, stdout=subprocess.PIPE)

def start(name):
    return lambda *_: Fake(engines.Launch((sys.executable, "-c", {FAKE!r}, name)), [*cores], Path('/proc/self/fd/1'))

processes.end_all_on_signals()
cores = os.sched_getaffinity(0)
comparison.Shape = SimpleNamespace(of=lambda path: None)
variants = [SimpleNamespace(name=name, start=start(name)) for name in ("first", "second")]
whole = comparison.Comparison(SimpleNamespace(gguf=dict(a=None)), [], rounds=0, seed=0)
with whole._all_started(variants, comparison._Seen({{}})) as started:
    print("all", *(engine.pid for engine in started.values()), flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_engines_that_stand_still_do_not_outlive_the_benchmark(number: signal.Signals) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS / "cpu_peers")])}
    process = subprocess.Popen([sys.executable, "-c", GROUP], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    ends: dict[int, int] = {}  # process id -> a descriptor that is readable once the process has ended
    try:
        with process.stdout as output:
            line = next(line for line in output if line.startswith("all "))
            ends = {int(pid): os.pidfd_open(int(pid)) for pid in line.split()[1:]}
            assert len(ends) == 2
            process.send_signal(number)
            if number == signal.SIGTERM:
                assert "was asked to end" in output.readline()
                process.send_signal(number)  # as timeout(1) does; it comes while the engines are being ended
                for pid in ends:
                    os.kill(pid, signal.SIGUSR1)
            assert process.wait(60) in (128 + number, -number)
        for end in ends.values():
            assert select.select([end], [], [], 60)[0]
    finally:
        process.kill()
        process.wait()
        for pid, end in ends.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.close(end)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def runs(pid: int) -> bool:
    try:
        return state(pid) != "Z"
    except OSError:  # it is gone
        return False


def test_cliffs_are_found_where_more_gives_less(parts: SimpleNamespace) -> None:
    smooth = {"batch": {1: 100.0, 2: 180.0, 4: 175.0}, "context, 1 request": {128: 100.0, 256: 60.0}}
    assert parts.cpu_scaling.cliffs(smooth) == []
    broken = {"batch": {1: 100.0, 2: 180.0, 4: 150.0}, "context, 1 request": {128: 100.0, 256: 40.0}}
    assert parts.cpu_scaling.cliffs(broken) == [
        "batch: 180.0 tokens/s at 2, 150.0 at 4",
        "context, 1 request: 100.0 tokens/s at 128, 40.0 at 256",
    ]


def test_a_process_whose_parent_has_ended_is_ended_too(parts: SimpleNamespace) -> None:
    child = "print(1, flush=True); import time; time.sleep(600)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
        process.wait(60)
        left = [pid for pid in parts.processes.tree(process.pid) if pid != process.pid]
        assert len(left) == 1
        parts.processes.end(process)
        assert process.stdout.read() == b""  # its end of the pipe is closed: it is gone


AMX = "#define __AMX_INT8__ 1\n"
FAULTY = '__asm__ volatile ("ldtilecfg\\t%X0" :: "m" (*((const void **)__config)));\n'
FIXED = "__builtin_ia32_ldtilecfg (__config);\n"


@pytest.mark.parametrize(
    ("headers", "status", "expected"),
    [
        (AMX + FAULTY, 0, ["-DCMAKE_CXX_FLAGS=-g0 -fno-tree-dse -fno-dse"]),
        (AMX + FIXED, 0, []),
        (FAULTY, 0, []),
        (AMX + FAULTY, 1, []),
    ],
    ids=["AMX, stores get lost", "AMX, fixed", "no AMX", "no such header"],
)
def test_stores_are_kept_for_compilers_that_lose_them(
    parts: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    headers: str,
    status: int,
    expected: list[str],
) -> None:
    (tmp_path / "headers").write_text(headers)
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\ncat '{tmp_path}/headers'\nexit {status}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("CXXFLAGS", "-g0")
    assert parts.install.compiler_options() == expected


def test_a_missing_compiler_is_left_to_cmake(
    parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert parts.install.compiler_options() == []


def test_a_product_that_takes_long_is_measured_once(parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no instruction multiplies bfloat16, torch takes a minute for what others do in 40 ms."""
    clock, tried = [0.0], []

    def product_of(size: tuple[int, int, int]) -> Callable[[], None]:
        def product() -> None:
            tried.append(size)
            clock[0] += 0.5 if size == sizes[0] else 4.0

        return product

    sizes = parts.limits._SIZES
    monkeypatch.setattr(parts.limits.time, "perf_counter", lambda: clock[0])
    rate = parts.limits._fastest(product_of)
    assert tried == [sizes[0]] * parts.limits._BEST_OF + [sizes[1]]
    first, second = (2 * m * n * k / 1e9 for m, n, k in sizes[:2])
    assert rate == max(first / 0.5, second / 4)


@pytest.mark.parametrize(
    ("flags", "has"), [("avx2 fma", False), ("avx512f avx512_bf16", True), ("amx_bf16", True), ("avx512_bf16x", False)]
)
def test_peers_compute_in_bfloat16_only_where_the_processor_does(parts: SimpleNamespace, flags: str, has: bool) -> None:
    assert parts.variants.multiplies_bfloat16(f"flags\t\t: fpu {flags} sse2\n") is has


def test_an_earlier_checkout_is_compared_as_a_peer_is(parts: SimpleNamespace, tmp_path: Path) -> None:
    now = next(variant for variant in parts.variants.VARIANTS if variant.name == "octavo q4_1 int8")
    before = parts.variants.earlier(now, tmp_path)
    setup = parts.variants.Setup(
        parts.variants.KVSize(16, 1), {"octavo": Path("python")}, None, {"q4_1": Path("m")}, None, (0,), tmp_path
    )
    # Without the latter, `python -m` in a checkout runs that one.
    assert before.launch(setup).environment == {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    assert before.launch(setup).command == now.launch(setup).command
    assert parts.report.ratios({"A": {now.name: 3.0, before.name: 2.0}})["A"][now.name]["best peer"] == 1.5
