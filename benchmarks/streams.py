"""What the API process costs: many streams at once from an engine core that only pretends.

    python benchmarks/streams.py                     # all parts, about three minutes; results/streams.json

The core (`octavo.engine.stub`) gives every stream a token at every step, over the real wire. The server is the real
one with a real tokenizer, pinned to one CPU; core and client share another. A chunk is one event of a streamed chat.

Parts and their bars:
    capacity  1,000 streams, more than it can keep up with: chunks a second, and for each second of CPU time; bar 20,000
    stalled   1,000 streams at a third of that: time from the core's step to the client's `recv`; and the same with 100
              more clients who have stopped to read: the others' p99 changes by less than 10 %
    prompts   200 streams, 20 chunks a second each, without and with prompts of 110,000 tokens that come one after the
              other on four connections: the time between two chunks of a stream
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import resource
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from typing import Any

from machine import describe

RESULTS = Path(__file__).with_name("results") / "streams.json"
WORDS = 4000
WIDE = "stub-" + "x" * 8000
"""A name of the model; it stands in every chunk."""
PARTS = ["capacity", "stalled", "prompts"]
LONG_PROMPT = "The quick brown fox jumps over the lazy dog; " * 11_000


def tokens_of(tokenizer: Any) -> dict[str, int]:
    """Text -> token, for tokens that are a word by themselves."""
    found: dict[str, int] = {}
    for token in range(300, tokenizer.vocab_size):
        text = tokenizer.token_bytes(token).decode("utf-8", "replace")
        if text[1:].isalpha() and text[0] == " " and text.isascii() and len(text) < 8:
            found.setdefault(text, token)
        if len(found) == WORDS:
            break
    return found


def serve(step_s: float, crowd: int, port: int, log: str) -> int:
    """The server process."""
    from octavo.config import ServerConfig
    from octavo.engine.client import CoreClient
    from octavo.engine.fake import fake_info
    from octavo.engine.process import CoreProcess
    from octavo.engine.stub import Stub
    from octavo.hub.resolve import resolve
    from octavo.server.process.run import run_server
    from octavo.text.frontend import Frontend
    from octavo.text.model_text import load_text

    text = load_text(resolve("smollm2"))
    info = fake_info(name="stub", vocab_size=text.tokenizer.vocab_size, max_model_len=1_000_000, max_num_seqs=2048)
    stub = Stub(info, tuple(tokens_of(text.tokenizer).values()), step_s, aligned=True, crowd=crowd, log=log)

    @contextlib.asynccontextmanager
    async def open_frontend() -> AsyncIterator[Frontend]:
        process = CoreProcess("octavo.engine.stub", stub)
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(process.pid, cpus[1:] or cpus)
        os.sched_setaffinity(0, cpus[:1])
        client = await CoreClient.start(process)
        try:
            yield Frontend(client, text.tokenizer, client.info, chat=text.chat)
        finally:
            await client.close()

    config = ServerConfig(
        port=port, served_model_name=("stub", WIDE), jobs_dir=log + ".jobs", log_stats_interval_s=0, log_level="warning"
    )
    return run_server(open_frontend, config)


class Server:
    """The server process, from the outside."""

    def __init__(self, step_s: float, crowd: int) -> None:
        self.log = tempfile.NamedTemporaryFile(suffix=".steps")  # noqa: SIM115
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port: int = sock.getsockname()[1]
        command = [sys.executable, __file__, "--serve", str(step_s), str(crowd), str(self.port), self.log.name]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as sock:
                sock.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
                if b"200" in sock.recv(4096):
                    return
            if self.process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.1)

    def cpu_s(self) -> float:
        """CPU time of the process so far, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        """End it; then `steps` are the times of the core's steps."""
        self.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(180)
        self.steps = [float(line) for line in Path(self.log.name).read_text().splitlines()]


