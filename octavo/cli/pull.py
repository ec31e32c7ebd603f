"""`octavo pull`: download a model in advance, or list the models with a short name."""

from __future__ import annotations

from octavo.cli.flags import units
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.progress import open_display
from octavo.config import DEFAULT_MODEL


def run(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    if args.list:
        print_catalogue()
        return 0
    from octavo.hub.resolve import resolve

    with open_display() as display:
        found = resolve(args.name, revision=args.revision, download_dir=args.download_dir, progress=display.download)
    print(found.path)
    return 0


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo pull",
        words="[NAME]",
        description="Download a model and print its path. A catalogue model is stored in Octavo's cache folder "
        "($OCTAVO_CACHE), one of the Hugging Face Hub into Hugging Face's ($HF_HOME). A model that is already there "
        "is checked, not downloaded again.",
    )
    about = f"a name listed by --list, or a Hugging Face id, OWNER/NAME (default: {DEFAULT_MODEL})"
    parser.add_argument("name", nargs="?", default=DEFAULT_MODEL, metavar="NAME", help=about)
    parser.add_argument("--revision", help="branch, tag or commit of a Hugging Face id (default: main)")
    parser.add_argument("--download-dir", metavar="FOLDER", help="folder to download into, instead of those caches")
    parser.add_argument("--list", action="store_true", help="list the models known by name and exit")
    return parser


def print_catalogue() -> None:
    from rich.console import Console
    from rich.table import Table

    from octavo.hub.catalogue import CATALOGUE
    from octavo.hub.pull import pulled

    table = Table("name", "size", "licence", "here", "model", box=None, pad_edge=False)
    for name, entry in CATALOGUE.items():
        here = "yes" if pulled(entry) else "no"
        size = units.show_bytes(entry.num_bytes)
        table.add_row(name, size, entry.licence, here, f"{entry.title}. {entry.description}")
    Console().print(table)
