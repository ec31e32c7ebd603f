"""Time that a server takes to find an adapter in --lora-dir that no request has named before, without its load.

    python benchmarks/adapter_search.py [--adapters 24] [--output FILE]

The model has the layers and the names of Llama 3.1 8B, but is small enough for a CPU: 32 layers with seven projections
each, hidden size 64. The adapters have rank 16 on all of them, random weights, and files that are alike. `GET
/v1/models/NAME` looks for a name as a request does, and has the engine core begin to read the adapter. The first search
includes what is done once: the first adapter of its form is matched to the model.

Figures are of the client's socket: the first search, the median of the others, and that of names that are known.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path

from lora_server import HERE, Adapters, Server, milliseconds
from machine import Report, describe

PAUSE_S = 0.3
"""The server goes on after a search: it reads the adapter."""
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def searched(server: Server, name: str) -> float:
    """Return the seconds until the server has told what it knows about a name."""
    time.sleep(PAUSE_S)
    began = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v1/models/{name}", timeout=60) as answer:
        answer.read()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=24)
    parser.add_argument("--output", type=Path)
    parser.add_argument("serve_args", nargs="*", help="further arguments of octavo serve (put -- before them)")
    args = parser.parse_args()
    args.max_loras, args.max_model_len = args.adapters, 512
    args.serve_args = ["--kv-cache-memory-bytes", "1G", "--threads", "1", *args.serve_args]
    whole = json.loads((HERE / "models" / "llama-3.1-8b" / "config.json").read_text())
    with tempfile.TemporaryDirectory(prefix="adapters-") as folder:
        args.model = Path(folder) / "model"
        (Path(folder) / "adapters").mkdir()
        args.model.mkdir()
        config = whole | SMALL | {"head_dim": 16, "vocab_size": 2048}
        (args.model / "config.json").write_text(json.dumps(config))
        adapters = Adapters(Path(folder) / "adapters", config, [16], args.adapters)
        report = Report(describe() | {"adapters": args.adapters}, args.output)
        server = Server(args, adapters)
        try:
            searched(server, "base")
            first, *others = [searched(server, name) for name in adapters.names]
            known = [searched(server, name) for name in adapters.names]
        finally:
            server.close()
        report.note("first_ms", milliseconds(first))
        report.note("others_ms", milliseconds(statistics.median(others)))
        report.note("known_ms", milliseconds(statistics.median(known)))


if __name__ == "__main__":
    main()
