"""What a video costs: the time until its first token, with and without its encoding, and the time between the tokens of
another request meanwhile.

    python benchmarks/videos.py [MODEL] [--frames 8 32] [--size 640 360] [--settings {}] [--output FILE]

Without MODEL it has the shape that `benchmarks/images.py` makes. Frames are noise. When a video comes again it has
another salt, so that the prefix cache has nothing of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from images import gaps, generate, made
from machine import describe

from octavo import AsyncLLM, SamplingParams

MARK = "<video>"
WHAT = "encoded", "found"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--frames", type=int, nargs="+", default=[8, 32], help="frames of each video")
    parser.add_argument("--size", type=int, nargs=2, default=[640, 360], help="width and height of a frame")
    parser.add_argument("--mark", default=MARK, help="how the model's template writes a video")
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
    once = SamplingParams(temperature=0, max_tokens=1)
    found: dict[str, Any] = {"size": args.size, "settings": settings}
    async with await AsyncLLM.start(model=args.model, **settings) as llm:
        arrivals: list[float] = []
        other = asyncio.create_task(generate(llm, arrivals))
        while len(arrivals) < 100:
            await asyncio.sleep(0.01)
        found["alone"] = gaps(arrivals, 0, arrivals[99])
        for count in args.frames:
            frames = rng.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
            for what in WHAT:
                asked: Any = {"prompt": f"{args.mark} What is this?", "multi_modal_data": {"video": frames}}
                began = time.perf_counter()
                async for output in llm.generate(asked | {"cache_salt": what}, once):
                    tokens = len(output.prompt_token_ids)
                ended = time.perf_counter()
                seconds = {"prompt_tokens": tokens, "first_token_s": ended - began}
                found[f"{count}_frames_{what}"] = seconds | gaps(arrivals, began, ended)
            if other.done():
                other = asyncio.create_task(generate(llm, arrivals))
        other.cancel()
    return found


if __name__ == "__main__":
    main()
