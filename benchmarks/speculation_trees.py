"""What drafts as a tree would gain over a chain: accepted drafts of an EAGLE head, for the same number of tokens.

    octavo spec-train smollm2 --data benchmarks/data/questions.txt -o HEAD --epochs 10
    python benchmarks/speculation_trees.py --head HEAD [--model smollm2] [--output FILE]

A chain drafts the head's most likely token at each depth. A tree also verifies less likely ones: its nodes are paths of
ranks, as vLLM's `speculative_token_tree` names them, and it must hold the path of the model's own tokens. Depth after
depth along these, the rank of the model's token among the head's decides how far any tree would be accepted; so each
position is measured once. The prompts are those that `spec-train` holds out. The best tree of n nodes has the n most
frequent paths; it is chosen on one half of the positions and counted on the other, and vice versa.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import describe
from torch.nn import functional

from octavo.features.speculation.eagle.corpus import Example, Target, collect, read_prompts, target_of
from octavo.features.speculation.eagle.head import EagleHead, load_head
from octavo.hub.resolve import resolve

HERE = Path(__file__).parent
DEPTH, WIDTH = 8, 16
SIZES = (1, 2, 3, 4, 5, 7, 10, 15, 31)

Path_ = tuple[int, ...]


@torch.inference_mode()
def ranks(head: EagleHead, target: Target, one: Example, end: int) -> Path_:
    """Return the ranks of the model's tokens after the first `end` + 1, up to the first beyond `WIDTH`."""
    expected = (one.states @ target.output.T).argmax(-1)
    embedded = functional.embedding(one.tokens[1:], target.embeddings)
    states, found = one.states[:end], []
    for place in range(end, min(end + DEPTH, len(one.tokens) - 1)):
        predicted = head(embedded[None, :place], states[None])[0, -1:]
        logits = (predicted @ target.output.T)[0]
        rank = int((logits > logits[expected[place]]).sum())
        if rank >= WIDTH:
            break
        found.append(rank)
        states = torch.cat([states, predicted])
    return tuple(found)


def prefixes(path: Path_) -> list[Path_]:
    return [path[:depth] for depth in range(1, len(path) + 1)]


def best_tree(paths: Sequence[Path_], size: int) -> set[Path_]:
    """Return the `size` most frequent paths. A path is never more frequent than its beginning, so it is a tree."""
    counts = Counter(part for path in paths for part in prefixes(path))
    order = sorted(counts, key=lambda part: (-counts[part], len(part), part))
    return set(order[:size])


def accepted(paths: Sequence[Path_], tree: Collection[Path_]) -> float:
    """Return the mean number of drafts that are accepted of a tree."""
    return sum(sum(part in tree for part in prefixes(path)) for path in paths) / len(paths)


def measure(paths: Sequence[Path_]) -> dict[str, Any]:
    halves = paths[::2], paths[1::2]
    chains = {size: accepted(paths, prefixes((0,) * size)) for size in SIZES}
    trees = {
        size: sum(accepted(halves[1 - i], best_tree(halves[i], size)) * len(halves[1 - i]) for i in (0, 1)) / len(paths)
        for size in SIZES
    }
    rows = [
        {"drafts": size, "chain": round(chains[size], 3), "tree": round(trees[size], 3)}
        | {"gain": round((1 + trees[size]) / (1 + max(chains[n] for n in SIZES if n <= size)), 3)}
        for size in SIZES
    ]
    among = {n: round(sum(bool(path) and path[0] < n for path in paths) / len(paths), 3) for n in (1, 2, 3, 4, 8)}
    tree = sorted(best_tree(paths, 7), key=lambda part: (len(part), part))
    return {"positions": len(paths), "first_draft_among": among, "accepted": rows, "best_tree_of_7": tree}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--head", required=True, type=Path)
    parser.add_argument("--data", default=HERE / "data" / "questions.txt", type=Path)
    parser.add_argument("--held-out", default=0.1, type=float)
    parser.add_argument(
        "--every", default=3, type=int, help="positions of an answer from one that is measured to the next"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    prompts = read_prompts(args.data)
    held = prompts[: max(1, round(len(prompts) * args.held_out))]
    target, head = target_of(resolve(args.model)), load_head(args.head)
    examples = collect(args.model, held, max_tokens=128, context=512, progress=lambda *_: None)
    paths = [
        ranks(head, target, one, end)
        for one in examples
        for end in range(one.num_prompt, len(one.tokens) - DEPTH, args.every)
    ]
    found = measure(paths)
    print(json.dumps(found, indent=2))
    if args.output is not None:
        args.output.write_text(
            json.dumps(describe() | {"model": args.model} | found, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
