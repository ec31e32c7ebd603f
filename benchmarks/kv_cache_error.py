"""What FP8 and int8 keys and values cost in accuracy: a real model's log-probabilities with and without them.

    python benchmarks/kv_cache_error.py [--model smollm2] [--contexts 3] [--output FILE]

Runs on a CPU in float32; keys and values are rounded as a GPU's FP8 and a CPU's int8 cache round them, those of the
query's own step too, which prompts on a GPU don't read rounded: so its figures are those of decoding. The text is
that of perplexity.py.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from perplexity import CONTEXT, HERE, load, log_probabilities
from torch import Tensor

from octavo.hub.resolve import resolve
from octavo.nn.attention.kv_int8 import pack, unpack
from octavo.nn.step import StepInput
from octavo.text.tokenizers.tokenizer import load_tokenizer
from octavo.worker.kv_scales import HEADROOM

Round = Callable[[Tensor, Tensor], Tensor]
"""Values [T, heads, channels] and the largest magnitude of each head [heads, 1], to the values as stored."""


def fp8(dtype: torch.dtype, scaled: bool) -> Round:
    largest = torch.finfo(dtype).max

    def rounded(x: Tensor, peak: Tensor) -> Tensor:
        scale = peak * (HEADROOM / largest) if scaled else torch.ones(())
        return (x / scale).clamp(-largest, largest).to(dtype).float() * scale

    return rounded


def int8(x: Tensor, _: Tensor) -> Tensor:
    return unpack(pack(x), torch.float32)


FORMS: dict[str, Round] = {
    "bfloat16": lambda x, _: x.bfloat16().float(),
    "fp8_e4m3, measured scales": fp8(torch.float8_e4m3fn, True),
    "fp8_e4m3, scales of 1": fp8(torch.float8_e4m3fn, False),
    "fp8_e5m2": fp8(torch.float8_e5m2, False),
    "int8": int8,
}


class Rounding:
    """Stands before a backend's `write`; layers come in order, step after step."""

    def __init__(self, write: Callable[..., None], layers: int) -> None:
        self.inner, self.layers = write, layers
        self.peaks: list[tuple[Tensor, Tensor]] = []
        self.form: Round | None = None
        self.calls = 0

    def __call__(self, k: Tensor, v: Tensor, cache: Tensor, step: StepInput) -> None:
        layer, self.calls = self.calls % self.layers, self.calls + 1
        if len(self.peaks) < self.layers:
            self.peaks.append((k.abs().amax((0, 2))[:, None], v.abs().amax((0, 2))[:, None]))
        if self.form is not None:
            k, v = (self.form(x, peak) for x, peak in zip((k, v), self.peaks[layer], strict=True))
        self.inner(k, v, cache, step)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--contexts", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "kv_cache_error.json")
    args = parser.parse_args()
    ids = load_tokenizer(resolve(args.model)).encode((HERE / "data" / "prose.txt").read_text(encoding="utf-8"))
    contexts = [ids[i * CONTEXT : (i + 1) * CONTEXT] for i in range(min(args.contexts, len(ids) // CONTEXT))]
    worker = load(args.model, {"dtype": "float32", "attention_backend": "torch"})
    rounding = Rounding(worker.attention.write, worker.spec.num_layers)
    worker.attention.write = rounding  # type: ignore[method-assign]
    random_ids = torch.randint(worker.spec.vocab_size, (CONTEXT,), generator=torch.Generator().manual_seed(0))
    log_probabilities(worker, random_ids.tolist())

    sums: dict[str, dict[str, float]] = {name: dict.fromkeys(("loss", "kl", "square", "same"), 0.0) for name in FORMS}
    exact_loss, largest = 0.0, dict.fromkeys(FORMS, 0.0)
    for tokens in contexts:
        rounding.form = None
        exact = log_probabilities(worker, tokens)
        following = torch.tensor(tokens[1:])[:, None]
        exact_loss -= float(exact[:-1].gather(1, following).double().sum())
        for name, form in FORMS.items():
            rounding.form = form
            found = log_probabilities(worker, tokens)
            # Of logits only differences count: their mean over the vocabulary is taken out.
            off = found - exact
            off -= off.mean(-1, keepdim=True)
            sums[name]["loss"] -= float(found[:-1].gather(1, following).double().sum())
            sums[name]["kl"] += float((exact.exp() * (exact - found)).double().sum())
            sums[name]["square"] += float(off.square().mean(-1).double().sum())
            sums[name]["same"] += float((found.argmax(-1) == exact.argmax(-1)).sum())
            largest[name] = max(largest[name], float(off.abs().max()))
    count = len(contexts) * CONTEXT
    table: dict[str, Any] = {"float32": {"perplexity": round(math.exp(exact_loss / (count - len(contexts))), 3)}}
    for name, found in sums.items():
        table[name] = {
            "perplexity": round(math.exp(found["loss"] / (count - len(contexts))), 3),
            "divergence": round(found["kl"] / count, 5),
            "logits_rms_error": round(math.sqrt(found["square"] / count), 4),
            "logits_largest_error": round(largest[name], 3),
            "same_top_token": round(found["same"] / count, 4),
        }
    for name, row in table.items():
        print(f"{name:28s}", row)
    args.output.write_text(json.dumps({"model": args.model, "tokens": count, "forms": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
