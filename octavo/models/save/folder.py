"""Write a folder with a quantized checkpoint, from any checkpoint that Octavo reads."""

from __future__ import annotations

import fnmatch
import json
import math
import shutil
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.hub.files import QUANTIZATION_FILES, ModelFiles
from octavo.models.load import open_checkpoint
from octavo.models.load.arranged import arranged
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.registry import is_own, spec_of
from octavo.models.save.places import check_folder, check_source, new_place
from octavo.models.save.rounding import Rounding
from octavo.models.save.tensors import save_tensors
from octavo.models.spec import StoredNames
from octavo.nn.weights import TensorSpec

OnProgress = Callable[[str, int, int], None]
"""Called with a phase, and the bytes done and in total."""

ROUTERS = ("*.gate", "*router*", "*shared_expert_gate")
"""Modules that choose experts."""
_KEPT = ("*embed*", "*wte", "*wpe", "*lm_head", "output", "*output_layer", "*norm", *ROUTERS)
"""Modules that are no linear layers, or lose most: embeddings, the head, norms with a weight per head, routers."""
_GROUPS = (128, 64, 32)
_SHARD_BYTES = 5 << 30
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_NOT_COPIED = ("config.json", "*.index.json", *QUANTIZATION_FILES)


@dataclass(frozen=True, slots=True)
class Written:
    """What was written.

    Attributes:
        matrices: number of quantized matrices.
        before, after: bytes of all weights, in the dtype of the model and as written.
        group_size: inputs of a group; 0 if the scheme has none.
    """

    matrices: int
    before: int
    after: int
    group_size: int


def quantize(
    files: ModelFiles,
    scheme: Rounding,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    group_size: int | None = None,
    ignore: Sequence[str] = (),
    progress: OnProgress = lambda phase, done, total: None,
) -> Written:
    """Round a model's matrices and write them, one at a time, with its configuration and tokenizer to a new folder.

    Args:
        dtype: of scales and of all that is not quantized.
        group_size: inputs of a group; None for the largest of 128, 64 and 32 that divides all matrices.
        ignore: patterns of names of modules that are not quantized, in addition to embeddings, heads and routers.

    Raises:
        ConfigError: the model is quantized already or has no linear layers, the groups or a pattern don't fit it, or
            the folder can't be written.
        ModelFileError: the checkpoint can't be read.
    """
    check_source(files)
    check_folder(folder)
    _check_layout(files)
    checkpoint = _named_as_published(files)
    shapes = {name: checkpoint.shape(name) or () for name in sorted(checkpoint.names())}
    matrices = _matrices(shapes, ignore)
    if not matrices:
        raise ConfigError(f"{files.name} has no matrices of linear layers, or --ignore names all of them.")
    check_ignored(shapes, ignore)
    if group_size is not None and not scheme.grouped:
        raise ConfigError(
            f"--group-size {group_size}: this scheme has a scale for each output, no groups. Leave it out."
        )
    size = _group_size(matrices, group_size) if scheme.grouped else 0
    with new_place(folder, folder=True):
        written = _write(checkpoint, shapes, matrices, scheme, size, dtype, _Files(folder), progress)
        kept = sorted(name.removesuffix(".weight") for name, shape in shapes.items() if _is_kept(name, shape, matrices))
        stated = {"dtype": str(dtype).removeprefix("torch."), "quantization_config": scheme.settings(size, kept)}
        config = {**{name: value for name, value in files.config.items() if name != "torch_dtype"}, **stated}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if files.format == "gguf" and files.generation_config:
            answers = json.dumps(files.generation_config, indent=2) + "\n"
            (folder / "generation_config.json").write_text(answers, encoding="utf-8")
        _copy_small_files(files.path, folder)
    return Written(len(matrices), sum(map(math.prod, shapes.values())) * dtype.itemsize, written, size)


def _write(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    matrices: Container[str],
    scheme: Rounding,
    size: int,
    dtype: torch.dtype,
    written: _Files,
    progress: OnProgress,
) -> int:
    """Round and write the tensors of these shapes; return their bytes."""
    total, done = sum(map(math.prod, shapes.values())) * dtype.itemsize, 0
    for name, shape in shapes.items():
        if name in matrices:
            matrix = checkpoint.tensor(name, TensorSpec(shape, torch.float32)).float()
            for suffix, part in scheme.stored(matrix, size, dtype).items():
                written.add(name.removesuffix("weight") + suffix, part)
        else:
            tensor = checkpoint.tensor(name, TensorSpec(shape, dtype))
            written.add(name, tensor.to(dtype) if tensor.is_floating_point() else tensor)
        done += math.prod(shape) * dtype.itemsize
        progress("quantize", done, total)
    written.close()
    return written.total


