"""A batch whose server is killed: is every line answered, and once?

    python benchmarks/batch_survival.py              # some minutes on two cores; results/batch_survival.json

A real server of the default model runs a batch of 500 lines and is killed (SIGKILL) three times, each time after a
random number of answers, and started again over the same folder. Bar: 500 results, each once, in order.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from machine import describe

RESULTS = Path(__file__).with_name("results") / "batch_survival.json"
CHAT = "/v1/chat/completions"


class Server:
    """`octavo serve`, started and killed."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        command = [sys.executable, "-m", "octavo", "serve", *arguments]
        command += ["--port", str(port), "--jobs-dir", str(folder), "--log-level", "warning"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None)
        while True:
            try:
                if self.http.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if self.process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.1)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.http.close()

    def batch(self, batch_id: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get(f"/v1/batches/{batch_id}").raise_for_status().json()
        return answer


def lines_of(count: int) -> bytes:
    made = []
    for number in range(count):
        content = f"Say the number {number} in words."
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1 + number % 8, "temperature": 0}
        made.append(json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}))
    return ("\n".join(made) + "\n").encode()


def submit(server: Server, content: bytes) -> str:
    files = {"file": ("in.jsonl", content)}
    uploaded = server.http.post("/v1/files", files=files, data={"purpose": "batch"}).raise_for_status().json()
    body = {"input_file_id": uploaded["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch_id: str = server.http.post("/v1/batches", json=body).raise_for_status().json()["id"]
    return batch_id


def run(folder: Path, count: int, kills: int, seed: int, arguments: list[str]) -> dict[str, Any]:
    began = time.monotonic()
    moments = sorted(random.Random(seed).sample(range(1, count - 1), kills))
    batch_id = ""
    killed_at, found_after = [], []
    for moment in moments:
        with Server(folder, arguments) as server:
            if batch_id:
                found_after.append(server.batch(batch_id)["request_counts"]["completed"])
                print(f"killed after {killed_at[-1]} answers were told; the next knows {found_after[-1]}", flush=True)
            else:
                batch_id = submit(server, lines_of(count))
            while (seen := server.batch(batch_id)["request_counts"]["completed"]) < moment:
                time.sleep(0.02)
            killed_at.append(seen)
    with Server(folder, arguments) as server:
        found_after.append(server.batch(batch_id)["request_counts"]["completed"])
        while (batch := server.batch(batch_id))["status"] not in ("completed", "failed", "expired"):
            time.sleep(0.1)
        output = server.http.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().content
    names = [json.loads(one)["custom_id"] for one in output.splitlines()]
    return {
        "lines": count,
        "killed_after_answers": killed_at,
        "known_to_the_next_server": found_after,
        "results": len(names),
        "distinct": len(Counter(names)),
        "in_order": names == [f"line-{number}" for number in range(count)],
        "request_counts": batch["request_counts"],
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args, serve = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), args.lines, args.kills, args.seed, serve or ["smollm2"])
    passed = found["in_order"] and found["results"] == args.lines
    print(json.dumps(found, indent=2))
    print("passed" if passed else "FAILED")
    RESULTS.write_text(json.dumps({"machine": describe(), "seed": args.seed, **found}, indent=2) + "\n")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
