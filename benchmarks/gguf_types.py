"""Tokens per second of one request on a CPU with all matrices of one of GGUF's types, beside bfloat16.

    python benchmarks/gguf_types.py --kinds Q6_K Q2_K Q4_0

The model is a Llama with random weights, whose sizes blocks of 256 inputs divide (those of small published models often
are not). All engines are loaded at once and take turns in workload A of `cpu_workloads.py`. On a machine that others
use, `--processor` counts processor seconds in place of those of the clock, with `--threads 1`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import torch
from cpu_workloads import RESULTS, Requests
from gguf import GGMLQuantizationType as Kind
from machine import describe
from quantized_formats import rate
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from gguf_kit import random_rows, write_model

from octavo import LLM

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}


def write(folder: Path, layers: int, kinds: list[str]) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers, tie_word_embeddings=True))
    for kind in kinds:  # gguf-py does not write all types
        with patch.object(gguf.quants, "quantize", lambda weight, kind: random_rows(kind, weight.shape)):
            write_model(folder / f"{kind}.gguf", model, "llama", [Kind[kind]])
    model.bfloat16().save_pretrained(folder / "bfloat16")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["Q4_0", "Q6_K", "Q2_K", "Q3_K", "IQ4_XS"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor", action="store_true", help="tokens per second of processor time")
    parser.add_argument("--output", type=Path, default=RESULTS / "gguf_types_avx2.json")
    args = parser.parse_args()
    own: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 26, "threads": args.threads}
    runs: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, args.layers, args.kinds)
        engines = {"bfloat16": LLM(str(folder / "bfloat16"), dtype="bfloat16", **own)}
        engines |= {kind: LLM(str(folder / f"{kind}.gguf"), **own) for kind in args.kinds}
        forms = {kind: llm.info.weights for kind, llm in engines.items()}
        for _ in range(args.rounds):
            for kind, llm in engines.items():
                found = rate("A", llm, Requests(0, SIZES["vocab_size"]), processor=args.processor)
                runs.setdefault(kind, []).append(round(found, 1))
            print({kind: values[-1] for kind, values in runs.items()}, flush=True)
        for llm in engines.values():
            llm.close()
    medians = {kind: statistics.median(values) for kind, values in runs.items()}
    print(json.dumps(medians))
    result = {**describe(), "command": sys.argv[1:], "forms": forms, "runs": runs, "medians": medians}
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
