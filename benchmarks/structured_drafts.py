"""What drafts gain for structured output: records copied into JSON under a schema, with and without prompt lookup.

    python benchmarks/structured_drafts.py [--model smollm2] [--output FILE]

Prints the processor's seconds of five answers, one after another, and how many drafts were accepted. Answers must be
equal.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from machine import describe

from octavo import LLM, SamplingParams
from octavo.core.structured import StructuredOutputsParams

PEOPLE = [
    {"name": name, "age": age, "city": city, "job": job}
    for name, age, city, job in (
        ("Anna Smith", 31, "Berlin", "engineer"),
        ("Bob Miller", 45, "Paris", "teacher"),
        ("Carla Gomez", 28, "Madrid", "doctor"),
        ("David Chen", 52, "Toronto", "lawyer"),
        ("Eva Novak", 39, "Prague", "chemist"),
        ("Farid Khan", 23, "Lahore", "student"),
    )
]
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {name: {"type": "integer" if name == "age" else "string"} for name in PEOPLE[0]},
        "required": list(PEOPLE[0]),
    },
    "minItems": 4,
    "maxItems": 6,
}
WAYS: dict[str, dict[str, Any]] = {
    "no drafts": {"method": "none"},
    "ngram, 4 drafts": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False},
    "auto": {"method": "auto"},
}


def prompts() -> list[str]:
    changes = [
        f"Copy these records as JSON, and change the city of the {which} one to Rome:\n{json.dumps(PEOPLE)}"
        for which in ("first", "second", "third", "last")
    ]
    text = "\n".join("{name} is {age} years old, lives in {city} and works as a {job}.".format(**p) for p in PEOPLE)
    return [*changes, f"List these people as JSON with name, age, city and job:\n{text}"]


def measure(model: str, config: dict[str, Any]) -> tuple[list[list[int]], dict[str, Any]]:
    params = SamplingParams(temperature=0, max_tokens=220, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    with LLM(model, kv_cache_memory_bytes=64 << 20, max_model_len=1024, speculative_config=config) as llm:
        chats: Any = [[{"role": "user", "content": prompt}] for prompt in prompts()]
        llm.chat(chats[0], params, use_tqdm=False)
        began = time.process_time()
        choices = [llm.chat(chat, params, use_tqdm=False)[0].outputs[0] for chat in chats]
        seconds = time.process_time() - began
    drafts = [choice.drafts for choice in choices if choice.drafts is not None]
    tokens = [list(choice.token_ids) for choice in choices]
    found = {
        "tokens": sum(map(len, tokens)),
        "processor_s": round(seconds, 2),
        "accepted": sum(one.accepted for one in drafts),
        "rejected": sum(one.rejected for one in drafts),
    }
    return tokens, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows, expected = {}, None
    for name, config in WAYS.items():
        tokens, rows[name] = measure(args.model, config)
        expected = expected or tokens
        rows[name]["equal"] = tokens == expected
        print(name, rows[name], flush=True)
    if args.output is not None:
        text = json.dumps(describe() | {"model": args.model, "ways": rows}, indent=2)
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