def open_stream(port: int, *, stalls: bool = False) -> socket.socket:
    """A stream that nobody has read of yet. One that stalls asks for wide chunks, which soon fill all buffers."""
    sock = socket.socket()
    if stalls:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    body = {"messages": [{"role": "user", "content": "Tell me."}], "stream": True, "max_tokens": 900_000}
    data = json.dumps(body | {"model": WIDE if stalls else "stub"}).encode()
    sock.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(data) + data
    )
    return sock


class Reader:
    """Reads all streams; notes when the chunks of some of them came."""

    def __init__(self, socks: list[socket.socket], sampled: Collection[socket.socket] = ()) -> None:
        self._selector = selectors.EpollSelector()
        self._sampled = set(sampled)
        self.silent = set(socks)
        self.chunks = 0
        self.seen: list[tuple[float, str]] = []
        for sock in socks:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)

    def read(self, seconds: float) -> None:
        """Count chunks for so long."""
        end = time.monotonic() + seconds
        sampled, seen = self._sampled, self.seen
        while (now := time.monotonic()) < end:
            for key, _ in self._selector.select(end - now):
                sock: socket.socket = key.fileobj  # type: ignore[assignment]
                data = sock.recv(1 << 18)
                if not data:
                    raise SystemExit("the server closed a stream")
                self.chunks += data.count(b"data: ")
                self.silent.discard(sock)
                if sock in sampled:
                    moment = time.monotonic()
                    for part in data.split(b'"content":"')[1:]:
                        seen.append((moment, part.partition(b'"')[0].decode()))

    def forget(self) -> None:
        self.chunks, self.seen = 0, []

    def gaps(self, seconds: float) -> list[float]:
        """Seconds between successive reads of each stream."""
        end = time.monotonic() + seconds
        last: dict[Any, float] = {}
        found = []
        while (now := time.monotonic()) < end:
            for key, _ in self._selector.select(end - now):
                key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
                moment = time.monotonic()
                if key.fd in last:
                    found.append(moment - last[key.fd])
                last[key.fd] = moment
        return found

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]


class Window:
    """What came in so many seconds, of all chunks and of those whose times were noted."""

    def __init__(self, server: Server, reader: Reader, seconds: float) -> None:
        reader.forget()
        cpu, began = server.cpu_s(), time.monotonic()
        reader.read(seconds)
        self.cpu, self.wall = server.cpu_s() - cpu, time.monotonic() - began
        self.chunks, self.seen = reader.chunks, list(reader.seen)

    def figures(self) -> dict[str, Any]:
        return {
            "chunks_per_s": round(self.chunks / self.wall),
            "api_cpu_s": round(self.cpu, 2),
            "chunks_per_cpu_s": round(self.chunks / self.cpu),
        }


@contextlib.contextmanager
def many(step_s: float, streams: int) -> Iterator[tuple[Server, Reader]]:
    """A server and streams that flow; every tenth is followed, for a step's streams are served in their order."""
    server = Server(step_s, streams)
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[1:] or cpus)
    try:
        socks = [open_stream(server.port) for _ in range(streams)]
        reader = Reader(socks, socks[::10])
        while reader.silent:
            reader.read(0.5)
        reader.read(2.0)
        yield server, reader
        reader.close()
    finally:
        server.stop()
        os.sched_setaffinity(0, cpus)


def capacity(streams: int, seconds: float) -> dict[str, Any]:
    """More than the server can keep up with."""
    step_s = streams / 30_000
    with many(step_s, streams) as (server, reader):
        window = Window(server, reader, seconds)
        memory = server.memory()
    figures = {"streams": streams, "step_ms": round(step_s * 1e3, 1)} | window.figures()
    return figures | {"api_memory_mib": round(memory / 2**20)}


