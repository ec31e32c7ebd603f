"""`octavo replay-steps`: compute a record of `--record-steps` again, and report the first difference in tokens."""

from __future__ import annotations

from pathlib import Path

from octavo.cli.flags.parser import OctavoParser
from octavo.core.terminal import say


def run(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    from octavo.replay import replay

    report = replay(Path(args.file), model=args.model, announce=say)
    if report.difference is None:
        print(f"{report.steps} steps, {report.tokens} tokens: all as recorded")
        return 0
    one = report.difference
    print(f"{report.steps - 1} steps, {report.tokens} tokens as recorded, then a difference:")
    print(f"  step {one.step}, row {one.row}, request {one.request}")
    print(f"  recorded: {one.recorded}")
    print(f"  computed: {one.found}")
    return 1


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo replay-steps",
        words="FILE",
        description="Compute the steps in FILE, which an engine with --record-steps wrote, again on a fresh worker, "
        "and compare the tokens. Exit status 1 means that they differ.",
    )
    parser.add_argument("file", metavar="FILE", help="a record of steps")
    about = "the model's path or name, if it differs from the recorded one"
    parser.add_argument("--model", metavar="MODEL", help=about)
    return parser
