"""What it costs to divide a model over ranks on a CPU: sums alone, and a model's speed.

    python benchmarks/cpu_ranks.py --sums                   a sum of two processes: in shared memory, and by gloo
    python benchmarks/cpu_ranks.py --model MODEL --ranks 2 --threads 1
    python benchmarks/cpu_ranks.py --model MODEL --ranks 1 --threads 2
    python benchmarks/cpu_ranks.py --model MODEL --stages 2 --threads 1             stages of a pipeline
    python benchmarks/cpu_ranks.py ... --attention-backend torch                   the same layer by layer
    PYTHONPATH=OTHER_CHECKOUT python benchmarks/cpu_ranks.py ... --name "before"     the same with another version

Run another version from a folder outside of this checkout: processes of ranks import from the current folder first.

MODEL is a folder with a config.json; the weights are random. Rates are those of greedy decoding, after 128 tokens, and
of one prompt of 256 tokens; each is the best of some repeats. Results of the same name replace each other in --output.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine import describe

HERE = Path(__file__).resolve().parent
MODEL = HERE / "models" / "qwen2.5-0.5b"
ROWS, COLUMNS = (1, 8, 64, 512, 2048), 2048
"""Of the arrays that are summed: tokens of a step, and a model's hidden size."""
BATCHES = (1, 8)
CONTEXT, PROMPT = 128, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sums", action="store_true", help="time sums only")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stages", type=int, default=1, help="of a pipeline, each of --ranks")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--attention-backend", help="left out, the engine chooses")
    parser.add_argument("--steps", type=int, default=16, help="decoding steps that are timed")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--name", help="of the result")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "cpu_ranks_avx2.json")
    parser.add_argument("--part-of-sum", nargs=3, metavar=("KIND", "RANK", "PLACE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part_of_sum:
        kind, rank, place = args.part_of_sum
        take_part(kind, int(rank), place)
        return
    about = describe()
    if args.sums:
        name, figures = "sums of two ranks", {kind: times_of(kind) for kind in ("shared memory", "gloo")}
    else:
        parts = f"{args.ranks} ranks" if args.stages == 1 else f"{args.stages} stages of {args.ranks} ranks"
        form = "" if args.attention_backend is None else f", attention_backend={args.attention_backend}"
        name = args.name or f"{args.model.name}, {parts} of {args.threads} threads{form}"
        figures = rates(args)
    print(json.dumps(figures, indent=1))
    found = json.loads(args.output.read_text()) if args.output.exists() else {}
    args.output.write_text(json.dumps(found | {name: {"machine": about} | figures}, indent=1) + "\n")


def rates(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s of a model of random weights."""
    from octavo import LLM, SamplingParams

    llm = LLM(
        model=str(args.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=args.ranks,
        pipeline_parallel_size=args.stages,
        threads=args.threads,
        attention_backend=args.attention_backend,
        max_model_len=1024,
        max_num_seqs=max(BATCHES),
    )
    rng = random.Random(5)

    def seconds(prompts: list[list[int]], tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": one} for one in prompts], params)
        return time.perf_counter() - began

    def made(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(1000, 30_000) for _ in range(length)] for _ in range(count)]

    def decoding(batch: int) -> float:
        prompts = made(batch, CONTEXT)
        seconds(prompts, 1)  # the prompts are cached now
        pairs = [(seconds(prompts, args.steps + 1), seconds(prompts, 1)) for _ in range(args.repeats)]
        return batch * args.steps / (min(long for long, _ in pairs) - min(short for _, short in pairs))

    figures = {f"decode, {batch} requests, tokens/s": round(decoding(batch), 2) for batch in BATCHES}
    figures["prompt, tokens/s"] = round(PROMPT / min(seconds(made(1, PROMPT), 1) for _ in range(args.repeats)), 1)
    return {"ranks": args.ranks, "stages": args.stages, "threads of each": args.threads} | figures


def times_of(kind: str) -> dict[str, float]:
    """Microseconds of a sum of two processes, by the rows of the array."""
    descriptor = os.memfd_create("sums")
    place = str(descriptor) if kind == "shared memory" else "29555"
    commands = [[sys.executable, __file__, "--part-of-sum", kind, str(rank), place] for rank in range(2)]
    ranks = [subprocess.Popen(one, pass_fds=[descriptor], stdout=subprocess.PIPE, text=True) for one in commands]
    found = [one.communicate()[0] for one in ranks]
    os.close(descriptor)
    times: dict[str, float] = json.loads(found[0])
    return times


def take_part(kind: str, rank: int, place: str) -> None:
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    if kind == "gloo":
        from octavo.parallel.collectives import TorchCollectives

        torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{place}", rank=rank, world_size=2)
        add_up: Callable[[torch.Tensor], torch.Tensor] = TorchCollectives().all_reduce
    else:
        from octavo.native.exchange import Exchange
        from octavo.parallel.shared import SharedMemory

        add_up = SharedMemory(Exchange(int(place), rank, 2)).all_reduce
    found = {}
    for rows in ROWS:
        x, times = torch.ones(rows, COLUMNS), []
        for _ in range(max(20, 400 // rows)):
            began = time.perf_counter()
            add_up(x)
            times.append(time.perf_counter() - began)
            x.fill_(1.0)
        found[f"{rows} rows of {COLUMNS} float32, us"] = round(sorted(times)[len(times) // 2] * 1e6, 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
