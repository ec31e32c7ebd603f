"""Fill in the middle: a prompt with a suffix, for models that were trained to write the text between the two.

Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle" (https://arxiv.org/abs/2207.14255).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.text.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Infill:
    """One family's marks: a prompt is `before PREFIX between SUFFIX after`, which the model continues with the
    middle."""

    before: str
    between: str
    after: str

    def write(self, prefix: str, suffix: str) -> str:
        """Return the prompt, with its marks as text."""
        return f"{self.before}{prefix}{self.between}{suffix}{self.after}"


_FAMILIES = (
    Infill("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    Infill("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    Infill("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Infill("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    Infill("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001  (DeepSeek-Coder)
)


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """Return the family whose three marks are tokens of this vocabulary; None without one."""
    known = tokenizer.backend.token_to_id
    return next(
        (one for one in _FAMILIES if all(known(mark) is not None for mark in (one.before, one.between, one.after))),
        None,
    )
