"""GPT-2 small's shape with random weights on a CPU: as a native program, and layer by layer in torch.

    python benchmarks/cpu_families.py

Milliseconds of a step of one token for each request, after 32 tokens each, in bfloat16 on two threads: the medians of
steps in which the two forms take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import describe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from paged import PagedRunner
from tiny import load_model, model_files

from octavo.models.model import compiled
from octavo.native.program import Pool
from octavo.nn.attention.native import NativeAttention

RESULTS = Path(__file__).resolve().parent / "results"
THREADS, PROMPT, STEPS, WARMUP = 2, 32, 14, 2
BATCHES = (1, 16)


def runners(folder: Path) -> dict[str, PagedRunner]:
    made = {}
    for form in ("native program", "layers in torch"):
        backend = NativeAttention(Pool(THREADS))
        model: Any = load_model(model_files(folder), backend, torch.bfloat16)
        model = compiled(model, backend) if form == "native program" else model
        made[form] = PagedRunner(model, num_blocks=80, block_size=16, dtype=torch.bfloat16)
    return made


def measured(forms: dict[str, PagedRunner], batch: int) -> dict[str, float]:
    rows = {form: [runner.row([7 + i] * PROMPT, 64) for i in range(batch)] for form, runner in forms.items()}
    for form, runner in forms.items():
        runner.step(rows[form], [PROMPT] * batch)
    times: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(WARMUP + STEPS):
        for form, runner in forms.items():
            for row in rows[form]:
                row.tokens.append(5)
            began = time.perf_counter()
            runner.step(rows[form], [1] * batch)
            times[form].append(time.perf_counter() - began)
    for form, runner in forms.items():
        for row in rows[form]:
            runner.free.extend(row.blocks)
    return {form: round(1e3 * statistics.median(of[WARMUP:]), 2) for form, of in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu_families_avx2.json")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.GPT2Config(bos_token_id=None, eos_token_id=None)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        forms = runners(Path(folder))
        steps = {str(batch): measured(forms, batch) for batch in BATCHES}
    result = {"benchmark": "cpu_families", **describe(), "model": "gpt2", "milliseconds": steps}
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(steps))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
