"""Decoded tokens per second by batch size, of each format of quantized weights on one GPU, and a plot of them.

    python benchmarks/quantization_by_batch.py [--formats bf16 fp8 ...] [--batches 1 2 ...] --output FILE.json
    python benchmarks/quantization_by_batch.py --plot FILE.json [FILE.json ...] FILE.svg

The weights are random and of a real model's shape; each format has an engine in a process of its own. Its batch size is
a number of equal requests: a prompt of 16 tokens, greedy, with `--tokens` answered. Seconds are counted from the first
step in which all of them decode. Each size runs twice, the first time not counted.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from machine import describe, describe_gpu

HERE = Path(__file__).resolve().parent
FORMATS = {
    "bf16": "BF16",
    "fp8": "FP8, a scale per output",
    "fp8_static": "FP8, a scale per output, static inputs",
    "w8a8": "INT8 (W8A8), a scale per output",
    "w8a16": "INT8 (W8A16), a scale per output",
    "w4a16": "GPTQ-4 (W4A16), groups of 128",
    "awq": "AWQ-4, groups of 128 with zero points",
    "q4_k": "Q4_K, groups of 32 with minima",
    "nf4": "NF4, groups of 64",
    "mxfp8": "MXFP8, groups of 32",
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PROMPT = 16
FOUR_BITS = "w4a16"
WITH_MINIMA = {"awq": 128, "q4_k": 32}
"""Formats that --quantization does not have -> inputs that share a scale and a minimum."""
CODES = {"nf4": 64, "mxfp8": 32}
"""Likewise -> inputs that share a scale."""
NF4 = """
-1.0 -0.6961928 -0.5250731 -0.3949175 -0.2844414 -0.1847734 -0.09105 0.0
0.0795803 0.1609302 0.2461123 0.3379152 0.4407098 0.562617 0.7229568 1.0
"""
"""Its numbers: https://arxiv.org/abs/2305.14314, appendix E."""
COLORS = ("#333333", "#d62728", "#e7969c", "#1f77b4", "#17becf", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, default=HERE / "models" / "llama-3.1-8b", help="folder with a config.json"
    )
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", nargs="+", type=Path, help="JSON files of this script, and the SVG file to write")
    args = parser.parse_args()
    if args.plot:
        *sources, target = args.plot
        target.write_text(svg(merged(sources)), encoding="utf-8")
        return
    report: dict[str, Any] = {**describe(), "gpu": describe_gpu(), "model": args.model.name, "tokens": args.tokens}
    report["tokens_per_second"] = {}
    for form in args.formats:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            speeds = process.submit(measure, form, args.model, args.batches, args.tokens).result()
        report["tokens_per_second"][form] = speeds
        print(form, json.dumps(speeds), flush=True)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")


def measure(form: str, model: Path, batches: list[int], tokens: int) -> dict[str, float]:
    """Return batch size -> tokens per second."""
    from gpu_workloads import files_of

    from octavo.build import build_core
    from octavo.config import EngineConfig

    if form in WITH_MINIMA:
        round_with_minima(WITH_MINIMA[form])
    if form in CODES:
        round_to_codes(form)
    if form == "fp8_static":
        round_statically()
    config = EngineConfig.of(
        load_format="dummy",
        device="cuda",
        max_num_seqs=max(batches),
        max_num_batched_tokens=max(batches) * PROMPT,
        max_model_len=1024,
        quantization={"bf16": None, **dict.fromkeys((*WITH_MINIMA, *CODES), FOUR_BITS), "fp8_static": "fp8"}.get(
            form, form
        ),
    )
    loop, _ = build_core(config, files_of(model))
    return {str(batch): round(max(speed(loop, batch, tokens) for _ in range(2)), 1) for batch in batches}


def round_statically() -> None:
    """Let --quantization fp8 have static scales of activations, any, in this process."""
    from octavo.nn.quant.online import ONLINE, Online

    fp8 = ONLINE["fp8"]
    ONLINE["fp8"] = Online(lambda weights: fp8.round(weights).with_input_scale(0.02), fp8.multiple, fp8.bits)


