"""Names in checkpoints of models with images or sound, which have a text model inside."""

from __future__ import annotations

_HALVES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.", ""),
    ("thinker.model.", "model."),
    ("thinker.lm_head.", "lm_head."),
)
"""Where they have their text model -> where a text model's checkpoint has it."""
_TEXT = ("lm_head.", "model.embed_tokens.", "model.layers.", "model.norm.")


def in_text_half(name: str) -> str | None:
    """Return a tensor's or module's name in the text model's own checkpoint; None if it is not the text model's."""
    for outer, inner in _HALVES:
        if name.startswith(outer):
            return inner + name.removeprefix(outer)
    return name if name.startswith(_TEXT) else None
