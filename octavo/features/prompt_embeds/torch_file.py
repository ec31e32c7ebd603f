"""Read a tensor from a `torch.save` file, without torch and without executing anything in the file.

The format is an uncompressed zip archive: `NAME/data.pkl` pickles the object and refers to storages in the files
`NAME/data/KEY`. Only the pickle operations of a plain tensor are supported, and the only callable is torch's function
that rebuilds a tensor, which is implemented here.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.features.prompt_embeds.span import FLOAT_BYTES, FloatType

_STORAGES: dict[str, FloatType] = {"FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"}
_REBUILDS = {"_rebuild_tensor_v2", "_rebuild_parameter"}
_MAX_PICKLE = 1 << 16
_MAX_DIMENSIONS = 8


class NotATensorError(ValueError):
    """The file holds no plain tensor of floats; the text completes a sentence that begins with the field's name."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """`data` holds the elements in row-major order, little-endian."""

    dtype: FloatType
    shape: tuple[int, ...]
    data: bytes


def read_tensor(file: bytes) -> SavedTensor:
    """Return the tensor that `torch.save(tensor, file)` wrote.

    Raises:
        NotATensorError: not such a file, or not a dense tensor of float32, float16 or bfloat16.
    """
    try:
        return _read(file)
    except NotATensorError:
        raise
    except Exception as exc:  # corrupt bytes raise many types, here and in zipfile
        raise NotATensorError(f"is no file of torch.save ({exc})") from exc


def _read(file: bytes) -> SavedTensor:
    archive = zipfile.ZipFile(io.BytesIO(file))
    entries = {info.filename: info for info in archive.infolist()}
    name = next((name for name in entries if name.endswith("/data.pkl")), None)
    if name is None:
        raise NotATensorError("is no file of torch.save (it has no data.pkl)")
    folder = name.removesuffix("data.pkl")

    def part(name: str) -> bytes:
        info = entries[folder + name]
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(file):
            raise NotATensorError(f"is no file of torch.save (its {name} is compressed)")
        return archive.read(info)

    if folder + "byteorder" in entries and part("byteorder") != b"little":
        raise NotATensorError("was saved on a machine with another byte order")
    found = _unpickle(part("data.pkl"))
    if not isinstance(found, _View):
        raise NotATensorError(f"holds {_kind(found)}, and no tensor; save the tensor itself")
    return found.read(part(f"data/{found.storage.key}"))


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: FloatType
    key: str


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor: a strided view of a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self, data: bytes) -> SavedTensor:
        elements = np.frombuffer(data, dtype=f"<u{FLOAT_BYTES[self.storage.dtype]}")[self.offset :]
        reach = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        count = math.prod(self.shape)
        if count > len(elements) or (count and reach >= len(elements)):
            raise NotATensorError("has more elements than its file; save a copy of it (`.clone()`)")
        strides = [stride * elements.itemsize for stride in self.strides]
        values = np.lib.stride_tricks.as_strided(elements, self.shape, strides, writeable=False)
        return SavedTensor(self.storage.dtype, self.shape, values.tobytes())


@dataclass(frozen=True, slots=True)
class _Name:
    """A name that the pickle would import."""

    module: str
    name: str


class _Mark:
    """Beginning of a tuple on the stack."""


def _unpickle(pickle: bytes) -> Any:
    """Return the pickled object. A stack machine of only the operations that torch.save uses."""
    if len(pickle) > _MAX_PICKLE:
        raise NotATensorError("holds more than a tensor; save the tensor itself")
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    given: Any
    for operation, given, _ in pickletools.genops(pickle):
        name = operation.name
        if name == "STOP":
            return stack.pop()
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            stack.append(given)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[given] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[given])
        elif name == "MARK":
            stack.append(_Mark)
        elif name == "GLOBAL":
            stack.append(_Name(*given.split(" ", 1)))
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[len(stack) - count :] = [tuple(stack[len(stack) - count :])]
        elif name == "TUPLE":
            begin = len(stack) - 1 - stack[::-1].index(_Mark)
            stack[begin:] = [tuple(stack[begin + 1 :])]
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(_call(stack.pop(), arguments))
        elif name != "PROTO":
            raise NotATensorError(f"holds something else than a plain tensor (pickle's {name}); save the tensor itself")
    raise NotATensorError("is cut off")


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _storage(identity: Any) -> _Storage:
    _, kind, key, _, count = identity
    if not isinstance(kind, _Name) or kind.name not in _STORAGES:
        raise NotATensorError(f"is a tensor of {_kind(kind)}; convert it to float32, float16 or bfloat16")
    if not isinstance(key, str) or type(count) is not int:
        raise NotATensorError("is no file of torch.save: a storage without a name")
    return _Storage(_STORAGES[kind.name], key)


def _call(what: Any, arguments: Any) -> Any:
    """Return the result of a pickled call: a tensor, or the empty dictionary of its hooks."""
    if what == _Name("collections", "OrderedDict") and arguments == ():
        return {}
    if not isinstance(what, _Name) or what.module != "torch._utils" or what.name not in _REBUILDS:
        raise NotATensorError(f"holds {_kind(what)}, and not a dense tensor; save the tensor itself (`.to_dense()`)")
    if what.name == "_rebuild_parameter":
        return arguments[0]
    storage, offset, shape, strides = arguments[:4]
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or any(type(n) is not int or not 0 <= n < 1 << 48 for n in numbers):
        raise NotATensorError("has no shape that a tensor can have")
    if len(shape) != len(strides) or len(shape) > _MAX_DIMENSIONS:
        raise NotATensorError(f"has {len(shape)} dimensions")
    return _View(storage, offset, tuple(shape), tuple(strides))


def _kind(value: Any) -> str:
    return f"{value.module}.{value.name}" if isinstance(value, _Name) else type(value).__name__
