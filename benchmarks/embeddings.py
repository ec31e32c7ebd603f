"""Sentences a second of the catalogue's embedding model, beside plain Transformers in the same process.

    python benchmarks/embeddings.py [--sentences 512] [--threads N] [--rounds 3]

Both get the same sentences of one to sixty words, in float32. Transformers runs batches of 64, sorted by length as
sentence-transformers sorts them, and padded; Octavo gets them all at once. Rounds alternate, the best of each counts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
import transformers
from machine import describe

from octavo import LLM
from octavo.hub.resolve import resolve

PROSE = Path(__file__).parent / "data" / "prose.txt"
BATCH = 64


def sentences(count: int) -> list[str]:
    """Cuttings of prose, the same every time."""
    words = PROSE.read_text(encoding="utf-8").split()
    rng = random.Random(0)
    starts = [rng.randrange(len(words) - 60) for _ in range(count)]
    return [" ".join(words[start : start + rng.randint(1, 60)]) for start in starts]


class Transformers:
    """Mean pooling, as sentence-transformers does it."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def embed(self, texts: list[str]) -> torch.Tensor:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        out = torch.empty(len(texts), self.model.config.hidden_size)
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            batch = self.tokenizer(
                [texts[i] for i in places], padding=True, truncation=True, max_length=256, return_tensors="pt"
            )
            hidden = self.model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None].float()
            out[places] = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=512)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    folder = str(resolve("minilm").path)
    texts = sentences(args.sentences)
    best = {"octavo": float("inf"), "transformers": float("inf")}
    with LLM(folder, **({"threads": args.threads} if args.threads else {})) as llm:
        plain = Transformers(folder)
        for _ in range(args.rounds):
            began = time.perf_counter()
            ours = llm.embed(texts, truncate_prompt_tokens=-1)
            best["octavo"] = min(best["octavo"], time.perf_counter() - began)
            began = time.perf_counter()
            theirs = plain.embed(texts)
            best["transformers"] = min(best["transformers"], time.perf_counter() - began)
        tokens = sum(len(one.prompt_token_ids) for one in ours)
    apart = (torch.tensor([one.outputs.embedding for one in ours]) - theirs).abs().max().item()
    result = {
        "machine": describe(),
        "threads": torch.get_num_threads(),
        "sentences": len(texts),
        "tokens": tokens,
        "sentences_per_second": {name: round(len(texts) / seconds, 1) for name, seconds in best.items()},
        "ratio": round(best["transformers"] / best["octavo"], 2),
        "largest_difference": apart,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
