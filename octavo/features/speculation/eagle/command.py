"""`octavo spec-train`: train a head that drafts for a model, on a user's own prompts."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.flags.parser import OctavoParser
from octavo.cli.progress import open_display
from octavo.core.errors import ConfigError
from octavo.core.terminal import say

if TYPE_CHECKING:
    from octavo.features.speculation.eagle.training import HeadAcceptance


_LINES = 40
"""Most printed losses."""
_CONTEXT = 512
_LEAST = {"write-prompts": 2, "epochs": 1, "batch": 1, "max-tokens": 4, "context": 16, "draft-vocab": 1}


def run(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    if args.data is None and args.write_prompts is None:
        raise ConfigError("There is nothing to train on: give --data FILE, --write-prompts N, or both.")
    for name, least in _LEAST.items():
        value = getattr(args, name.replace("-", "_"))
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}: give at least {least}.")
    if not 0 < args.held_out < 1:
        raise ConfigError(f"--held-out {args.held_out}: give a share between 0 and 1, such as 0.1.")
    if not 0 < args.learning_rate < math.inf:
        raise ConfigError(f"--learning-rate {args.learning_rate}: give a positive number, such as 0.001.")
    from octavo.models.save.places import check_folder

    folder = Path(args.output).expanduser()
    check_folder(folder)
    work(args, folder)
    return 0


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo spec-train",
        words="MODEL",
        description="Train a head that predicts a model's next hidden states, from which its tokens are drafted. The "
        "model answers prompts of a file, or of its own, greedily, and the head learns from its hidden states. The "
        "drafts that the model would accept are counted before and after, on prompts that were held out.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, a catalogue name or a Hugging Face id")
    parser.add_argument(
        "--data", metavar="FILE", help="prompts, one a line: JSON with messages or prompt, or plain text"
    )
    parser.add_argument(
        "--write-prompts",
        type=int,
        metavar="N",
        help="have the model write N prompts itself, by continuing its chat template where a user's text begins",
    )
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="a new folder for the head")
    parser.add_argument("--epochs", type=int, default=6, metavar="N", help="times that each answer is seen (6)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="answers of a training step (8)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, metavar="RATE", help="highest rate (0.001)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="most tokens of an answer (128)")
    parser.add_argument(
        "--context", type=int, metavar="N", help="most tokens with the prompt (512, or as many as the model takes)"
    )
    parser.add_argument(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="have the head draw only the N tokens that the answers have most often, which takes less time (all)",
    )
    parser.add_argument("--held-out", type=float, default=0.1, metavar="SHARE", help="of the prompts, to test on (0.1)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="of the model and the training (the first GPU, or cpu)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order and the noise (0)")
    return parser


def work(args: argparse.Namespace, folder: Path) -> None:
    import torch

    from octavo.features.speculation.eagle.corpus import collect, target_of
    from octavo.features.speculation.eagle.head import EagleHead, save_head
    from octavo.features.speculation.eagle.prompts import read_prompts
    from octavo.features.speculation.eagle.training import Recipe, acceptance, frequent_tokens, train
    from octavo.hub.resolve import resolve
    from octavo.models.save.places import new_place

    prompts = [] if args.data is None else read_prompts(Path(args.data).expanduser())
    _held_out(args.held_out, len(prompts) + (args.write_prompts or 0))
    settings = {} if args.device is None else {"device": args.device}
    with open_display() as display:
        target = target_of(resolve(args.model, progress=display.download))
        context = _context(args.context, target.shape.max_position_embeddings)
        if args.draft_vocab is not None and args.draft_vocab > target.shape.vocab_size:
            raise ConfigError(
                f"--draft-vocab {args.draft_vocab}: the model has {target.shape.vocab_size} tokens. Give fewer, or "
                "leave it out."
            )

        def shown(phase: str, done: int, total: int) -> None:
            if done == total or done % 128 == 0:
                say(f"{phase}: {done} of {total}")

        examples = collect(
            args.model,
            prompts,
            written=args.write_prompts or 0,
            max_tokens=args.max_tokens,
            context=context,
            seed=args.seed,
            progress=shown,
            **settings,
        )
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")  # TF32 where a GPU has it
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    head, target = EagleHead(target.shape).to(device), target.to(device)
    held = _held_out(args.held_out, len(examples))
    tests, rest = examples[:held], examples[held:]
    say(f"{sum(one.num_answer for one in rest):,} tokens of {len(rest)} answers to train on, {held} answers held out")
    drawn = None if args.draft_vocab is None else frequent_tokens(rest, args.draft_vocab, target)
    say(f"before: {_shown(acceptance(head, target, tests, drawn=drawn))}")

    def note(step: int, steps: int, loss: float) -> None:
        if step % math.ceil(steps / _LINES) == 0 or step == steps:
            say(f"step {step} of {steps}: loss {loss:.3f}")

    recipe = Recipe(epochs=args.epochs, batch=args.batch, rate=args.learning_rate, seed=args.seed)
    train(head, target, rest, recipe, note, drawn=drawn)
    print(f"after: {_shown(acceptance(head, target, tests, drawn=drawn))}")
    with new_place(folder, folder=True):
        save_head(head, target.embeddings, folder, drawn=drawn)
    say(f"wrote {folder}")


def _held_out(share: float, count: int) -> int:
    """Return how many of the prompts are held out."""
    held = max(1, round(count * share))
    if held >= count:
        raise ConfigError(
            f"--held-out {share} leaves none of the {held} prompts to train on. Lower it, or give more prompts."
        )
    return held


def _context(given: int | None, longest: int) -> int:
    if given is not None and given > longest:
        raise ConfigError(f"--context {given}: the model has {longest} positions. Give at most that.")
    return min(_CONTEXT, longest) if given is None else given


def _shown(found: HeadAcceptance) -> str:
    return f"{found.first:.1%} of first drafts accepted; {found.length:.2f} of {found.chain} drafts in a row"
