"""`octavo chat`: a conversation in the terminal, with a running server or an engine of its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from typing import Any

import httpx

from octavo.cli.flags.args import add_engine_settings, engine_config
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.flags.sampling import add_sampling_flags, sampling_fields
from octavo.cli.talk import ChatMessages, LocalSpeaker, RemoteSpeaker, Speaker, StreamedAnswer
from octavo.core.errors import OctavoError
from octavo.core.terminal import say

DEFAULT_URL = "http://127.0.0.1:8000"
HELP = """\
/clear   forget the conversation
/exit    leave (so does Ctrl-D)
/help    this text
Ctrl-C   stop the answer; at the prompt, leave"""


def run(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    with asyncio.Runner() as runner:
        speaker = runner.run(find_speaker(parser, args))
        try:
            return Conversation(runner, speaker, args).run()
        finally:
            runner.run(speaker.close())


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo chat",
        words="[MODEL]",
        description="Talk to a model. Without MODEL and --url, the server on this machine is used if one answers at "
        f"{DEFAULT_URL}; otherwise the model runs in this command itself.",
    )
    talk = parser.add_argument_group("conversation")
    talk.add_argument("--url", help=f"server to talk to (default: {DEFAULT_URL} if one is there)")
    talk.add_argument(
        "--model-name",
        dest="listed",
        metavar="NAME",
        help="model to request from the server (default: the first that it lists)",
    )
    talk.add_argument("--api-key", metavar="KEY", help="key for the server (default: $OCTAVO_API_KEY)")
    talk.add_argument("--system-prompt", metavar="TEXT", help="system prompt")
    talk.add_argument("-q", "--quick", metavar="TEXT", help="ask this, print the answer, and exit")
    talk.add_argument("--stats", action="store_true", help="print token counts and speed after each answer")
    add_sampling_flags(parser)
    add_engine_settings(parser, without=frozenset({"seed", "-q"}))
    return parser


async def find_speaker(parser: OctavoParser, args: argparse.Namespace) -> Speaker:
    fields = sampling_fields(args)
    # Settings of an engine, whose targets have a dot. Variables don't count: they may be there for the server.
    wants_own_engine = bool(args.model_name or args.config or any("." in name for name in vars(args)))
    url = args.url or (None if wants_own_engine else await local_server())
    if url:
        api_key = args.api_key or os.environ.get("OCTAVO_API_KEY") or os.environ.get("VLLM_API_KEY")
        client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10))
        try:
            return await RemoteSpeaker.connect(url, fields, model=args.listed, api_key=api_key, client=client)
        except BaseException:
            await client.aclose()
            raise
    return await own_engine(parser, args, fields)


async def local_server() -> str | None:
    """Return the default address if a server responds there, else None."""
    with contextlib.suppress(httpx.HTTPError):
        async with httpx.AsyncClient(timeout=1) as client:
            if (await client.get(f"{DEFAULT_URL}/health")).is_success:
                return DEFAULT_URL
    return None


async def own_engine(parser: OctavoParser, args: argparse.Namespace, fields: dict[str, Any]) -> Speaker:
    from octavo.cli.start import open_frontend

    async with contextlib.AsyncExitStack() as stack:
        frontend = await stack.enter_async_context(open_frontend(engine_config(parser, args)))
        return LocalSpeaker(frontend, fields, stack.pop_all())


class Conversation:
    """Conversation history and the question loop."""

    def __init__(self, runner: asyncio.Runner, speaker: Speaker, args: argparse.Namespace) -> None:
        self._runner, self._speaker = runner, speaker
        self._system: str | None = args.system_prompt
        self._quick: str | None = args.quick
        self._show_stats: bool = args.stats
        self._messages: ChatMessages = []
        self.clear()

    def run(self) -> int:
        if self._quick is not None:
            return 0 if self.ask(self._quick) else 1
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing and history)
        say(f"talking to {self._speaker.name}; /help for help")
        while True:
            try:
                line = input("\n> " if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return 0
            if line == "/exit":
                return 0
            if line == "/clear":
                self.clear()
            elif line.startswith("/"):
                print(HELP)
            elif line:
                self.ask(line)

    def clear(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, question: str) -> bool:
        """Ask a question and stream the answer to the terminal. Return False, and drop the question, if it failed."""
        self._messages.append({"role": "user", "content": question})
        answer = StreamedAnswer()
        try:
            self._runner.run(self._print(answer))
        except KeyboardInterrupt:
            print(" [stopped]", flush=True)
        except OctavoError as error:
            self._messages.pop()
            print(flush=True)
            say(f"error: {error}")
            return False
        self._messages.append({"role": "assistant", "content": answer.text})
        if self._show_stats:
            say(answer.stats())
        return True

    async def _print(self, answer: StreamedAnswer) -> None:
        async with contextlib.aclosing(self._speaker.answer(self._messages, answer)) as pieces:
            async for piece in pieces:
                print(piece, end="", flush=True)
        print(flush=True)
