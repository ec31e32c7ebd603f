"""`octavo generate`: one prompt, one completion."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from octavo.cli.flags.args import add_engine_settings, engine_config
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.flags.sampling import add_sampling_flags, sampling_fields
from octavo.cli.talk import StreamedAnswer, generate
from octavo.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.terminal import say

if TYPE_CHECKING:
    from octavo.text.frontend import Frontend

RAW_TOKENS = 256
"""Default token limit of a raw continuation: unlike a chat answer, it has no natural end."""
PROGRESS_S = 5.0
"""Seconds between two progress lines if the answer is printed only at its end."""


def run(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    return asyncio.run(complete(args, engine_config(parser, args), sampling_fields(args)))


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo generate",
        words="PROMPT",
        description="Print the model's answer to PROMPT (- reads it from standard input).",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="what to ask or continue")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        dest="as_chat",
        action="store_true",
        default=None,
        help="send PROMPT as a message, through the model's chat template (default if it has one)",
    )
    form.add_argument(
        "--raw",
        dest="as_chat",
        action="store_false",
        default=None,
        help=f"continue PROMPT as plain text, for {RAW_TOKENS} tokens unless --max-tokens says otherwise",
    )
    parser.add_argument("--system-prompt", metavar="TEXT", help="system prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the text, counts and times")
    parser.add_argument("--stats", action="store_true", help="print token counts and speed at the end")
    add_sampling_flags(parser)
    add_engine_settings(parser, without=frozenset({"seed"}), positional=False)
    return parser


async def complete(args: argparse.Namespace, config: EngineConfig, fields: dict[str, Any]) -> int:
    from octavo.cli.start import open_frontend

    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    async with open_frontend(config) as frontend:
        prompt, rendered = render(frontend, text, args)
        fields = fields if rendered else {"max_tokens": RAW_TOKENS} | fields
        answer = StreamedAnswer()
        said = time.monotonic()
        async for piece in generate(frontend, prompt, fields, answer, rendered=rendered):
            if not args.json:
                print(piece, end="", flush=True)
            elif time.monotonic() - said > PROGRESS_S:
                said = time.monotonic()
                say(f"{answer.output_tokens} tokens so far; the answer follows at its end")
    if args.json:
        print(json.dumps(described(prompt, answer), ensure_ascii=False))
    else:
        print()
    if args.stats:
        say(answer.stats())
    return 0


def render(frontend: Frontend, text: str, args: argparse.Namespace) -> tuple[str, bool]:
    """Return the prompt, and whether a chat template made it."""
    has_template = frontend.chat is not None
    if args.as_chat is False or (args.as_chat is None and not has_template):
        if args.system_prompt:
            raise ConfigError(
                "--system-prompt needs a chat: this is a raw prompt (--raw, or a model without a template)"
            )
        return text, False
    system = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    return frontend.render_chat([*system, {"role": "user", "content": text}]), True


def described(prompt: str, answer: StreamedAnswer) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.output_tokens,
        "cached_tokens": answer.cached_tokens,
        "ttft_s": round(answer.first - answer.started, 4) if answer.first else None,
        "seconds": round(answer.ended - answer.started, 4),
    }
