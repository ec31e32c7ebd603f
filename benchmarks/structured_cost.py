"""What structured output costs, and whether it keeps its word, on the default model.

    python benchmarks/structured_cost.py            # both parts, some minutes
    python benchmarks/structured_cost.py --shape benchmarks/models/llama-3.1-8b --device cuda --batch 64 --parts cost

Parts and their bars:
    cost     requests at once under a JSON schema: at most 10 % less output tokens/s than the same ones without, on a
             GPU 5 %
    validity 200 varied JSON schemas and 50 regular expressions at temperature 1: every output valid, or ended by length

In the part `cost` the runs are interleaved and medians compared; both sides generate the same number of tokens. With
--shape the weights are random, and the tokenizer is made from the sources of Python's library, with as many tokens as
the model has: what a mask costs depends on their number and on what they spell. --folder keeps it for the next time.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from octavo import LLM, SamplingParams, StructuredOutputsParams

PROMPT = "Describe the inhabitants of a small town by the sea as data.\n"
LONG = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "likes": {"type": "string"}},
        "required": ["name", "age", "likes"],
        "additionalProperties": False,
    },
    "minItems": 50,
}


HERE = Path(__file__).parent


def cost(llm: LLM, runs: int, batch: int, bar: float) -> dict[str, Any]:
    """Prints and returns both rates and the loss; `passed` if that is within the bar."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    host: dict[str, dict[bool, list[float]]] = {
        name: {False: [], True: []} for name in ("plan", "launch", "retire", "idle")
    }
    for run in range(2 * runs + 2):
        guided = bool(run % 2)
        form = StructuredOutputsParams(json=LONG) if guided else None
        params = [
            SamplingParams(max_tokens=96, temperature=1, seed=seed, ignore_eos=True, structured_outputs=form)
            for seed in range(batch)
        ]
        before = copy.copy(llm.stats())
        began = time.perf_counter()
        outputs = llm.generate([PROMPT] * batch, params)
        seconds = time.perf_counter() - began
        after = llm.stats()
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert tokens == batch * 96
        if run >= 2:
            rates[guided].append(tokens / seconds)
            steps = after.num_steps - before.num_steps
            for name in host:
                spent = getattr(after, f"{name}_s") - getattr(before, f"{name}_s")
                host[name][guided].append(spent / steps * 1e3)
    free, guided_rate = statistics.median(rates[False]), statistics.median(rates[True])
    loss = 1 - guided_rate / free
    print(f"all runs, tokens/s: free {_rounded(rates[False])}, under a schema {_rounded(rates[True])}")
    for name, spent in host.items():
        print(f"{name}, ms a step: free {_median(spent[False])}, under a schema {_median(spent[True])}")
    print(f"cost: {free:.0f} tokens/s free, {guided_rate:.0f} under a schema: {loss:.1%} less (bar {bar:.0%})")
    return {
        "batch": batch,
        "tokens_per_s": {"free": _rounded(rates[False]), "under a schema": _rounded(rates[True])},
        "medians": {"free": round(free), "under a schema": round(guided_rate)},
        "less": round(loss, 4),
        "bar": bar,
        "host_ms_per_step": {
            name: {"free": _median(spent[False]), "under a schema": _median(spent[True])}
            for name, spent in host.items()
        },
        "passed": loss <= bar,
    }


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def _rounded(rates: list[float]) -> list[int]:
    return [round(rate) for rate in rates]


