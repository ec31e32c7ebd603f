"""The `octavo` command: selects the subcommand and imports only its module."""

from __future__ import annotations

import errno
import importlib
import sys
from typing import Protocol, cast

from octavo.core.terminal import drop_unwritten, open_closed, say
from octavo.version import __version__

COMMANDS = {
    "serve": "serve a model over HTTP, the way OpenAI's clients expect",
    "chat": "chat with a model in the terminal",
    "generate": "complete one prompt and print the answer",
    "run-batch": "answer a file of requests and exit",
    "bench": "measure throughput, latency, or a running server",
    "simulate": "say what recorded requests would experience with other settings, without the model",
    "tune": "search the settings that serve recorded requests within given limits",
    "replay-steps": "compute a recorded run again and compare its tokens",
    "quantize": "round a model's weights and write it as a smaller checkpoint",
    "eval": "measure how well a model predicts a text, or answers questions",
    "plan": "say which GPUs a model fits, and how fast it can be, before it is loaded",
    "doctor": "check this machine, and say what to do about what is wrong",
    "pull": "download a model, or list those known by name",
}

WITH_ENGINE = {"serve", "generate", "run-batch", "replay-steps", "eval", "quantize"}
"""Commands that always start an engine, in this process or in another with the same limits."""

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def commands() -> dict[str, str]:
    """Return all commands, those of features too, with a line about each."""
    from octavo.features import parts

    return COMMANDS | {module.NAME: module.ABOUT for _, module in parts("cli")}


USAGE = """usage: octavo COMMAND [options]

Octavo serves large language models.

{commands}

  octavo COMMAND --help   the options of a command
  octavo --version        the version
"""


class Subcommand(Protocol):
    """The interface of a subcommand's module."""

    def run(self, argv: list[str]) -> int: ...


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return its exit status: 0 done, 1 failed, 2 misused, 128 + N ended by signal N."""
    words = sys.argv[1:] if argv is None else argv
    open_closed()
    try:
        status = _main(words)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output has closed (`octavo ... | head`)
        drop_unwritten(sys.stdout)
        return 1
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        drop_unwritten(sys.stdout)
        say(f"error: {error.filename or 'the output'} can't be written: {error.strerror}. Make room there.")
        return 1


def _main(words: list[str]) -> int:
    if len(words) > 1 and words[0] == "help":
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE.format(commands="\n".join(f"  {name:14}{about}" for name, about in commands().items())), end="")
        return 0 if words else 2
    if words[0] in ("-V", "--version", "version"):
        print(f"octavo {__version__}")
        return 0
    if words[0] not in COMMANDS and words[0] not in commands():
        say(f"error: {_unknown(words[0])}")
        return 2
    return _run(words[0], words[1:])


def _unknown(word: str) -> str:
    from octavo.core.keywords import near

    known = commands()
    what = "option" if word.startswith("-") else "command"
    return f"unknown {what} {word!r}{near(word, known, most=3) or '; the commands are ' + ', '.join(known)}"


def _module(name: str) -> Subcommand:
    if name in COMMANDS:
        return cast(Subcommand, importlib.import_module(f"octavo.cli.{name.replace('-', '_')}"))
    from octavo.features import parts

    return cast(Subcommand, next(module for _, module in parts("cli") if name == module.NAME))


def _run(name: str, argv: list[str]) -> int:
    from octavo.core.errors import OctavoError
    from octavo.core.memory import check_address_space, memory_errors

    try:
        with memory_errors():
            if name in WITH_ENGINE:
                check_address_space()  # first, since the command's libraries may abort instead of raising
            return _module(name).run(argv)
    except OctavoError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
