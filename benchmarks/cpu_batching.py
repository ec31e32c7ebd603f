"""What batching, paging and prefix sharing bring on a CPU, against serving one by one and against transformers.

    make bench                                     # all parts, a few minutes
    python benchmarks/cpu_batching.py --parts waste prefix

Parts and their bars:
    sequential    16 requests at once: at least 3 times the output tokens/s of the same 16 one after another
    transformers  16 requests at once: at least 1.5 times `transformers.generate` on the static batch of 16
    waste         token slots allocated but empty, over conversations: under 4 %
    prefix        a shared prefix of 1,024 tokens: the second request's first token at least 8 times sooner, and only
                  its own tokens computed; of 32 requests that arrive together, the prefix computed once

Both engines run the same weights (the default model, dequantized) in the same dtype with the same threads, greedily,
end-of-sequence ignored; runs are interleaved and medians compared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import describe

from octavo import LLM, SamplingParams
from octavo.bench.workloads import workload
from octavo.hub.resolve import resolve
from octavo.models.load import open_checkpoint
from octavo.nn.weights import TensorSpec

RESULTS = Path(__file__).resolve().parent / "results"
REQUESTS, TOKENS_IN, TOKENS_OUT = 16, 128, 128
PREFIX, OWN = 1024, 32


@dataclass(frozen=True)
class Setup:
    llm: LLM
    model: str
    dtype: str
    threads: int
    runs: int
    scale: float
    rng: random.Random

    def prompt(self, length: int) -> list[int]:
        return [self.rng.randrange(1000, self.llm.info.vocab_size - 1000) for _ in range(length)]

    def prompts(self) -> list[list[int]]:
        """New every time, so that no run finds another's prefix."""
        return [self.prompt(TOKENS_IN) for _ in range(REQUESTS)]


