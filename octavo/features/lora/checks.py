"""Read what an adapter's files say about it, and check it against the model before anything is loaded. No torch here.

`read_adapter` reads configuration and headers only. Formats: PEFT's folders (`adapter_config.json` and
`adapter_model.safetensors`), and llama.cpp's GGUF files.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from octavo.core.errors import ModelFileError
from octavo.features.lora.activation import invocation_of
from octavo.features.lora.adapter_file import A, AdapterFile, AdapterForm, B, stamp_of
from octavo.features.lora.layout import Target
from octavo.features.lora.matcher import Matcher
from octavo.features.lora.modules import Modules
from octavo.features.lora.peft_config import PeftConfig
from octavo.features.lora.peft_names import CONFIG, WEIGHTS
from octavo.hub.gguf_families import FAMILIES, is_paired
from octavo.hub.gguf_file import read_gguf
from octavo.hub.gguf_names import hf_name
from octavo.hub.json_file import parse_json, read_bytes
from octavo.hub.safetensors_files import StoredHeader, StoredTensor

_PICKLE = "adapter_model.bin"
_DTYPES = ("F32", "F16", "BF16")
_FORMS_KEPT = 8
"""Pairs of a configuration and a header; a header of many experts takes some megabytes."""


def read_adapter(path: Path, targets: Sequence[Target], max_rank: int, added_tokens: int = 0) -> AdapterFile:
    """Read and check one adapter; see `Checker`. Raises as `Checker.read`."""
    return Checker(targets, max_rank, added_tokens).read(path)


class Checker:
    """Reads and checks adapters of one model.

    Adapters that one program trained on one model are often alike: their configurations and headers are the same, byte
    for byte. What follows from these is kept, since a request waits for it.

    Args:
        targets: the layers of the model that adapters can change.
        max_rank: largest rank of a piece (--max-lora-rank).
        added_tokens: most tokens that it may add (--lora-extra-vocab-size).
    """

    def __init__(self, targets: Sequence[Target], max_rank: int, added_tokens: int = 0) -> None:
        self._targets, self._max_rank, self._added_tokens = targets, max_rank, added_tokens
        self._modules = Modules(targets)
        self._forms: dict[bytes, AdapterForm] = {}
        """Digest of both -> what follows; the last one used is the last."""

    def read(self, path: Path) -> AdapterFile:
        """Read and check an adapter: PEFT's folder, or a GGUF file.

        Raises:
            ModelFileError: it can't be used with this model; the text names the file, the field or tensor and the
                remedy.
        """
        if path.suffix == ".gguf":
            return _read_gguf(path, self._targets, self._max_rank, self._modules)
        if not path.is_dir():
            raise ModelFileError(f"{path} is not an adapter: give PEFT's folder ({CONFIG}, {WEIGHTS}) or a GGUF file.")
        if not (path / CONFIG).is_file():
            raise ModelFileError(f"{path} has no {CONFIG}; an adapter is a folder as PEFT saves it, or a GGUF file.")
        stamps = {str(path / CONFIG): stamp_of(path / CONFIG)}
        content = read_bytes(path / CONFIG)
        config = PeftConfig.of(parse_json(content, path / CONFIG), path / CONFIG)
        if not (path / WEIGHTS).is_file():
            raise ModelFileError(_missing(path))
        stamps[str(path / WEIGHTS)] = stamp_of(path / WEIGHTS)
        header = StoredHeader.of(path / WEIGHTS)
        key = hashlib.blake2b(b"%d %b%b" % (len(content), content, header.content)).digest()
        form = self._forms.pop(key, None)
        if form is None or not header.fits(form.header):
            form = self._form(path / WEIGHTS, config, header.tensors())
        self._forms[key] = form
        while len(self._forms) > _FORMS_KEPT:
            del self._forms[next(iter(self._forms))]
        return AdapterFile(path / WEIGHTS, form, stamps)

    def _form(self, path: Path, config: PeftConfig, header: Mapping[str, StoredTensor]) -> AdapterForm:
        shapes = {}
        for name, tensor in header.items():
            if tensor.dtype not in _DTYPES:
                raise ModelFileError(
                    f"{path}: tensor {name} is stored as {tensor.dtype}; adapters are read from "
                    f"{', '.join(_DTYPES)}. Save the adapter in one of those."
                )
            shapes[name] = tensor.shape
        matcher = Matcher(path, self._targets, self._modules, self._max_rank, config.base, self._added_tokens)
        manifest, tensors = matcher.checked(matcher.find(shapes, config), config, shapes)
        return AdapterForm(manifest, tensors, header=header)


def _read_gguf(path: Path, targets: Sequence[Target], max_rank: int, modules: Modules) -> AdapterFile:
    """Read an adapter as llama.cpp's convert_lora_to_gguf.py writes it."""
    stamps = {str(path): stamp_of(path)}
    file = read_gguf(path)
    kinds = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if kinds != ("adapter", "lora"):
        raise ModelFileError(
            f"{path} is no LoRA adapter: general.type is {kinds[0]!r} and adapter.type {kinds[1]!r}, in place of "
            "'adapter' and 'lora'. Convert the adapter with llama.cpp's convert_lora_to_gguf.py."
        )
    arch = str(file.metadata.get("general.architecture", ""))
    if arch not in FAMILIES:
        raise ModelFileError(
            f"{path}: general.architecture is {arch!r}, whose order of queries and keys Octavo does not know. Give the "
            "folder that the adapter was converted from."
        )
    alpha = file.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelFileError(
            f"{path}: adapter.lora.alpha is {alpha!r}; it must be a number. Convert the adapter again."
        )
    shapes: dict[str, tuple[int, ...]] = {}
    found: dict[str, dict[str, str]] = {}
    for name, tensor in file.tensors.items():
        base, _, role = name.rpartition(".")
        if role not in ("lora_a", "lora_b"):
            raise ModelFileError(f"{path}: tensor {name} is not part of a low-rank pair; convert the adapter again.")
        # llama.cpp looks tokens up in the rows of A, so it stores an embedding's A transposed.
        turned = role == "lora_a" and base == "token_embd.weight"
        shapes[name] = tensor.shape[::-1] if turned else tensor.shape
        found.setdefault(hf_name(base).removesuffix(".weight"), {})[A if role == "lora_a" else B] = name
    invocation = invocation_of(file.metadata, "adapter.alora.invocation_tokens", path)
    config = PeftConfig(path, alpha=float(alpha) or None, invocation=invocation)
    matcher = Matcher(path, targets, modules, max_rank, "")
    manifest, tensors = matcher.checked(matcher.placed(found, shapes, config), config, shapes)
    pairs = is_paired(arch)
    return AdapterFile(path, AdapterForm(manifest, tensors, pairs=pairs), stamps)


def _missing(path: Path) -> str:
    if (path / _PICKLE).is_file():
        return (
            f"{path} has its weights in {_PICKLE}, a pickle, which can run any code when it is read. Save the adapter "
            f"as {WEIGHTS} (PEFT: save_pretrained with safe_serialization=True)."
        )
    return f"{path} has no {WEIGHTS}. Download or save the adapter again."