def _named_as_published(files: ModelFiles) -> Checkpoint:
    """Open a checkpoint with Hugging Face's names, also if it is a GGUF file.

    Raises:
        ConfigError: a GGUF file's family has other names or arrangements there than in Octavo's decoder.
    """
    checkpoint = open_checkpoint(files)
    if files.format != "gguf":
        return checkpoint
    spec = spec_of(files.config)
    if spec.stored != StoredNames():
        raise ConfigError(
            f"{files.name} is a GGUF file of {files.config['architectures'][0]}, whose tensors are arranged otherwise "
            "in safetensors. Give the folder with the model's original safetensors."
        )
    return arranged(checkpoint, spec)


def _check_layout(files: ModelFiles) -> None:
    """Raise ConfigError for matrices that are stored transposed: other engines would not find them quantized."""
    if is_own(files.config) and any(module.transposed for module in spec_of(files.config).stored.modules):
        raise ConfigError(
            f"{files.name} stores its matrices transposed (Conv1D), which compressed-tensors lacks. Serve it as it is."
        )


def group_size_of(checkpoint: Checkpoint, stated: int | None, ignore: Sequence[str]) -> int:
    """Return the inputs of a group that divides the matrices of all linear layers.

    Raises:
        ConfigError: the stated size, or each of the usual ones, does not.
    """
    return _group_size(_matrices({name: checkpoint.shape(name) or () for name in checkpoint.names()}, ignore), stated)


def check_ignored(names: Iterable[str], ignore: Sequence[str]) -> None:
    """Raise ConfigError for a pattern that matches no module."""
    modules = {name.removesuffix(".weight") for name in names}
    for pattern in ignore:
        if not fnmatch.filter(modules, pattern):
            raise ConfigError(
                f"--ignore {pattern}: the model has no module of this name. One of its modules is {min(modules)}."
            )


def _matrices(shapes: Mapping[str, tuple[int, ...]], ignore: Sequence[str]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if _is_linear(name, shape, ignore)}


def _is_linear(name: str, shape: tuple[int, ...], ignore: Sequence[str]) -> bool:
    module = name.removesuffix(".weight")
    patterns = (*_KEPT, *ignore)
    return len(shape) == 2 and module != name and not any(fnmatch.fnmatch(module, one) for one in patterns)


def _is_kept(name: str, shape: tuple[int, ...], matrices: dict[str, tuple[int, ...]]) -> bool:
    """Return whether a matrix may belong to a linear layer that is not quantized, for the configuration's list."""
    return len(shape) == 2 and name not in matrices and name.endswith(".weight") and "embed" not in name


def _group_size(matrices: dict[str, tuple[int, ...]], stated: int | None) -> int:
    for size in _GROUPS if stated is None else (stated,):
        if all(inputs % size == 0 for _, inputs in matrices.values()):
            return size
    name, (_, inputs) = next((name, shape) for name, shape in matrices.items() if shape[1] % (stated or _GROUPS[-1]))
    raise ConfigError(
        f"{name} has {inputs} inputs, which groups of {stated or _GROUPS[-1]} don't divide. Set --group-size to a "
        f"divisor, or leave the module out: --ignore '{name.removesuffix('.weight')}'."
    )


class _Files:
    """Safetensors files of at most 5 GiB, named as `transformers` does once their number is known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self._size = self.total = 0
        self._parts: list[Path] = []
        self._places: dict[str, int] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, now or with the next ones."""
        if self._held and self._size + tensor.nbytes > _SHARD_BYTES:
            self._flush()
        self._held[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._places[name] = len(self._parts)
        self._size += tensor.nbytes
        self.total += tensor.nbytes

    def close(self) -> None:
        """Write the rest, and an index if there are several files."""
        self._flush()
        count = len(self._parts)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        for part, name in zip(self._parts, names, strict=True):
            part.rename(self._folder / name)
        if count > 1:
            places = {name: names[place] for name, place in self._places.items()}
            index = {"metadata": {"total_size": self.total}, "weight_map": places}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _flush(self) -> None:
        part = self._folder / f"part-{len(self._parts)}.safetensors"
        self._parts.append(part)
        save_tensors(self._held, part)
        self._held, self._size = {}, 0


def _copy_small_files(source: Path, folder: Path) -> None:
    if not source.is_dir():
        return  # a GGUF file has no others
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if not any(fnmatch.fnmatch(path.name, one) for one in _NOT_COPIED):
                shutil.copyfile(path, folder / path.name)
