"""An `LLM` in this process from a command's flags, for benchmarks without a server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octavo.bench.floor import Ceilings
from octavo.cli.flags.args import values
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.progress import open_display
from octavo.core.info import ModelInfo

if TYPE_CHECKING:
    from octavo.core.params import SamplingParams
    from octavo.python_api.llm import LLM


def open_llm(parser: OctavoParser, args: argparse.Namespace) -> LLM:
    """Load the model that the flags name."""
    from octavo.python_api.llm import LLM

    settings: dict[str, Any] = {target.split(".")[1]: value for target, value in values(parser, args).items()}
    with open_display() as display:
        return LLM(**settings, progress=display.download)


def ceilings_of(info: ModelInfo) -> Ceilings:
    """Measure the peak rates of the machine that this engine runs on."""
    from octavo.device.ceilings import measure_ceilings

    return Ceilings(*measure_ceilings(info.accelerator, info.dtype))


def fixed_length(count: int) -> SamplingParams:
    """Greedy sampling of exactly `count` tokens without text, to measure the engine alone."""
    from octavo.core.params import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