def fixed(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rates(seconds: list[float]) -> dict[str, Any]:
    tokens = REQUESTS * TOKENS_OUT
    return {
        "seconds": [round(s, 3) for s in seconds],
        "output_tok_s": round(tokens / statistics.median(seconds), 1),
    }


def batched(setup: Setup) -> float:
    prompts: list[Any] = setup.prompts()
    return timed(lambda: setup.llm.generate(prompts, fixed(TOKENS_OUT)))


def one_by_one(setup: Setup) -> float:
    prompts: list[Any] = setup.prompts()
    return timed(lambda: [setup.llm.generate([prompt], fixed(TOKENS_OUT)) for prompt in prompts])


def part_sequential(setup: Setup) -> dict[str, Any]:
    together, apart = interleave(setup.runs, lambda: batched(setup), lambda: one_by_one(setup))
    ratio = statistics.median(apart) / statistics.median(together)
    return {"together": rates(together), "one_by_one": rates(apart), **bar(ratio, least=3.0)}


def part_transformers(setup: Setup) -> dict[str, Any]:
    reference = Reference(setup)
    together, static = interleave(setup.runs, lambda: batched(setup), lambda: reference.run(setup.prompts()))
    ratio = statistics.median(static) / statistics.median(together)
    return {"octavo": rates(together), "transformers": rates(static), **bar(ratio, least=1.5)}


class Reference:
    """`transformers.generate` on a model that holds the same dequantized weights."""

    def __init__(self, setup: Setup) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        files = resolve(setup.model)
        dtype = getattr(torch, setup.dtype)
        self.model = LlamaForCausalLM(LlamaConfig(**files.config)).to(dtype).eval()
        checkpoint = open_checkpoint(files)
        tensors = {
            name: checkpoint.tensor(name, TensorSpec(checkpoint.shape(name), dtype)).to(dtype)
            for name in checkpoint.names()
        }
        missing, unexpected = self.model.load_state_dict(tensors, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise AssertionError(f"weights don't match: missing {missing}, unexpected {unexpected}")
        self.model.tie_weights()
        self.agrees(setup)

    def agrees(self, setup: Setup) -> None:
        """Both engines must generate the same tokens, or the comparison means nothing (float32 only: it is exact)."""
        prompt = setup.prompt(TOKENS_IN)
        ours = setup.llm.generate([prompt], fixed(8))[0].outputs[0].token_ids
        theirs = self.model.generate(torch.tensor([prompt]), do_sample=False, min_new_tokens=8, max_new_tokens=8)
        if setup.dtype == "float32" and theirs[0, TOKENS_IN:].tolist() != ours:
            raise AssertionError(f"transformers generated {theirs[0, TOKENS_IN:].tolist()}, Octavo {ours}")

    def run(self, prompts: list[list[int]], count: int = TOKENS_OUT) -> float:
        ids = torch.tensor(prompts)

        def work() -> None:
            with torch.inference_mode():
                output = self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    min_new_tokens=count,
                    max_new_tokens=count,
                    pad_token_id=0,
                )
            if tuple(output.shape) != (len(prompts), len(prompts[0]) + count):
                raise AssertionError(f"transformers generated {tuple(output.shape)}")

        return timed(work)


def part_waste(setup: Setup) -> dict[str, Any]:
    works = workload("chat", vocab_size=setup.llm.info.vocab_size, scale=setup.scale)
    before = setup.llm.stats()
    samples, total = before.waste_samples, before.waste_sum
    prompts: list[Any] = [work.prompt for work in works]
    seconds = timed(lambda: setup.llm.generate(prompts, [fixed(work.output_tokens) for work in works]))
    after = setup.llm.stats()
    waste = (after.waste_sum - total) / (after.waste_samples - samples)
    tokens = sum(work.output_tokens for work in works)
    return {
        "requests": len(works),
        "output_tok_s": round(tokens / seconds, 1),
        "mean_waste": round(waste, 4),
        "bar": "mean_waste < 0.04",
        "met": waste < 0.04,
    }


def part_prefix(setup: Setup) -> dict[str, Any]:
    first, second, computed = [], [], []
    for _ in range(setup.runs):
        head = setup.prompt(PREFIX)
        first.append(time_to_first_token(setup, head + setup.prompt(OWN)))
        before = setup.llm.stats().prompt_tokens_computed
        second.append(time_to_first_token(setup, head + setup.prompt(OWN)))
        computed.append(setup.llm.stats().prompt_tokens_computed - before)
    head = setup.prompt(PREFIX)
    prompts: list[Any] = [head + setup.prompt(OWN) for _ in range(32)]
    before = setup.llm.stats().prompt_tokens_computed
    seconds = timed(lambda: setup.llm.generate(prompts, fixed(8)))
    at_once = setup.llm.stats().prompt_tokens_computed - before
    verdict = bar(statistics.median(first) / statistics.median(second), least=8.0)
    verdict["met"] &= set(computed) == {OWN} and at_once == PREFIX + 32 * OWN
    return {
        "ttft_first_s": [round(s, 4) for s in first],
        "ttft_second_s": [round(s, 4) for s in second],
        "second_computes": computed,
        "second_must_compute": OWN,
        "together_compute": at_once,
        "together_must_compute": PREFIX + 32 * OWN,
        "together_seconds": round(seconds, 3),
        **verdict,
    }


def time_to_first_token(setup: Setup, prompt: list[int]) -> float:
    def work() -> None:
        stream = setup.llm.stream(prompt, fixed(2))
        next(stream)
        stream.close()

    return timed(work)


def interleave(runs: int, *work: Callable[[], float]) -> list[list[float]]:
    return [list(column) for column in zip(*([one() for one in work] for _ in range(runs)), strict=True)]


def bar(ratio: float, *, least: float) -> dict[str, Any]:
    return {"ratio": round(ratio, 2), "bar": f"ratio >= {least:g}", "met": ratio >= least}


PARTS: dict[str, Callable[[Setup], dict[str, Any]]] = {
    "sequential": part_sequential,
    "transformers": part_transformers,
    "waste": part_waste,
    "prefix": part_prefix,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.032, help="of the chat workload; 0.032 is 32 requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu_batching.json")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {"benchmark": "cpu_batching", **describe(), "dtype": args.dtype, "threads": args.threads}
    settings = {"dtype": args.dtype, "threads": args.threads, "spec_method": "none"}
    with LLM(args.model, kv_cache_memory_bytes=2 << 30, **settings) as llm:
        setup = Setup(llm, args.model, args.dtype, args.threads, args.runs, args.scale, random.Random(args.seed))
        llm.generate([setup.prompt(TOKENS_IN)], fixed(8))
        for name in args.parts:
            print(f"{name} ...", flush=True)
            result[name] = PARTS[name](setup)
            print(json.dumps(result[name], indent=1), flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.output}")
    return 0 if all(result[name]["met"] for name in args.parts) else 1


if __name__ == "__main__":
    sys.exit(main())
