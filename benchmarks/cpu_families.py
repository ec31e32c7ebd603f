"""Models' shapes with random weights on a CPU: as a native program, and layer by layer in torch.

    python benchmarks/cpu_families.py [--models MODEL ...]

Milliseconds of a step of one token for each request, after 32 tokens each, in bfloat16 on two threads: the medians of
four turns of five steps after two others. Between turns of the two forms is a pause, since torch's threads look for
work for a while after each operation. Beside them, what the step must read: all weights but the embeddings, of the
experts only those that its tokens chose, and the states of recurrent layers, which it also writes; and how long the
machine takes to read as much. The figures of other models in the output file are kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from machine import describe
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from paged import PagedRunner, Row

from octavo.models.attention import widest_attention
from octavo.models.decoder import CausalLM
from octavo.models.feed_forwards.experts import Experts
from octavo.models.load.dummy import DummyCheckpoint
from octavo.models.load.weights import load_weights, weight_layers
from octavo.models.model import compiled
from octavo.models.registry import build_model, spec_of
from octavo.native.program import Pool
from octavo.nn.attention.native import NativeAttention
from octavo.nn.build import AnyBackend
from octavo.nn.latent.base import LatentSpec
from octavo.nn.latent.cpu import TorchLatents
from octavo.nn.latent.native import NativeLatents
from octavo.nn.ops.routing import Routing
from octavo.nn.pages import LargePages
from octavo.nn.quant.none import Unquantized
from octavo.nn.quant.onednn import OneDNN, packing_works
from octavo.nn.state import StateCache
from octavo.nn.weights import fused

RESULTS = Path(__file__).resolve().parent / "results"
THREADS, PROMPT, STEPS, WARMUP = 2, 32, 7, 2
TURNS, PAUSE_S = 4, 0.3
BATCHES = (1, 16)
NATIVE, TORCH = "native program", "layers in torch"


class Shape(NamedTuple):
    """A model: its Transformers configuration, and what of it is left out to fit the machine."""

    kind: Any
    changes: dict[str, Any]
    about: str


_ATTENDING = (2, 5, 8, 10, 12, 14)
_LFM2 = {
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "layer_types": ["full_attention" if i in _ATTENDING else "conv" for i in range(16)],
    "vocab_size": 65536,
}

SHAPES = {
    "gpt2": Shape(transformers.GPT2Config, {"bos_token_id": None, "eos_token_id": None}, "GPT-2 small"),
    "lfm2-350m": Shape(
        transformers.Lfm2Config,
        {"hidden_size": 1024, "intermediate_size": 6656, "num_attention_heads": 16, **_LFM2},
        "LFM2-350M",
    ),
    "lfm2-1.2b": Shape(
        transformers.Lfm2Config,
        {"hidden_size": 2048, "intermediate_size": 12288, "num_attention_heads": 32, **_LFM2},
        "LFM2-1.2B",
    ),
    "mamba2-1.3b": Shape(
        transformers.Mamba2Config,
        {
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_heads": 64,
            "n_groups": 1,
            "vocab_size": 50288,
            "tie_word_embeddings": True,
        },
        "Mamba-2 1.3B, 24 of 48 layers: 64 heads of 64 channels with 128 numbers each, 51 MB of states for a request",
    ),
    "deepseek-v2-lite": Shape(
        transformers.DeepseekV2Config,
        {
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 4,
            "num_experts_per_tok": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "vocab_size": 8192,
        },
        "DeepSeek-V2-Lite, 4 of 27 layers, all with the first one's dense feed-forward, and a vocabulary of 8,192",
    ),
    "olmoe": Shape(
        transformers.OlmoeConfig,
        {
            "num_hidden_layers": 2,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "intermediate_size": 1024,
            "vocab_size": 8192,
            "eos_token_id": None,
        },
        "OLMoE-1B-7B, 2 of 16 layers and a vocabulary of 8,192: 64 experts of 1,024, 8 for a token",
    ),
    "qwen3-moe": Shape(
        transformers.Qwen3MoeConfig,
        {
            "num_hidden_layers": 2,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "vocab_size": 8192,
        },
        "Qwen3-30B-A3B, 2 of 48 layers and a vocabulary of 8,192: 128 experts of 768, 8 for a token",
    ),
}


def source_of(shape: Shape, form: str) -> CausalLM:
    """A model with random weights, stored as a server would for this form."""
    config = shape.kind(**shape.changes)
    architecture = transformers.AutoModelForCausalLM._model_mapping[shape.kind].__name__
    spec = spec_of({**config.to_dict(), "architectures": [architecture]})
    native = form == NATIVE
    scheme = OneDNN if not native and packing_works(torch.bfloat16) else Unquantized
    keep = LargePages().keep if native else fused
    latent = isinstance(widest_attention(spec), LatentSpec)
    attention: AnyBackend = NativeAttention(Pool(THREADS))
    if latent:
        attention = NativeLatents(Pool(THREADS)) if native else TorchLatents()
    place: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "attention": attention}
    model = build_model(spec, **place, scheme=scheme, keep=keep)
    load_weights(model, DummyCheckpoint(0))
    return model


class Form(NamedTuple):
    """One form of a model, and the requests that it computes."""

    runner: PagedRunner
    rows: list[Row]


def runner_of(shape: Shape, form: str) -> PagedRunner:
    source = source_of(shape, form)
    attending: list[Any] = [layer for layer in source.cached_layers if not isinstance(layer, StateCache)]
    attention = attending[0].backend if attending else NativeAttention(Pool(THREADS))
    model: Any = compiled(source, attention) if form == NATIVE else source
    block_size = 64 if state_bytes(source) else 16  # a state takes a block, and memory in all of them
    return PagedRunner(model, num_blocks=80 * sum(BATCHES) // block_size, block_size=block_size, dtype=torch.bfloat16)


def started(runner: PagedRunner, batch: int) -> Form:
    """Compute a prompt of each request."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 999, (batch, PROMPT), generator=generator)
    rows = [runner.row(prompt, 64) for prompt in tokens.tolist()]
    runner.step(rows, [PROMPT] * batch)
    return Form(runner, rows)


