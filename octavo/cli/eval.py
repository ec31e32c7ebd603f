"""`octavo eval`: perplexity of a text, divergence from another model, and questions with given answers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.flags.args import add_engine_settings, values
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.progress import open_display
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.python_api.evaluate import Reading
    from octavo.python_api.llm import LLM


def run(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    settings = {target.split(".")[1]: value for target, value in values(parser, args).items()}
    figures = judge(args, settings)
    print(
        json.dumps(figures) if args.json else "\n".join(f"{name}: {_shown(value)}" for name, value in figures.items())
    )
    return 0


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo eval",
        words="[MODEL]",
        description="Print how well a model predicts a text: its perplexity, and with --reference how far its "
        "distributions are from another model's. With --choices, how many questions it answers correctly.",
    )
    parser.add_argument("--reference", metavar="MODEL", help="compare with this model, of the same tokenizer")
    parser.add_argument("--text", metavar="FILE", help="text in UTF-8 (default: some 1,100 words of plain English)")
    parser.add_argument("--choices", metavar="FILE", help="questions, one a line: JSON with prompt, choices, answer")
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS", help="tokens read at a time (1024)")
    parser.add_argument("--limit", type=int, metavar="TOKENS", help="most tokens of the text (all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_settings(parser, without=frozenset({"max-logprobs"}))
    return parser


def judge(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Load the models one after the other; return the figures."""
    from octavo.python_api.evaluate import accuracy, bundled_text, questions_in, read

    for name in ("context", "limit"):
        value = getattr(args, name)
        if value is not None and value < 2:
            raise ConfigError(f"--{name} {value}: at least 2 tokens are needed, since the first is not predicted.")
    text = bundled_text() if args.text is None else read_text(args.text)
    questions = None if args.choices is None else questions_in(Path(args.choices))
    figures: dict[str, Any] = {}

    def reading(llm: LLM) -> Reading:
        if "generate" not in llm.info.tasks:
            raise ConfigError(f"{llm.info.name} makes embeddings; octavo eval judges models that generate text.")
        return read(llm, text, args.context, args.limit)

    reference = None
    if args.reference is not None:
        with _open({**settings, "model": args.reference}) as llm:
            reference = reading(llm)
    with _open(settings) as llm:
        figures |= {"model": llm.info.name, "weights": llm.info.weights}
        own = reading(llm)
        if questions is not None:
            figures |= {"questions": len(questions), "accuracy": round(accuracy(llm, questions), 4)}
    figures |= {"tokens": len(own.tokens), "perplexity": round(own.perplexity, 4)}
    if reference is not None:
        figures |= {
            "reference perplexity": round(reference.perplexity, 4),
            "divergence, nats per token": round(own.divergence(reference), 6),
            "same likeliest token": round(own.agreement(reference), 4),
        }
    return figures


def _open(settings: dict[str, Any]) -> LLM:
    from octavo.python_api.evaluate import TOP
    from octavo.python_api.llm import LLM

    with open_display() as display:
        return LLM(**settings, max_logprobs=TOP, progress=display.download)


def read_text(name: str) -> str:
    """Return a file's text. Raises ConfigError if it can't be read."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {name} can't be read as UTF-8: {error}. Give a text file.") from error


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
