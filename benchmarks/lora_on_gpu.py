"""Check adapters on a GPU: greedy tokens of a small model with adapters are those of merged weights.

    python benchmarks/lora_on_gpu.py [--kv-cache-dtype fp8]

Float32, recorded steps, adapters of several ranks mixed with each other and with the base, at batch sizes from 1 on.
With a KV cache in FP8, adapters lie in its blocks all the same, unrounded. Models with merged weights then measure
other scales for their keys and values, so later tokens may differ: compare the first ones (--tokens 2).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from safetensors.torch import load_file, save_file
from tiny import make_checkpoint, model_files
from tiny_adapters import merged, save_adapter

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.features.lora.payload import NAME
from octavo.features.lora.requests import Part, encode

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 1000, "max_position_embeddings": 512}
RANKS = (4, 8, 16, 64)


def engine(folder: Path, **settings: Any) -> EngineLoop:
    config = EngineConfig.of(device="cuda", dtype="float32", max_num_seqs=32, memory_bytes=2 << 30, **settings)
    return build_core(config, model_files(folder))[0]


def tokens(loop: EngineLoop, asked: list[tuple[int, str | None]], count: int) -> dict[int, list[int]]:
    """Return the greedy tokens of prompts, each with an adapter."""
    for number, name in asked:
        prompt = [(7 * number + 3 * place) % 997 for place in range(5 + 3 * number)]
        options = {} if name is None else {NAME: encode((Part(name),))}
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
        loop.add(GenerateRequest(id=f"{number}", tokens=prompt, params=params, options=options))
    found: dict[int, list[int]] = {number: [] for number, _ in asked}
    while loop.busy:
        for delta in loop.step():
            if delta.error:
                raise RuntimeError(delta.error)
            found[int(delta.id)] += delta.tokens
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    args = parser.parse_args()
    kv = {"kv_cache_dtype": args.kv_cache_dtype}
    with tempfile.TemporaryDirectory() as root:
        base = Path(root) / "base"
        base.mkdir()
        make_checkpoint("llama", base, SIZES)
        config = json.loads((base / "config.json").read_text())
        names = [f"a{rank}" for rank in RANKS]
        folders = [save_adapter(Path(root) / n, config, seed=r, rank=r) for n, r in zip(names, RANKS, strict=True)]
        modules = tuple(f"{name}={folder}" for name, folder in zip(names, folders, strict=True))
        adapted = engine(base, lora_modules=modules, **kv)
        chosen = [*names, None]
        asked = [(number, chosen[number % len(chosen)]) for number in range(20)]
        together = tokens(adapted, asked, args.tokens)
        alone = {number: tokens(adapted, [(number, name)], args.tokens)[number] for number, name in asked[:8]}
        expected: dict[int, list[int]] = {}
        for name, folder in zip(chosen, [*folders, None], strict=True):
            plain = Path(root) / f"merged-{name}"
            plain.mkdir()
            weights = load_file(base / "model.safetensors")
            save_file(weights if folder is None else merged(weights, folder), plain / "model.safetensors")
            (plain / "config.json").write_bytes((base / "config.json").read_bytes())
            loop = engine(plain, enforce_eager=True, **kv)
            expected |= tokens(loop, [(number, None) for number, one in asked if one == name], args.tokens)
        same = sum(together[number] == expected[number] for number, _ in asked)
        same_alone = sum(alone[number] == expected[number] for number in alone)
        print(f"{same} of {len(asked)} in one batch, {same_alone} of {len(alone)} alone: tokens of merged weights")
        if same + same_alone < len(asked) + len(alone):
            raise SystemExit(f"differing: {[n for n, _ in asked if together[n] != expected[n]]}")


if __name__ == "__main__":
    main()