def folder_of_shape(shape: Path, into: Path) -> Path:
    """A model's folder with this one's config, and a tokenizer of as many tokens, unless it is one already."""
    if (into / "tokenizer.json").exists():
        return into
    into.mkdir(parents=True, exist_ok=True)
    shutil.copy(shape / "config.json", into)
    config = json.loads((shape / "config.json").read_text())
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    trainer = BpeTrainer(
        vocab_size=config["eos_token_id"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((path.read_text("utf-8", "ignore") for path in files), trainer)
    print(f"the tokenizer learned {tokenizer.get_vocab_size()} tokens of {config['vocab_size']}")
    tokenizer.add_special_tokens([f"<|{i}|>" for i in range(tokenizer.get_vocab_size(), config["vocab_size"])])
    tokenizer.save(str(into / "tokenizer.json"))
    return into


def validity(llm: LLM, schemas: int, regexes: int) -> dict[str, Any]:
    """Prints and returns how many outputs were valid, cut by length, or wrong; `passed` if none was wrong."""
    draw = random.Random(7)
    made = [_schema(draw, 3) for _ in range(schemas)]
    patterns = [_regex(draw) for _ in range(regexes)]
    forms = [StructuredOutputsParams(json=s) for s in made] + [StructuredOutputsParams(regex=p) for p in patterns]
    params = [
        SamplingParams(max_tokens=160, temperature=1, seed=number, structured_outputs=form)
        for number, form in enumerate(forms)
    ]
    counts = {"valid": 0, "length": 0, "wrong": 0}
    checks: list[Any] = [*made, *patterns]
    for output, check in zip(llm.generate([PROMPT] * len(forms), params), checks, strict=True):
        choice = output.outputs[0]
        if choice.finish_reason == "length":
            counts["length"] += 1
            continue
        good = choice.finish_reason == "stop" and _fits(choice.text, check)
        counts["valid" if good else "wrong"] += 1
        if not good:
            print(f"wrong: {check!r} gave {choice.finish_reason} {choice.stop_reason} {choice.text!r}")
    print(f"validity: {counts} of {len(forms)}")
    return {"outputs": counts, "passed": not counts["wrong"]}


def _fits(text: str, check: Any) -> bool:
    import jsonschema  # what only measures cost does without

    if isinstance(check, str):
        return re.fullmatch(check, text) is not None
    try:
        checker = jsonschema.FormatChecker(["date", "ipv4", "uuid", "email"])
        jsonschema.Draft202012Validator(check, format_checker=checker).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _schema(draw: random.Random, depth: int) -> dict[str, Any]:
    leaves = [
        {"type": "integer", "minimum": draw.randrange(-50, 50), "maximum": draw.randrange(50, 500)},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "minLength": draw.randrange(4), "maxLength": draw.randrange(4, 24)},
        {"type": "string", "pattern": _regex(draw, anchored=True)},
        {"type": "string", "format": draw.choice(["date", "ipv4", "uuid", "email"])},
        {"enum": draw.sample(["red", "green", "blue", 1, 2.5, None, True, "ü"], 3)},
        {"const": draw.choice(["x", 7, [1, 2]])},
        {"type": ["string", "null"], "maxLength": 10},
    ]
    if not depth or draw.random() < 0.3:
        return draw.choice(leaves)
    kind = draw.random()
    if kind < 0.5:
        names = draw.sample(["name", "id", "tags", "when", "size", "next", "ok"], draw.randrange(1, 4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: _schema(draw, depth - 1) for name in names},
            "required": [name for name in names if draw.random() < 0.7],
        }
        return schema | ({"additionalProperties": False} if draw.random() < 0.7 else {})
    if kind < 0.75:
        low = draw.randrange(3)
        return {"type": "array", "items": _schema(draw, depth - 1), "minItems": low, "maxItems": low + 2}
    if kind < 0.9:
        return {"anyOf": [_schema(draw, depth - 1), _schema(draw, depth - 1)]}
    inner = _schema(draw, depth - 1)
    pair = {"a": {"$ref": "#/$defs/part"}, "b": {"$ref": "#/$defs/part"}}
    if depth < 3 or "$defs" in json.dumps(inner):
        return inner
    return {"$defs": {"part": inner}, "type": "object", "properties": pair, "required": ["a"]}


def _regex(draw: random.Random, *, anchored: bool = False) -> str:
    parts = ["[a-z]{2,5}", "[0-9]{1,3}", "(yes|no|maybe)", "-", "x?", "[A-F0-9]{4}", " ", "(ab)+c", "[^,;]{1,6},"]
    pattern = "".join(draw.choice(parts) for _ in range(draw.randrange(1, 6)))
    return f"^{pattern}$" if anchored else pattern


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("cost", "validity"), default=["cost", "validity"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--shape", type=Path, help="folder with a config.json, for random weights of that shape")
    parser.add_argument("--folder", type=Path, help="where the model of --shape is kept")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "structured_cost.json")
    args = parser.parse_args()
    result = describe()
    print(result)
    settings: dict[str, Any] = {"threads": args.threads, "device": args.device, "max_model_len": 1024}
    settings["spec_method"] = "none"
    with tempfile.TemporaryDirectory() as scratch:
        model = "smollm2"
        if args.shape:
            model = str(folder_of_shape(args.shape, args.folder or Path(scratch)))
            settings["load_format"] = "dummy"
        if args.device != "cuda":
            settings["kv_cache_memory_bytes"] = 1 << 30
        with LLM(model, **settings) as llm:
            if "cost" in args.parts:
                result["cost"] = cost(llm, args.runs, args.batch, 0.05 if args.device == "cuda" else 0.10)
            if "validity" in args.parts:
                result["validity"] = validity(llm, 200, 50)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(result[part]["passed"] for part in args.parts) else 1


if __name__ == "__main__":
    sys.exit(main())
