"""`octavo doctor`: what is wrong with this machine for Octavo, and the commands that fix it."""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from collections.abc import Iterator

from octavo.cli.doctor.check import Area, Finding, Result, Wish
from octavo.cli.flags.args import add_engine_settings, add_settings, engine_from, server_from, values
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.flags.table import SERVER_GROUPS
from octavo.version import __version__


def run(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    found = values(parser, args)
    wish = Wish(
        engine=engine_from(found),
        server=server_from(found),
        has_model="model.model" in found,
        has_address=not {"server.host", "server.port", "server.uds"}.isdisjoint(found),
        quick=args.quick,
        online=args.online,
    )
    findings = diagnosed(wish)
    if args.json:
        rows = [(area, name, finding) for area, name, finding in findings]
        print(json.dumps(as_dict(rows), indent=1))
        counts = Counter(finding.result for *_, finding in rows)
    else:
        counts = _print(findings)
    return 1 if counts[Result.BROKEN] else 0


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo doctor",
        words="[MODEL]",
        description="Check what Octavo needs of this machine, and say what to do about the rest; with MODEL, also "
        "whether that can be served here. Takes the flags of octavo serve, and checks them, too. Reads only, "
        "except for kernels that it compiles into the cache folder, and a model's configuration, downloaded from "
        "the Hugging Face Hub. The exit status is 1 if something is broken.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--quick", action="store_true", help="leave out what takes seconds: importing torch, compiling, computing"
    )
    parser.add_argument(
        "--online", action="store_true", help="also ask the model hub whether it answers and takes the access token"
    )
    about = (
        "the model to check, too: a name listed by `octavo pull --list`, a folder, a .gguf file or a Hugging Face id"
    )
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help=about)
    add_engine_settings(parser, positional=False)
    add_settings(parser, SERVER_GROUPS)
    return parser


def diagnosed(wish: Wish) -> Iterator[tuple[str, str, Finding]]:
    """Yield (area, check, finding) as they are found, cheap ones first."""
    for area in areas():
        for name, finding in area.run(wish):
            yield area.name, name, finding


def areas() -> list[Area[object]]:
    from octavo.cli.doctor import folders, gpus, hub, kernels, machine, model, packages, server, settings, torch_checks
    from octavo.features import parts

    own = (
        *(packages.AREA, settings.AREA, machine.AREA, folders.AREA, server.AREA, hub.AREA),
        *(gpus.AREA, kernels.AREA, torch_checks.AREA, model.AREA),
    )
    return [*own, *(module.AREA for _, module in parts("doctor"))]


def as_dict(rows: list[tuple[str, str, Finding]]) -> dict[str, object]:
    """Return the findings as the content of the JSON."""
    return {
        "octavo": __version__,
        "ok": all(finding.result is not Result.BROKEN for *_, finding in rows),
        "checks": [
            {"area": area, "name": name, "result": one.result, "text": one.text, "remedy": one.remedy}
            for area, name, one in rows
        ],
    }


def _print(findings: Iterator[tuple[str, str, Finding]]) -> Counter[Result]:
    """Print the findings as they come; return their number by result."""
    counts: Counter[Result] = Counter()
    print(f"Octavo {__version__}, Python {platform.python_version()} at {sys.executable}, {platform.platform()}")
    before = ""
    for area, name, finding in findings:
        if area != before:
            print(f"\n{area}")
            before = area
        mark = finding.result if finding.result is Result.FINE else finding.result.upper()
        print(f"  {mark:8} {name}: {finding.text}", flush=True)
        if finding.remedy:
            print(f"           -> {finding.remedy}", flush=True)
        counts[finding.result] += 1
    print(f"\n{counts[Result.BROKEN]} broken, {counts[Result.WARNING]} warnings, {counts[Result.FINE]} fine")
    return counts