def step_once(form: Form, tokens: Sequence[int]) -> float:
    """Append a token to each request; return the milliseconds of their step."""
    for row, token in zip(form.rows, tokens, strict=True):
        row.tokens.append(token)
    began = time.perf_counter()
    form.runner.step(form.rows, [1] * len(form.rows))
    return 1e3 * (time.perf_counter() - began)


def measured(runners: dict[str, PagedRunner], chosen: list[int], batch: int) -> dict[str, Any]:
    forms = {form: started(runner, batch) for form, runner in runners.items()}
    layers: Any = runners[TORCH].model
    times: dict[str, list[float]] = {form: [] for form in forms}
    read = []
    tokens = torch.randint(1, 999, (TURNS, STEPS, batch), generator=torch.Generator().manual_seed(2))
    for of_turn in tokens.tolist():
        for form, one in forms.items():
            time.sleep(PAUSE_S)
            for of_step in of_turn:
                chosen.clear()
                times[form].append(step_once(one, of_step))
                if form == TORCH:
                    read.append(step_bytes(layers, chosen) + batch * state_bytes(layers))
    counted = [i for i in range(TURNS * STEPS) if i % STEPS >= WARMUP]
    steps = {form: round(statistics.median([of[i] for i in counted]), 2) for form, of in times.items()}
    return {**steps, "megabytes read": round(statistics.mean(read[i] for i in counted) / 1e6)}


def count_chosen(model: Any) -> list[int]:
    """Return a list to which each layer of experts appends the number of experts of a step."""
    counts: list[int] = []
    for layer in model.modules():
        if isinstance(layer, Experts):
            scheme: Any = layer.experts.scheme

            def mix(x: Tensor, routing: Routing, added: Tensor | None = None, whole: Any = scheme.mix) -> Tensor:
                counts.append(len(routing.experts.unique()))
                y: Tensor = whole(x, routing, added)
                return y

            scheme.mix = mix
    return counts


def step_bytes(model: CausalLM, chosen: Sequence[int]) -> float:
    """Return the bytes of the weights that a step reads."""
    mixtures = [layer.experts for layer in model.modules() if isinstance(layer, Experts)]
    unread: list[Any] = [*mixtures, *model.ropes]  # of a table of rotations, a row for each token
    if model.head.nbytes:  # else the head is the table of embeddings
        unread.append(model.embedding)
    dense = sum(layer.nbytes for layer in weight_layers(model) if layer not in unread)
    shares = (layer.nbytes * n / layer.form.num_experts for layer, n in zip(mixtures, chosen, strict=True))
    return dense + sum(shares)


def state_bytes(model: CausalLM) -> int:
    """Return the bytes of a request's states."""
    return sum(layer.nbytes for layer in model.cached_layers if isinstance(layer, StateCache))


def bytes_per_second() -> float:
    """Return the machine's best rate of reading, of seven tries."""
    memory = torch.ones(1 << 28)
    rates = []
    for _ in range(7):
        began = time.perf_counter()
        memory.sum()
        rates.append(memory.nbytes / (time.perf_counter() - began))
    return max(rates)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu_families_avx2.json")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    whole = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    models = whole.get("models", {})
    for name in args.models:
        runners = {form: runner_of(SHAPES[name], form) for form in (NATIVE, TORCH)}
        chosen = count_chosen(runners[TORCH].model)
        steps = {str(batch): measured(runners, chosen, batch) for batch in BATCHES}
        del runners
        gc.collect()
        rate = bytes_per_second()
        for step in steps.values():
            step["reading them"] = round(1e3 * step["megabytes read"] * 1e6 / rate, 2)
        own = {"shape": SHAPES[name].about, "gigabytes per second": round(rate / 1e9, 1), "milliseconds": steps}
        models[name] = {**describe(), **own}
        print(name, json.dumps(own))
        whole = {"benchmark": "cpu_families", "models": models}
        args.output.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
