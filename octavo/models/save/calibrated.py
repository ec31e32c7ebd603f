"""4-bit checkpoints calibrated on a text, by llm-compressor (https://github.com/vllm-project/llm-compressor, 0.14)."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.core.errors import ConfigError
from octavo.hub.files import ModelFiles
from octavo.models.load import open_checkpoint
from octavo.models.load.quantized.table import method_of
from octavo.models.save.folder import ROUTERS, check_ignored, group_size_of
from octavo.models.save.places import check_folder, check_source, new_place

_MODIFIERS = "llmcompressor.modifiers"
METHODS: Mapping[str, tuple[str, ...]] = {
    "gptq": (f"{_MODIFIERS}.gptq.GPTQModifier",),
    "awq": (f"{_MODIFIERS}.transform.awq.AWQModifier", f"{_MODIFIERS}.quantization.QuantizationModifier"),
}
"""`--scheme` -> the classes of its recipe. The last one quantizes; one before it scales the weights."""
_MOST_TOKENS = 2048
"""Of a sample; longer paragraphs are cut."""


def calibrate(
    files: ModelFiles,
    scheme: str,
    folder: Path,
    text: Path,
    *,
    group_size: int | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Quantize a model to 4 bits with the activations of a text, and write it in the format of compressed-tensors.

    Args:
        scheme: a name of `METHODS`.
        text: samples in UTF-8, separated by blank lines.
        group_size: inputs of a group; None for the largest of 128, 64 and 32 that divides all matrices.
        ignore: patterns of names of modules that are not quantized, in addition to the head and routers.

    Raises:
        ConfigError: llm-compressor is not installed or needs a GPU, the model is no folder of unquantized safetensors,
            the text has no samples, or the folder is not empty.
    """
    if files.format != "safetensors" or method_of(files.config) is not None:
        raise ConfigError(f"--scheme {scheme} needs a folder of unquantized safetensors; {files.path} is none.")
    check_source(files)
    check_folder(folder)
    samples = [part.strip() for part in _read(text).split("\n\n") if part.strip()]
    if not samples:
        raise ConfigError(f"--calibration {text} has no text. Give samples, separated by blank lines.")
    oneshot, dataset, *scaling, rounding = _tools(scheme)
    if scaling and not torch.accelerator.is_available():
        raise ConfigError(f"--scheme {scheme}: llm-compressor needs a GPU for it. --scheme gptq also runs on a CPU.")
    checkpoint = open_checkpoint(files)
    check_ignored(checkpoint.names(), ignore)
    size = group_size_of(checkpoint, group_size, ignore)
    weights = {"num_bits": 4, "type": "int", "symmetric": scheme == "gptq", "strategy": "group", "group_size": size}
    patterns = [f"re:{fnmatch.translate(pattern)}" for pattern in (*ROUTERS, *ignore)]
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    recipe = [*(one() for one in scaling), rounding(config_groups=groups, ignore=["lm_head", *patterns])]
    with new_place(folder, folder=True):
        oneshot(
            model=str(files.path),
            dataset=dataset({"text": samples}),
            recipe=recipe,
            num_calibration_samples=len(samples),
            max_seq_length=_MOST_TOKENS,
            output_dir=str(folder),
        )


def _tools(scheme: str) -> list[Any]:
    """Return llm-compressor's function that applies a recipe, the maker of its data, and the method's classes."""
    names = ("llmcompressor.oneshot", "datasets.Dataset", *METHODS[scheme])
    places = [name.rpartition(".") for name in names]
    try:
        oneshot, dataset, *classes = [getattr(importlib.import_module(module), name) for module, _, name in places]
        return [oneshot, dataset.from_dict, *classes]
    except ImportError as error:
        raise ConfigError(
            f"--scheme {scheme} calibrates with llm-compressor, which is not installed ({error}): pip install "
            "llmcompressor. --scheme w4a16 rounds to 4 bits without a package and without a text."
        ) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibration {path} can't be read: {error}. Give a file of text in UTF-8.") from error
