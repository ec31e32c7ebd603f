"""Time to the first token of an adapter that goes on with a conversation which the base model has answered.

    python benchmarks/lora_activated.py [--tokens 1024] [--rank 16] [--rounds 5] [--output figures.json]

Two adapters with the same random weights on all linear layers of SmolLM2-135M: one is always active, so the whole
conversation is computed with it, and one begins at its invocation tokens (aLoRA). Each round has a conversation of its
own, which the base model answers first; then it, the first and the second adapter go on with it, in turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from machine import Report, describe
from safetensors.torch import save_file

from octavo import LLM, SamplingParams
from octavo.lora.request import LoRARequest

LAYERS, HIDDEN, INNER, KEYS = 30, 576, 1536, 192
"""Of SmolLM2-135M."""
INVOCATION = [1, 9690, 198]
TURN = 24
"""Tokens of the last turn, the invocation included."""


def save(folder: Path, invocation: list[int] | None, rank: int) -> Path:
    """Write an adapter of this rank on all linear layers, which hardly changes any output."""
    folder.mkdir()
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, KEYS)}
    shapes |= {"self_attn.v_proj": (HIDDEN, KEYS), "self_attn.o_proj": (HIDDEN, HIDDEN)}
    shapes |= {"mlp.gate_proj": (HIDDEN, INNER), "mlp.up_proj": (HIDDEN, INNER), "mlp.down_proj": (INNER, HIDDEN)}
    tensors = {}
    for layer in range(LAYERS):
        for name, (inputs, outputs) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, inputs) / inputs**0.5
            tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, rank) * 1e-3
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "alora_invocation_tokens": invocation}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def milliseconds(llm: LLM, prompt: list[int], adapter: LoRARequest | None) -> float:
    """Return the time to one token after a prompt."""
    began = time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0)
    llm.generate([{"prompt_token_ids": prompt}], params, lora_request=adapter, use_tqdm=False)
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of the conversation")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rng = random.Random(0)
    times: dict[str, list[float]] = {"base": [], "always active": [], "activated": []}
    with tempfile.TemporaryDirectory() as root:
        saved = {
            "always active": save(Path(root, "always"), None, given.rank),
            "activated": save(Path(root, "activated"), INVOCATION, given.rank),
        }
        adapters: Mapping[str, LoRARequest | None] = {"base": None} | {
            name: LoRARequest(name, number, str(path)) for number, (name, path) in enumerate(saved.items(), 1)
        }
        with LLM("smollm2", enable_lora=True, max_lora_rank=given.rank, max_model_len=2 * given.tokens) as llm:
            for number in range(1 + given.rounds):
                conversation = [rng.randrange(1000, 40000) for _ in range(given.tokens)]
                milliseconds(llm, conversation, None)
                for name, adapter in adapters.items():
                    turn = [*INVOCATION, *(rng.randrange(1000, 40000) for _ in range(TURN - len(INVOCATION)))]
                    took = milliseconds(llm, conversation + turn, adapter)
                    if number:  # the first round reads the adapters
                        times[name].append(took)
    report = Report(describe(), given.output)
    for name, found in times.items():
        least, most = min(found), max(found)
        figures = {"median_ms": statistics.median(found), "least_ms": least, "most_ms": most}
        report.note(name, {key: round(value, 1) for key, value in figures.items()})


if __name__ == "__main__":
    main()
