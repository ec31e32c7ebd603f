"""What prompt lookup could gain on the texts of speculation.py, from recorded answers and the cost of steps.

    python benchmarks/speculation_bound.py [MODEL] [--costs 1 1.3 1.6 1.9] [--chat]

A model answers greedily without drafts. Then its answers are followed token by token, once with the drafts of `auto`,
once with those of a drafter that knows which earlier place of the last token goes on as the answer does, and how far,
and once with drafts that are always right. `--costs` are seconds of steps of 1, 2, ... tokens, in steps of one token;
as many drafts as it has numbers less one are made. Searching, planning and the choice of their number cost nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np
from speculation import prompts

from octavo import LLM, SamplingParams
from octavo.features.speculation import lookup
from octavo.features.speculation.config import DraftConfig

Drafter = Callable[[list[int], list[int], int], Sequence[int]]
"""Drafts from the known tokens, the tokens that will follow, and a number."""
CONFIG = DraftConfig()


def of_auto(known: list[int], following: list[int], count: int) -> Sequence[int]:
    text = np.array(known, dtype=np.int32)
    matches = lookup.longest(text, text, CONFIG.prompt_lookup_max)
    if matches.size < CONFIG.least_match:
        return []
    most = min(count, int(matches.size * CONFIG.suffix_decoding_max_spec_factor))
    drafts: list[int] = lookup.voted(matches, most, CONFIG.suffix_decoding_min_token_prob).tolist()
    return drafts


def of_best_place(known: list[int], following: list[int], count: int) -> Sequence[int]:
    best = 0
    for end in range(len(known) - 1):
        if known[end] == known[-1]:
            best = max(best, agreed(known[end + 1 : end + 1 + count], following))
    return following[:best]


def always_right(known: list[int], following: list[int], count: int) -> Sequence[int]:
    return following[:count]


DRAFTERS: dict[str, Drafter] = {"auto": of_auto, "best place": of_best_place, "always right": always_right}


def agreed(drafts: Sequence[int], following: Sequence[int]) -> int:
    """Return how many of the first drafts are the tokens that follow."""
    count = 0
    while count < min(len(drafts), len(following)) and drafts[count] == following[count]:
        count += 1
    return count


def seconds(prompt: list[int], answer: list[int], draft: Drafter, costs: Sequence[float]) -> float:
    """Return the cost of an answer after its first token."""
    spent, place = 0.0, 1
    while place < len(answer):
        count = min(len(costs) - 1, len(answer) - place - 1)
        drafts = draft(prompt + answer[:place], answer[place:], count) if count else []
        spent += costs[len(drafts)]
        place += 1 + agreed(drafts, answer[place:])
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--costs", type=float, nargs="+", default=[1, 1.3, 1.6, 1.9])
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--chat", action="store_true", help="ordinary questions in place of texts to edit")
    args = parser.parse_args()
    params = SamplingParams(max_tokens=args.tokens, temperature=0)
    with LLM(args.model, max_model_len=1024, spec_method="none") as llm:
        answers = [llm.chat([one], params, use_tqdm=False)[0] for one in prompts(chat=args.chat)]
    texts = [(list(one.prompt_token_ids or []), list(one.outputs[0].token_ids)) for one in answers]
    tokens = sum(len(answer) - 1 for _, answer in texts)
    for name, draft in DRAFTERS.items():
        spent = sum(seconds(prompt, answer, draft, args.costs) for prompt, answer in texts)
        print(f"{name:14} x{tokens * args.costs[0] / spent:.2f}")


if __name__ == "__main__":
    main()