def stalled(streams: int, seconds: float, rounds: int, words: dict[str, int]) -> dict[str, Any]:
    """A third of the capacity, in turns without and with 100 more clients who have stopped to read."""
    step_s = streams / 10_000
    windows: dict[str, list[Window]] = {"without": [], "with": []}
    with many(step_s, streams) as (server, reader):
        for _ in range(rounds):
            windows["without"].append(Window(server, reader, seconds))
            quiet = [open_stream(server.port, stalls=True) for _ in range(100)]
            reader.read(4.0)
            windows["with"].append(Window(server, reader, seconds))
            for sock in quiet:
                sock.close()
            reader.read(1.5)
    steps = server.steps
    told: dict[str, Any] = {"streams": streams, "step_ms": round(step_s * 1e3, 1)}
    for name, each in windows.items():
        told[name] = [window.figures() | latencies(window.seen, steps, words) for window in each]
    plain, beside = (statistics.median(run["latency_ms"]["p99"] for run in told[name]) for name in windows)
    return told | {"p99_ms": {"without": plain, "with": beside}, "p99_change": round(beside / plain - 1, 3)}


class Prompter(threading.Thread):
    """Posts one long prompt after the other, and counts those that were answered."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._going = True
        self.answered = 0

    def run(self) -> None:
        body = json.dumps({"prompt": LONG_PROMPT, "max_tokens": 1})
        headers = {"Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        while self._going:
            connection.request("POST", "/v1/completions", body, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise SystemExit(answer.read().decode())
            answer.read()
            self.answered += 1
        connection.close()

    def end(self) -> None:
        self._going = False
        self.join()


def gaps(seconds: float, prompters: int) -> dict[str, Any]:
    """Milliseconds between the reads of successive chunks of a stream, over 200 of them, while long prompts come."""
    with many(0.05, 200) as (server, reader):
        long = [Prompter(server.port) for _ in range(prompters)]
        for one in long:
            one.start()
        reader.read(2.0)
        before = sum(one.answered for one in long)
        found = reader.gaps(seconds)
        answered = sum(one.answered for one in long) - before
        for one in long:
            one.end()
    cuts = statistics.quantiles(found, n=1000)
    told = {name: round(cuts[at] * 1e3, 1) for name, at in (("p50", 499), ("p99", 989), ("p99.9", 998))}
    return {"prompters": prompters, "prompts_per_s": round(answered / seconds, 2), "gap_ms": told}


def latencies(seen: list[tuple[float, str]], steps: list[float], words: dict[str, int]) -> dict[str, Any]:
    """Milliseconds from the step that made a token to its arrival."""
    found = []
    for moment, text in seen:
        place = words.get(text)
        if place is None:
            continue
        made = max((steps[k] for k in range(place, len(steps), len(words)) if steps[k] <= moment), default=None)
        if made is not None:
            found.append((moment - made) * 1e3)
    cuts = statistics.quantiles(found, n=1000)
    return {
        "samples": len(found),
        "latency_ms": {"p50": round(cuts[499], 2), "p90": round(cuts[899], 2), "p99": round(cuts[989], 2)},
    }


def words_of_model() -> dict[str, int]:
    """Text -> the number of the step that says it."""
    from octavo.hub.resolve import resolve
    from octavo.text.model_text import load_text

    return {text: number for number, text in enumerate(tokens_of(load_text(resolve("smollm2")).tokenizer))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs=4, metavar=("STEP", "CROWD", "PORT", "LOG"), help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--parts", nargs="+", default=PARTS)
    parser.add_argument("--runs", type=int, default=3, help="of the two states of stalled, and of prompts: in turns")
    args = parser.parse_args()
    if args.serve:
        step_s, crowd, port, log = args.serve
        sys.exit(serve(float(step_s), int(crowd), int(port), log))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    words = words_of_model()
    results: dict[str, Any] = {"machine": describe()}
    if "capacity" in args.parts:
        results["capacity"] = capacity(args.streams, args.seconds)
    if "stalled" in args.parts:
        results["stalled"] = stalled(args.streams, args.seconds, args.runs, words)
    if "prompts" in args.parts:
        results["prompts"] = [gaps(args.seconds, prompters) for prompters in (0, 4) * args.runs]
    print(json.dumps(results, indent=2))
    if set(args.parts) == set(PARTS):
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
