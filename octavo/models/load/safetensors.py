"""Weights from safetensors files, one or several (https://github.com/huggingface/safetensors, "Format")."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Protocol, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.core.errors import ModelFileError
from octavo.nn.weights import Index, QuantizedBlocks, TensorSpec


class _Slice(Protocol):
    """One tensor of an open file, which is read in parts."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Index) -> Tensor: ...


class _File(Protocol):
    """The part of `safe_open` that is used here; the package's own stub has no types."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> _Slice: ...

    def get_tensor(self, name: str) -> Tensor: ...


class SafetensorsCheckpoint:
    """The union of the files' tensors; names and shapes are read from the headers, data is mapped on demand.

    Raises:
        ModelFileError: a file is missing, truncated or not a safetensors file, or two files hold the same tensor.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files: dict[str, tuple[Path, _File]] = {}
        self.origin = str(files[0]) if len(files) == 1 else str(files[0].parent)
        for path in files:
            handle = _open(path)
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in self._files:
                    raise ModelFileError(f"Tensor {name} is in both {self._files[name][0]} and {path}.")
                self._files[name] = (path, handle)

    def names(self) -> Set[str]:
        return self._files.keys()

    def has(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._files[name][1].get_slice(name).get_shape())

    def blocks(
        self, name: str, entry: int | None = None, *, codes: bool = False, index: Index | None = None
    ) -> QuantizedBlocks | None:
        return None

    def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> Tensor:
        path, handle = self._files[name]
        try:
            return handle.get_tensor(name) if index is None else handle.get_slice(name)[index]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelFileError(f"Tensor {name} can't be read from {path}: {error}") from error


def _open(path: Path) -> _File:
    if path.suffix == ".gguf":
        raise ModelFileError(f"{path} is a GGUF file, not safetensors; use --load-format gguf, or leave it out.")
    try:
        return cast("_File", safe_open(path, framework="pt", device="cpu"))
    except FileNotFoundError as error:
        raise ModelFileError(f"Weight file {path} doesn't exist; get the model's files again.") from error
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise ModelFileError(
            f"Weight file {path} is corrupt or incomplete ({error}; it has {size} bytes); get it again."
        ) from error
