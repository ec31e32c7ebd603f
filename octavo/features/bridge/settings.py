"""Which implementation computes the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.core.flag import setting
from octavo.features import FeatureSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSettings(FeatureSettings):
    """Which implementation computes the model.

    Attributes:
        model_impl: "octavo" for Octavo's own layers, "transformers" for the modules of that library, "auto" for these
            only where Octavo has none of its own.
        trust_remote_code: whether Python code in the model's folder may be run.
        compilation: whether torch.compile compiles the modules of transformers.
    """

    model_impl: Literal["auto", "octavo", "transformers"] = setting(
        "auto",
        "what computes the model: octavo's own layers, or the modules of transformers; auto takes these for "
        "architectures that Octavo lacks",
    )
    trust_remote_code: bool = setting(
        False, "run Python code that is in the model's folder, for architectures that transformers lacks too"
    )
    compilation: bool = setting(
        False, "compile the modules of transformers with torch.compile, which makes the start longer"
    )


SETTINGS = BridgeSettings
