"""Run compute-sanitizer over a small run of the whole engine on a GPU: every kernel, all kinds of KV cache.

    python tools/sanitize.py [--tools memcheck racecheck] [--kinds auto fp8_e4m3 fp8_e5m2]

A tiny model with random weights computes prompts of several chunks, greedy and sampled tokens, shared prefixes and
preempted requests, launch by launch, with torch's memory cache off so that each tensor has its own bounds.
Ends with 1 if a tool finds anything.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "logprobs": 2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--kinds", nargs="+", default=["auto", "fp8_e4m3", "fp8_e5m2"], help="of KV cache")
    parser.add_argument("--run", action="store_true", help="run the requests themselves (used under a tool)")
    args = parser.parse_args()
    if args.run:
        for kind in args.kinds:
            run(kind)
        return 0
    found = False
    for tool in args.tools:
        print(f"{tool}:", flush=True)
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        command += [sys.executable, __file__, "--run", "--kinds", *args.kinds]
        done = subprocess.run(command, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
        found |= done.returncode != 0
    return int(found)


def run(kind: str) -> None:
    """Run a few requests with this kind of KV cache."""
    from octavo.build import build_core
    from octavo.config import EngineConfig
    from octavo.core.params import SamplingParams
    from octavo.core.request import GenerateRequest
    from octavo.hub.files import ModelFiles

    config = EngineConfig.of(
        load_format="dummy",
        device="cuda",
        dtype="bfloat16",
        kv_cache_dtype=kind,
        kv_cache_memory_bytes=1 << 20,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        max_model_len=256,
        enforce_eager=True,
    )
    files = ModelFiles(name="tiny", path=Path("."), format="safetensors", weights=(), config=CONFIG)
    loop, _ = build_core(config, files)
    for i, length in enumerate((1, 17, 64, 130, 200, 33, 200, 5)):
        how = SAMPLED if i % 2 else {"temperature": 0}
        tokens = [(7 * j + (i if i != 6 else 4)) % 1000 for j in range(length)]
        params = SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False, **how)
        loop.add(GenerateRequest(id=str(i), tokens=tokens, params=params))
    produced = 0
    while loop.busy:
        for delta in loop.step():
            if delta.error:
                raise RuntimeError(delta.error)
            produced += len(delta.tokens)
    print(f"ran {kind}: {produced} tokens", flush=True)


if __name__ == "__main__":
    sys.exit(main())