def round_with_minima(group: int) -> None:
    """Let --quantization round to 4 bits with minima in this process."""
    import torch

    from octavo.nn.quant.online import ONLINE, Online
    from octavo.nn.weights import QuantizedBlocks

    def blocks_of(weight: torch.Tensor) -> QuantizedBlocks:
        grouped = weight.float().unflatten(1, (-1, group))
        low, high = grouped.amin(2), grouped.amax(2)
        scales = ((high - low) / 15).clamp_min(2.0**-14).half()
        least = (low + 8 * scales.float()).half()
        values = ((grouped - low[..., None]) / scales.float()[..., None]).round().clamp(0, 15).to(torch.uint8)
        scales, least = (one.repeat_interleave(group // 32, 1) for one in (scales, least))
        return QuantizedBlocks(values.flatten(1), scales, least, 8, 4)

    ONLINE[FOUR_BITS] = Online(lambda weights: [blocks_of(weight) for weight in weights], 32, 4, group)


def round_to_codes(form: str) -> None:
    """Let --quantization round to NF4 or MXFP8 in this process."""
    import torch
    from torch import Tensor

    from octavo.nn.ops.fragments import Fragments
    from octavo.nn.ops.words import Words
    from octavo.nn.quant.coded_fragments import pack_numbers
    from octavo.nn.quant.online import ONLINE, Online
    from octavo.nn.weights import Codebook, QuantizedBlocks

    group, table = CODES[form], torch.tensor([float(number) for number in NF4.split()])
    floats = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    book = Codebook("table", table) if form == "nf4" else Codebook("e4m3", floats)

    def blocks_of(weight: Tensor) -> QuantizedBlocks:
        grouped = weight.float().unflatten(1, (-1, group))
        largest = grouped.abs().amax(2).clamp_min(2.0**-14)
        if form == "nf4":
            scales, limits = largest, (table[1:] + table[:-1]).to(weight.device) / 2
            codes = torch.bucketize(grouped / scales[..., None], limits, out_int32=True).to(torch.uint8)
        else:
            scales = torch.exp2(torch.log2(largest / 448).ceil())
            codes = (grouped / scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
        return QuantizedBlocks(codes.flatten(1), scales, None, 0, book.bits, book=book)

    class Coded(Online):
        __slots__ = ()

        def pack(self, weights: Any) -> Words | Fragments:
            made = pack_numbers(self.round(weights), weights[0].device, weights[0].dtype)
            if made is None:
                raise RuntimeError(f"no kernel multiplies with {form}")
            return made

    ONLINE[FOUR_BITS] = Coded(lambda weights: [blocks_of(weight) for weight in weights], 64, book.bits, group)


def speed(loop: Any, batch: int, tokens: int) -> float:
    """Return tokens per second of requests that all decode at a time."""
    from octavo.core.params import SamplingParams
    from octavo.core.request import GenerateRequest

    loop.forget_past()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    stamp = time.monotonic_ns()
    for i in range(batch):
        prompt = [(stamp + i * PROMPT + j) % 120_000 + 100 for j in range(PROMPT)]
        loop.add(GenerateRequest(id=f"{stamp}-{i}", tokens=prompt, params=params))
    produced, began, before = 0, 0.0, 0
    while loop.busy:
        for delta in loop.step():
            if delta.error:
                raise RuntimeError(delta.error)
            produced += len(delta.tokens)
        if not began and produced >= 2 * batch:
            began, before = time.perf_counter(), produced
    if produced != batch * tokens:
        raise RuntimeError(f"{produced} tokens came, not {batch * tokens}")
    return (produced - before) / (time.perf_counter() - began)


def merged(sources: list[Path]) -> dict[str, dict[int, float]]:
    """Return format -> batch size -> tokens per second, from several files or files of several runs; later ones
    count."""
    found: dict[str, dict[int, float]] = {}
    reports = [json.loads(source.read_text(encoding="utf-8")) for source in sources]
    for run in chain.from_iterable(report.get("runs", [report]) for report in reports):
        for form, speeds in run["tokens_per_second"].items():
            found.setdefault(form, {}).update({int(batch): value for batch, value in speeds.items()})
    return found


def svg(found: dict[str, dict[int, float]]) -> str:
    """Plot speeds relative to BF16's, by batch size on a logarithmic axis."""
    width, height, left, top, right, bottom = 760, 420, 60, 40, 250, 50
    base = found["bf16"]
    batches = sorted(base)
    ratios = {form: [(b, speeds[b] / base[b]) for b in batches if b in speeds] for form, speeds in found.items()}
    most = max(ratio for line in ratios.values() for _, ratio in line) * 1.05

    def x(batch: float) -> float:
        return left + batches.index(int(batch)) / max(1, len(batches) - 1) * (width - left - right)

    def y(ratio: float) -> float:
        return height - bottom - ratio / most * (height - top - bottom)

    def text(at: tuple[float, float], content: str, anchor: str = "middle") -> str:
        return f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}">{content}</text>'

    marks = [text((x(b), height - bottom + 18), str(b)) for b in batches]
    steps = [step / 2 for step in range(int(most * 2) + 1)]
    for step in steps:
        marks.append(text((left - 8, y(step) + 4), f"{step:g}", "end"))
        marks.append(f'<path d="M{left} {y(step):.1f}H{width - right}" stroke="#ddd"/>')
    marks.append(text(((left + width - right) / 2, height - 10), "requests decoding at a time"))
    marks.append(text((left, top - 16), "tokens per second, relative to BF16", "start"))
    for i, (form, line) in enumerate(ratios.items()):
        color = COLORS[list(FORMATS).index(form)]
        points = [(x(batch), y(ratio)) for batch, ratio in line]
        marks += [
            f'<path d="M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}" stroke="{color}" stroke-width="2"/>'
            for (a, b), (c, d) in pairwise(points)
        ]
        place = top + 20 + 20 * i
        marks.append(f'<path d="M{width - right + 16} {place}h20" stroke="{color}" stroke-width="2"/>')
        marks.append(text((width - right + 42, place + 4), FORMATS[form], "start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
    return f'{head} font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(marks)}</svg>\n'


if __name__ == "__main__":
    main()
