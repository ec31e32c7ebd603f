"""The model in the forms that the engines read, all made from one GGUF file and kept in the benchmark's cache.

bfloat16 holds what the original's integers stand for; 8 and 4 bits are rounded from that, as the gguf package rounds.
The token embedding, which is the output layer too, stays at 8 bits in the 4-bit forms: llama.cpp does it so as well.

Run as a program (`models.py SOURCE TARGET FORMAT`), it writes one form, with the numpy and gguf of whoever runs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMATS = ("bf16", "q8_0", "q4_1", "q4_0")
WRITTEN_FOR = {"bf16": ("bf16", "f16")}
"""Format -> the forms of file it takes: OpenVINO reads no bfloat16 from GGUF, but computes float16 weights in it."""

_FILE_TYPES = {"bf16": 32, "f16": 1, "q8_0": 7, "q4_1": 3, "q4_0": 2}  # llama.cpp's LLAMA_FTYPE_MOSTLY_*
_COPIED_BY_WRITER = ("GGUF.", "general.architecture", "general.file_type")
_EMBEDDING = "token_embd.weight"


def find_default(python: str) -> Path:
    """The GGUF file that Octavo serves when no model is named; fetched if it isn't there. `python` has Octavo."""
    code = "from octavo.hub.resolve import resolve; print(resolve('smollm2').path)"
    done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])


def gguf_files(source: Path, cache: Path, formats: list[str], python: str) -> dict[str, Path]:
    """Every format's file; that of the source's own format is the source itself."""
    cache.mkdir(parents=True, exist_ok=True)
    found = {}
    for form in [form for kind in formats for form in WRITTEN_FOR.get(kind, (kind,))]:
        if f".{form}." in source.name.lower():
            found[form] = source
            continue
        target = cache / f"{source.stem}.to.{form}.gguf"
        if not target.exists():
            part = target.with_suffix(".part")
            subprocess.run([python, __file__, str(source), str(part), form], check=True)
            part.rename(target)
        found[form] = target
    return found


def safetensors_folder(source: Path, cache: Path, python: str) -> Path:
    """A folder as Hugging Face's, in bfloat16, read from the GGUF file by Octavo's own loader. `python` has Octavo."""
    target = cache / f"{source.stem}.safetensors-bf16"
    if not (target / "config.json").exists():
        subprocess.run([python, __file__, str(source), str(target), "folder"], check=True)
    return target


def tensor_bytes(path: Path) -> int:
    """How large the weights in a GGUF file are: what is left of it, all but the vocabulary in words."""
    from gguf import GGUFReader

    return sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)


def convert(source: Path, target: Path, kind: str) -> None:
    """Write `source` with its matrices in another format and everything else as it is."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith(_COPIED_BY_WRITER):
            continue
        value_type = field.types[0]
        item_type = field.types[-1] if value_type == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), value_type, item_type)
    writer.add_file_type(_FILE_TYPES[kind])
    for tensor in reader.tensors:
        data, form = tensor.data, tensor.tensor_type
        if len(tensor.shape) > 1 and not (kind.startswith("q4") and tensor.name == _EMBEDDING):
            form = GGMLQuantizationType[kind.upper()]
            data = quants.quantize(quants.dequantize(tensor.data, tensor.tensor_type), form)
        writer.add_tensor(tensor.name, data, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def to_folder(source: Path, target: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from octavo.hub.gguf_file import read_gguf
    from octavo.hub.gguf_names import hf_name
    from octavo.hub.resolve import resolve
    from octavo.models.load.gguf import GGUFCheckpoint
    from octavo.nn.weights import TensorSpec
    from octavo.text.tokenizers.gguf import build_backend, special_token

    target.mkdir(parents=True, exist_ok=True)
    checkpoint = GGUFCheckpoint(source)
    tensors = {}
    for name in checkpoint.names():
        spec = TensorSpec(checkpoint.shape(name) or (), torch.bfloat16)
        tensors[hf_name(name)] = checkpoint.tensor(name, spec).to(spec.dtype).contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    file = read_gguf(source)
    build_backend(file).save(str(target / "tokenizer.json"))
    named = {f"{short}_token": special_token(file, short) for short in ("bos", "eos")}
    _write(target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
    _write(target / "config.json", resolve(str(source)).config)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    source, target, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    to_folder(source, target) if kind == "folder" else convert(source, target, kind)
