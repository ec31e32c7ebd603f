"""Start a server, run third-party clients and test suites against it, and report how many of their tests pass.

    python conformance/run.py CLIENTS FRAMEWORKS [--model NAME] [--embedder NAME] [--only KIND] [pytest arguments]

CLIENTS is a virtual environment with requirements.txt, apart from the server's own: some of those packages bring pytest
plugins that change how all tests run. FRAMEWORKS is one with frameworks/requirements.txt: programs' frameworks, and the
older clients that they want, which run the newest clients' tests as well. The server runs under the Python that runs
this.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
START_S = 300
COMMON = ("--served-model-name", "smollm2", "--kv-cache-memory-bytes", "256M")
OLDER = ("test_openai_client.py", "test_anthropic_client.py")
CLIENTS = ("--max-model-len", "4096")
# What is not told how much to generate goes to the end of the context.
TESTS = [str(HERE), f"--ignore={HERE / 'frameworks'}"]
FUZZ = ("--max-model-len", "128", "--max-n", "2", "--max-prompts", "4")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("clients", type=Path, help="virtual environment with the clients")
    parser.add_argument("frameworks", type=Path, help="virtual environment with the frameworks")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--embedder", default="minilm")
    parser.add_argument("--only", choices=("clients", "frameworks", "fuzz"))
    args, rest = parser.parse_known_args()
    status = 0
    if args.only in (None, "frameworks"):
        with serving(args.model, *CLIENTS) as url:
            tests = [str(HERE / one) for one in ("frameworks", *OLDER)]
            status |= judge(args.frameworks, {"OCTAVO_URL": url}, tests, rest)
    if args.only in (None, "clients"):
        with serving(args.model, *CLIENTS) as url, serving(args.embedder) as embedder:
            status |= judge(args.clients, {"OCTAVO_URL": url, "OCTAVO_EMBEDDER_URL": embedder}, TESTS, rest)
    if args.only in (None, "fuzz"):
        with serving(args.model, *FUZZ) as url:
            status |= fuzz(args.clients, url)
    return status


@contextlib.contextmanager
def serving(model: str, *settings: str) -> Iterator[str]:
    """The address of a server that lives as long as the block and must end in good order."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "octavo.cli.main", "serve", model, "--port", str(port), *COMMON, *settings]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(url, process)
            yield url
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()
            log.seek(0)
            said = log.read().decode(errors="replace")
            if process.wait() or "Traceback" in said:
                print(said)
                raise SystemExit("The server did not fare well.")


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/ready").close()
            return
        time.sleep(0.2)


def judge(clients: Path, servers: dict[str, str], all_tests: list[str], arguments: list[str]) -> int:
    """The clients' tests, or those that the arguments name; prints the share that passes for each file."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        python = clients / "bin" / "python"
        tests = [] if any(Path(one.split("::")[0]).exists() for one in arguments) else all_tests
        command = [python, "-m", "pytest", "-c", HERE / "pytest.ini", f"--junitxml={report}", *tests, *arguments]
        status = subprocess.run(command, env=os.environ | servers).returncode
        told = count(report)
    print("\nclient                    passed   of  expected to fail  skipped")
    for name, (passed, ran, excused, skipped) in told.items():
        print(f"{name:24}{passed:8}{ran:5}{excused:18}{skipped:9}")
    return status


def count(report: Path) -> dict[str, tuple[int, int, int, int]]:
    """File -> (passed, ran, failed with a reason that is known, skipped)."""
    tallies: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = next(part for part in case.get("classname", "").split(".") if part.startswith("test_"))
        skipped = case.find("skipped")
        failed = case.find("failure") is not None or case.find("error") is not None
        excused = skipped is not None and skipped.get("type") == "pytest.xfail"
        kind = "excused" if excused else "skipped" if skipped is not None else "failed" if failed else "passed"
        tallies.setdefault(name, Counter())[kind] += 1
    return {
        name: (one["passed"], one["passed"] + one["failed"] + one["excused"], one["excused"], one["skipped"])
        for name, one in tallies.items()
    }


def fuzz(clients: Path, url: str) -> int:
    """Requests that schemathesis makes up from the OpenAPI document; none may be answered with a 5xx."""
    command = [clients / "bin" / "schemathesis", "--config-file", HERE / "schemathesis.toml", "run"]
    return subprocess.run([*command, f"{url}/openapi.json", "--url", url]).returncode


if __name__ == "__main__":
    sys.exit(main())
