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


_EVERY = 20
"""Steps from one printed loss to the next."""
_CONTEXT = 512


def run(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    for name, least in (("epochs", 1), ("batch", 1), ("max-tokens", 4), ("context", 16), ("draft-vocab", 1)):
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
        "model answers the prompts of a file greedily, and the head learns from its hidden states. The drafts that the "
        "model would accept are counted before and after, on prompts that were held out.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, a catalogue name or a Hugging Face id")
    parser.add_argument(
        "--data", required=True, metavar="FILE", help="prompts, one a line: JSON with messages or prompt, or plain text"
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

    from octavo.features.speculation.eagle.corpus import collect, read_prompts, target_of
    from octavo.features.speculation.eagle.head import EagleHead, save_head
    from octavo.features.speculation.eagle.training import Recipe, acceptance, frequent_tokens, train
    from octavo.hub.resolve import resolve
    from octavo.models.save.places import new_place

    prompts = read_prompts(Path(args.data).expanduser())
    held = max(1, round(len(prompts) * args.held_out))
    if held == len(prompts):
        raise ConfigError(
            f"--held-out {args.held_out} leaves none of the {held} prompts to train on. Lower it, or give more prompts."
        )
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

        examples = collect(args.model, prompts, max_tokens=args.max_tokens, context=context, progress=shown, **settings)
    torch.manual_seed(args.seed)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    head, target, examples = EagleHead(target.shape).to(device), target.to(device), [one.to(device) for one in examples]
    tests, rest = examples[:held], examples[held:]
    say(f"{sum(one.num_answer for one in rest):,} tokens of {len(rest)} answers to train on, {held} answers held out")
    drawn = None if args.draft_vocab is None else frequent_tokens(rest, args.draft_vocab, target)
    say(f"before: {_shown(acceptance(head, target, tests, drawn=drawn))}")

    def note(step: int, steps: int, loss: float) -> None:
        if step % _EVERY == 0 or step == steps:
            say(f"step {step} of {steps}: loss {loss:.3f}")

    train(head, target, rest, Recipe(args.epochs, args.batch, args.learning_rate, args.seed), note)
    print(f"after: {_shown(acceptance(head, target, tests, drawn=drawn))}")
    with new_place(folder, folder=True):
        save_head(head, target.embeddings, folder, drawn=drawn)
    say(f"wrote {folder}")


def _context(given: int | None, longest: int) -> int:
    if given is not None and given > longest:
        raise ConfigError(f"--context {given}: the model has {longest} positions. Give at most that.")
    return min(_CONTEXT, longest) if given is None else given


def _shown(found: HeadAcceptance) -> str:
    return f"{found.first:.1%} of first drafts accepted; {found.length:.2f} of {found.chain} drafts in a row"
