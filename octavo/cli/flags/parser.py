"""`OctavoParser`: argparse with both spellings of a dash, suggestions, and explanations for flags of other servers."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from octavo.config.foreign import FLAGS, SHORT, Needless
from octavo.core.keywords import near
from octavo.core.params import SamplingParams
from octavo.core.terminal import say

_ELSEWHERE = {
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--context-length": "--max-model-len",
    "-m": "--model",
    "--model-path": "--model",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "-ngl": "--device",
    "--n-gpu-layers": "--device",
    "--parallel": "--max-num-seqs",
}
"""Flags of other engines -> equivalent flags of Octavo."""


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(shutil.get_terminal_size().columns, 116))


class OctavoParser(argparse.ArgumentParser):
    """A command's parser.

    `--max_model_len` is read as `--max-model-len`. Flags in `foreign.FLAGS` that this command does not have itself are
    refused with the reason, or accepted with a notice. Any other unknown flag is refused with the closest matches.

    Args:
        words: the positional arguments as shown in the usage line.
    """

    def __init__(self, prog: str, *, words: str = "", **kwargs: Any) -> None:
        usage = " ".join(filter(None, [prog, words, "[options]"]))
        super().__init__(prog=prog, usage=usage, allow_abbrev=False, formatter_class=_Formatter, **kwargs)

    # argparse declares overloads by the namespace's type.
    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = [_dashes(word) for word in (sys.argv[1:] if args is None else args)]
        argv = self.screen(gather_dotted(words, self._option_string_actions.keys()))
        parsed, unknown = self.parse_known_args(argv, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"octavo: error: {message}\nTry: {self.prog} --help\n")

    def screen(self, argv: list[str]) -> list[str]:
        """Remove the flags of the table that are accepted but have no effect.

        Exit with status 2 at a flag whose feature does not exist.
        """
        kept: list[str] = []
        words = iter(range(len(argv)))
        for at in words:
            word = argv[at]
            if word == "--":
                return kept + argv[at:]
            name, negated, value = self._foreign(word)
            if name is None:
                kept.append(word)
                continue
            follows = (
                argv[at + 1] if value is None and at + 1 < len(argv) and not argv[at + 1].startswith("-") else None
            )
            entry = FLAGS[name]
            if entry.takes_value and value is None and follows is not None:
                next(words)
                value = follows
            self.judge(name, value, negated=negated)
        return kept

    def judge(self, name: str, value: str | None, *, negated: bool = False) -> None:
        """Accept a flag of the table, with a notice if it has one, or exit with the reason why it is not supported."""
        entry = FLAGS[name]
        if isinstance(entry, Needless):
            if negated and entry.no_reason:
                self.error(f"--no-{name}: {entry.no_reason}")
            if not negated:
                say(f"--{name} has no effect: {entry.notice}")
        elif not negated and (value is None or _canonical(value) not in map(_canonical, entry.neutral)):
            shown = f"--{name}" + (f" {value}" if value is not None else "")
            rest = (
                f"; leave it out (or give a neutral value: {', '.join(sorted(entry.neutral))})"
                if any(entry.neutral)
                else ""
            )
            self.error(f"{shown}: {entry.reason}{rest or '; leave it out'}")

    def flag_names(self) -> list[str]:
        return sorted(self._option_string_actions)

    def _foreign(self, word: str) -> tuple[str | None, bool, str | None]:
        """Return (name in the table, written as --no-name, value after =) if the flag is only in the table."""
        head, equals, tail = word.partition("=")
        value = tail if equals else None
        if head in self._option_string_actions:
            return None, False, None
        if head.split(".")[0] in SHORT:
            return SHORT[head.split(".")[0]], False, value
        if head[:2] == "-O" and head[2:].isdecimal():
            return SHORT["-O"], False, head[2:]
        if not head.startswith("--"):
            return None, False, None
        name = head[2:].split(".")[0]
        if name in FLAGS:
            return name, False, value
        if name.startswith("no-") and name[3:] in FLAGS:
            return name[3:], True, value
        return None, False, None

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}"
        flag, known = word.partition("=")[0], self.flag_names()
        other = _ELSEWHERE.get(flag)
        if other in known:
            return f"unknown flag {flag}; it is {other} here"
        name = flag.lstrip("-").replace("-", "_")
        if name in SamplingParams.__struct_fields__ and "--override-generation-config" in known:
            return f"unknown flag {flag}; requests set {name}, and --override-generation-config its default"
        return f"unknown flag {flag}{near(flag, known, most=3)}"


def gather_dotted(words: Sequence[str], known: Collection[str]) -> list[str]:
    """Merge `--name.key value` of known flags into one `--name {"key": value}`. Keys may be nested: `--name.a.b 1`.

    Values that are JSON are parsed; any other value is text.
    """
    kept: list[str] = []
    gathered: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        head, equals, value = word.partition("=")
        name, dot, path = head.partition(".")
        if word == "--":
            kept += [word, *rest]
        elif not (dot and path and name.startswith("--") and name in known):
            kept.append(word)
        else:
            given = value if equals else next(rest, "")
            put(gathered.setdefault(name, {}), path, _json_or_text(given))
    return [*(part for name, value in gathered.items() for part in (name, json.dumps(value))), *kept]


def put(into: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at path `a.b` in nested objects."""
    *above, last = path.split(".")
    for key in above:
        into = into.setdefault(key, {})
    into[last] = value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _canonical(text: str) -> str:
    """Return the canonical text of a JSON object."""
    value = _json_or_text(text)
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else text


def _dashes(word: str) -> str:
    """Replace underscores by dashes in the name; keys after a dot are unchanged."""
    if not word.startswith("--"):
        return word
    head, equals, tail = word.partition("=")
    name, dot, path = head.partition(".")
    return name.replace("_", "-") + dot + path + equals + tail
