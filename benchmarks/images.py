"""What a picture costs: the time until its first token, with and without its encoding, and the time between the tokens
of another request meanwhile.

    python benchmarks/images.py [MODEL] [--size 1024 768] [--settings {}] [--output FILE]

Without MODEL it has the shape of SmolVLM-256M (https://huggingface.co/HuggingFaceTB/SmolVLM-256M-Instruct) with random
weights, made in a temporary folder, for which `transformers` is needed. Both are measured for a first picture and for
one after it. When a picture comes again it has another salt, so that the prefix cache has nothing of it. `start_s` has
the seconds of the start, in which a GPU encodes a sample; the log says how long that takes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe
from PIL import Image

from octavo import AsyncLLM, SamplingParams

MARK = "<image>"
WHAT = "encoded", "found"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--size", type=int, nargs=2, default=[1024, 768], help="width and height of the picture")
    parser.add_argument("--mark", default=MARK, help="how the model's template writes an image")
    parser.add_argument("--settings", type=json.loads, default={}, help="keywords of LLM")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = {"max_model_len": 4096, "kv_cache_memory_bytes": "512M", "spec_method": "none"}
        name = args.model or "SmolVLM-256M's shape, random weights"
        if args.model is None:
            args.model = made(Path(folder))
            given["load_format"] = "dummy"
        report = describe() | {"model": name} | asyncio.run(measured(args, given | args.settings))
    text = json.dumps(report, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


async def measured(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    width, height = args.size
    pictures = [Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)) for _ in range(2)]
    once = SamplingParams(temperature=0, max_tokens=1)
    found: dict[str, Any] = {"size": args.size, "settings": settings}
    began = time.perf_counter()
    async with await AsyncLLM.start(model=args.model, **settings) as llm:
        found["start_s"] = time.perf_counter() - began
        arrivals: list[float] = []
        other = asyncio.create_task(generate(llm, arrivals))
        while len(arrivals) < 100:
            await asyncio.sleep(0.01)
        for (place, picture), what in itertools.product(zip(("first", "later"), pictures, strict=True), WHAT):
            asked: Any = {"prompt": f"{args.mark} What is this?", "multi_modal_data": {"image": picture}}
            began = time.perf_counter()
            async for output in llm.generate(asked | {"cache_salt": what}, once):
                found["prompt_tokens"] = len(output.prompt_token_ids)
            ended = time.perf_counter()
            found[f"{what}_{place}"] = {"first_token_s": ended - began, **gaps(arrivals, began, ended)}
        other.cancel()
        found["alone"] = gaps(arrivals, 0, arrivals[99])
    return found


async def generate(llm: AsyncLLM, arrivals: list[float]) -> None:
    """Generate text for as long as others are measured."""
    long = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    async for _ in llm.generate("The quick brown fox", long):
        arrivals.append(time.perf_counter())


def gaps(arrivals: list[float], began: float, ended: float) -> dict[str, float]:
    """Return milliseconds between tokens that arrived in this time."""
    pairs = itertools.pairwise(arrivals)
    between = [1000 * (second - first) for first, second in pairs if began <= second <= ended]
    return {"median_ms": statistics.median(between), "longest_ms": max(between)} if between else {}


def made(folder: Path) -> str:
    import transformers

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from image_kit import token, tokenizer

    config = transformers.SmolVLMConfig(
        image_token_id=token(MARK),
        scale_factor=4,
        pad_token_id=0,
        tie_word_embeddings=True,
        architectures=["SmolVLMForConditionalGeneration"],
        vision_config={"hidden_size": 768, "intermediate_size": 3072, "image_size": 512, "patch_size": 16},
        text_config={
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49280,
            "max_position_embeddings": 8192,
        },
    )
    config.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    images = transformers.SmolVLMImageProcessorPil(size={"longest_edge": 2048}, max_image_size={"longest_edge": 512})
    images.save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    main()
