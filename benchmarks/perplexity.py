"""What each form of the weights and activations costs in accuracy: perplexity, and divergence from float32.

    python benchmarks/perplexity.py

The text is benchmarks/data/prose.txt (this project's documentation at one time), cut into contexts of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from cpu_workloads import FORMATS
from machine import describe
from torch import Tensor

from octavo.config import EngineConfig
from octavo.hub.resolve import resolve
from octavo.nn.step import StepInput
from octavo.text.tokenizers.tokenizer import load_tokenizer
from octavo.worker.worker import Worker

HERE = Path(__file__).resolve().parent
CONTEXT, BLOCK = 1024, 16


def log_probabilities(worker: Worker, tokens: list[int]) -> Tensor:
    """[CONTEXT, vocab] float32 of one context."""
    model = worker.model
    assert model is not None
    ids = torch.tensor(tokens)
    step = StepInput(
        input_ids=ids,
        positions=torch.arange(CONTEXT),
        query_start=torch.tensor([0, CONTEXT], dtype=torch.int32),
        seq_lens=torch.tensor([CONTEXT], dtype=torch.int32),
        block_tables=torch.arange(CONTEXT // BLOCK, dtype=torch.int32)[None],
        slot_mapping=torch.arange(CONTEXT),
        logit_rows=torch.arange(CONTEXT),
        max_query_len=CONTEXT,
        max_seq_len=CONTEXT,
    )
    step.attn = worker.attention.prepare(step, BLOCK)
    return torch.log_softmax(model.logits(model.forward(model.embed(step), step)).float(), dim=-1)


def load(model: str, settings: dict[str, str]) -> Worker:
    config = EngineConfig.of(model=model, **settings)
    worker = Worker(config.model, config.device, resolve(model), config.cache)
    worker.prepare_kernels()
    worker.load()
    worker.make_runner(num_blocks=CONTEXT // BLOCK, num_slots=1, max_model_len=CONTEXT, max_step_tokens=CONTEXT)
    return worker


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--contexts", type=int, default=5)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "perplexity.json")
    args = parser.parse_args()

    text = (HERE / "data" / "prose.txt").read_text(encoding="utf-8")
    ids = load_tokenizer(resolve(args.model)).encode(text)
    contexts = [ids[i * CONTEXT : (i + 1) * CONTEXT] for i in range(min(args.contexts, len(ids) // CONTEXT))]
    workers = {name: load(args.model, settings) for name, settings in FORMATS.items()}
    loss = dict.fromkeys(FORMATS, 0.0)
    divergence = dict.fromkeys(FORMATS, 0.0)
    for tokens in contexts:
        exact = log_probabilities(workers["float32"], tokens)
        following = torch.tensor(tokens[1:])[:, None]
        for name, worker in workers.items():
            found = exact if name == "float32" else log_probabilities(worker, tokens)
            loss[name] -= float(found[:-1].gather(1, following).double().sum())
            divergence[name] += float((exact.exp() * (exact - found)).double().sum())
    count = len(contexts) * (CONTEXT - 1)
    table: dict[str, Any] = {
        name: {
            "weights": workers[name].weight_form,
            "perplexity": round(math.exp(loss[name] / count), 3),
            "divergence": round(divergence[name] / (len(contexts) * CONTEXT), 5),
        }
        for name in FORMATS
    }
    result = {"benchmark": "perplexity", **describe(), "model": args.model, "tokens": count, "table": table}
    print(json.dumps(table, indent=1))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.output}")
    within = table["int8"]["perplexity"] <= 1.01 * table["bfloat16"]["perplexity"]
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
