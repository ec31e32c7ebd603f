"""`octavo quantize`: round a model's weights, and write a checkpoint that other engines read, too."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.flags import units
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.progress import open_display
from octavo.core.errors import ConfigError
from octavo.core.terminal import say

if TYPE_CHECKING:
    from octavo.hub.files import ModelFiles


def run(argv: list[str]) -> int:
    from octavo.models.save.calibrated import METHODS
    from octavo.models.save.gguf import STORAGES
    from octavo.models.save.rounding import ROUNDINGS

    about = {name: one.about for name, one in ROUNDINGS.items()} | {name: one.about for name, one in STORAGES.items()}
    about |= dict.fromkeys(METHODS, "4-bit integers in groups, calibrated on a text by llm-compressor")
    args = make_parser(about).parse_args(argv)
    if (args.scheme in METHODS) != (args.calibration is not None):
        raise ConfigError(_wrong_calibration(args, list(METHODS)))
    if args.dtype is not None and args.scheme not in ROUNDINGS:
        raise ConfigError(f"--dtype {args.dtype} has no effect on {args.scheme}. Leave it out.")
    _check_text(args)
    if args.scheme in METHODS:
        write_calibrated(args)
    elif args.scheme in STORAGES:
        write_file(args)
    else:
        write(args)
    if not args.no_eval:
        evaluate(args)
    return 0


def make_parser(schemes: dict[str, str]) -> OctavoParser:
    parser = OctavoParser(
        "octavo quantize",
        words="MODEL",
        description="Round the weights of a model's linear layers to the nearest values of a scheme, and write the "
        "model to a folder in the format of compressed-tensors (embeddings, the head and routers of experts are kept), "
        "or to a GGUF file. Then compare it with the original on a text, as octavo eval does.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, a catalogue name or a Hugging Face id")
    about = "; ".join(f"{name}: {what}" for name, what in schemes.items())
    parser.add_argument("--scheme", required=True, choices=sorted(schemes), help=about)
    parser.add_argument("-o", "--output", required=True, metavar="PATH", help="a new folder; a new file for gguf-*")
    parser.add_argument("--group-size", type=int, metavar="INPUTS", help="inputs of a group (128, or what divides all)")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="PATTERN", help="modules to keep, such as '*.down_proj'"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16"),
        help="of what is not quantized (bfloat16); not for gguf-*, gptq, awq",
    )
    parser.add_argument("--calibration", metavar="FILE", help="text for gptq and awq, samples separated by blank lines")
    parser.add_argument("--no-eval", action="store_true", help="do not compare it with the original")
    parser.add_argument("--text", metavar="FILE", help="text to compare on (default: that of octavo eval)")
    return parser


def _check_text(args: argparse.Namespace) -> None:
    """Raise ConfigError for a text that can't be read, before the model is written."""
    from octavo.cli.eval import read_text

    if args.text is not None and args.no_eval:
        raise ConfigError(f"--text {args.text} is for the comparison, which --no-eval leaves out. Give one of them.")
    if args.text is not None:
        read_text(args.text)


def _note_rounded(files: ModelFiles) -> None:
    """Say so if the source's own matrices are quantized: their rounding errors remain."""
    from octavo.models.save.places import rounded_types

    types = rounded_types(files)
    if types:
        say(
            f"{files.name} was quantized before ({', '.join(types)}): its own rounding errors remain, and a comparison "
            "with it does not show them"
        )


def write(args: argparse.Namespace) -> None:
    import torch

    from octavo.hub.resolve import resolve
    from octavo.models.save.folder import quantize
    from octavo.models.save.rounding import ROUNDINGS

    if args.group_size is not None and (args.group_size < 8 or args.group_size % 8):
        raise ConfigError(f"--group-size {args.group_size}: give a multiple of 8, such as 128.")
    dtype = args.dtype or "bfloat16"
    with open_display() as display:
        files = resolve(args.model, progress=display.download)
        written = quantize(
            files,
            ROUNDINGS[args.scheme],
            Path(args.output).expanduser(),
            dtype=getattr(torch, dtype),
            group_size=args.group_size,
            ignore=args.ignore,
            progress=display.download,
        )
    groups = f" in groups of {written.group_size}" if written.group_size else ""
    say(
        f"{args.output}: {written.matrices} matrices in {args.scheme}{groups}; {units.show_bytes(written.after)}, "
        f"{units.show_bytes(written.before)} in {dtype}"
    )
    _note_rounded(files)
    if files.format == "gguf":
        say(f"the tokenizer stays in {files.name}: serve {args.output} with --tokenizer {args.model}")


def _wrong_calibration(args: argparse.Namespace, methods: list[str]) -> str:
    if args.calibration is None:
        return f"--scheme {args.scheme} needs --calibration FILE. --scheme w4a16 rounds to 4 bits without one."
    return (
        f"--calibration {args.calibration}: {args.scheme} rounds without data. Leave it out, or take --scheme "
        f"{' or '.join(methods)}."
    )


def write_calibrated(args: argparse.Namespace) -> None:
    from octavo.hub.resolve import resolve
    from octavo.models.save.calibrated import calibrate

    with open_display() as display:
        files = resolve(args.model, progress=display.download)
    folder, text = Path(args.output).expanduser(), Path(args.calibration).expanduser()
    calibrate(files, args.scheme, folder, text, group_size=args.group_size, ignore=args.ignore)
    say(f"{folder}: {args.scheme}, calibrated on {text}")


def write_file(args: argparse.Namespace) -> None:
    """Write a GGUF file.

    Raises:
        ConfigError: a flag is only for other schemes, or the model can't be written in this scheme.
    """
    from octavo.hub.resolve import resolve
    from octavo.models.save.gguf import STORAGES, write_gguf
    from octavo.models.save.places import check_source
    from octavo.text.tokenizers.gguf_keys import tokenizer_keys

    path = Path(args.output).expanduser()
    if path.suffix != ".gguf":
        raise ConfigError(f"--output {args.output}: {args.scheme} writes one file. Name it with the end .gguf.")
    if args.group_size is not None or args.ignore:
        raise ConfigError(f"--group-size and --ignore have no effect on {args.scheme}. Leave them out.")
    with open_display() as display:
        files = resolve(args.model, progress=display.download)
        check_source(files)
        keys = {} if files.format == "gguf" else tokenizer_keys(files.path, files.config.get("vocab_size", 0))
        written = write_gguf(files, STORAGES[args.scheme], path, tokenizer=keys, progress=display.download)
    say(
        f"{path}: {written.matrices} matrices in {args.scheme}; {units.show_bytes(written.after)}, "
        f"{units.show_bytes(written.before)} in 16 bits"
    )
    _note_rounded(files)


def evaluate(args: argparse.Namespace) -> None:
    from octavo.cli.eval import run as run_eval

    text = ["--text", args.text] if args.text else []
    tokenizer = ["--tokenizer", args.model]
    run_eval([args.output, "--reference", args.model, *tokenizer, *text])
