"""Resolution of a model name to files on this machine."""

from __future__ import annotations

import difflib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.core.errors import ModelFileError, ModelNotFoundError
from octavo.hub import gguf_config
from octavo.hub.catalogue import CATALOGUE
from octavo.hub.files import QUANTIZATION_FILES, ModelFiles
from octavo.hub.gguf_file import read_gguf
from octavo.hub.json_file import read_json, read_json_if_there
from octavo.hub.progress import Progress
from octavo.hub.pull import pull
from octavo.hub.repository import fetch_repository, looks_like_repository
from octavo.hub.safetensors_files import INDEX, SINGLE, check_safetensors, safetensors_files
from octavo.hub.text_config import quantization_config, text_config
from octavo.hub.token_numbers import end_token

_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")
_TOKENIZER_FILE = "tokenizer.json"
_MAIN = "main"
"""The revision that is taken if none is given; scripts give it for folders, too."""


def resolve(
    model: str,
    *,
    revision: str | None = None,
    tokenizer_only: bool = False,
    weights: bool = True,
    progress: Progress | None = None,
    download_dir: str | None = None,
) -> ModelFiles:
    """Find a model: a catalogue name (pulled if missing), a folder, a .gguf file, or a Hugging Face id.

    A catalogue name takes precedence over a folder of that name in the current directory; write ./NAME for the folder.

    Args:
        revision: branch, tag or commit of a Hugging Face repository.
        tokenizer_only: only the tokenizer's files are needed; config and weights may be missing.
        download_dir: folder for downloaded models, instead of the usual caches.
        weights: False if random weights are used: a folder with only config.json is enough.

    Raises:
        ModelNotFoundError: no model has that name; the text lists the places searched, and ways to get it. Or it has no
            revisions.
        ModelFileError: found, but corrupt, truncated or incomplete; the text names the file.
    """
    need_weights = weights and not tokenizer_only
    kept_in = None if download_dir is None else Path(os.path.expanduser(download_dir))
    if model in CATALOGUE:
        _refuse(revision, model, "it is in the catalogue")
        pulled = pull(model, cache_dir=kept_in, progress=progress)
        found = _from_disk(model, pulled, need_weights, tokenizer_only)
        return replace(found, generation_config={**CATALOGUE[model].sampling, **found.generation_config})
    path = Path(os.path.expanduser(model))
    if model and os.path.exists(path):
        _refuse(revision, model, f"it is {path.absolute()}")
        return _from_disk(model, path, need_weights, tokenizer_only)
    if _looks_like_path(model):
        raise ModelNotFoundError(
            f"There is no file or folder {model!r} (looked for {path.absolute()}). Give the path of a folder with "
            f"config.json and *.safetensors or one .gguf file, {_other_ways()}."
        )
    if not looks_like_repository(model):
        raise ModelNotFoundError(f"{_unknown(model)} It is not a Hugging Face id either; those look like 'owner/name'.")
    folder = fetch_repository(
        model,
        revision=revision,
        weights=need_weights,
        unknown=_unknown(model),
        progress=progress,
        download_dir=kept_in,
    )
    return _from_disk(model, folder, need_weights, tokenizer_only)


def eos_token_ids(files: ModelFiles) -> list[int]:
    """Return the end-of-sequence tokens: those of the generation config, those of the model's config, then the end mark
    that the tokenizer's files name. The latter is often the only one that fine-tuned models have right.

    Raises:
        ModelFileError: one of these files can't be read.
    """
    found: list[int] = []
    for config in (files.generation_config, files.config, text_config(files.config)):
        value = config.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and token not in found:
                found.append(token)
    named = end_token(files, search=not found) if files.path.is_dir() else None
    if named is not None and named not in found:
        found.append(named)
    return found


def _refuse(revision: str | None, model: str, why: str) -> None:
    if revision not in (None, _MAIN):
        raise ModelNotFoundError(
            f"{model!r} has no revision {revision!r}: {why}, and only Hugging Face ids have revisions. Leave it out."
        )


def _from_disk(name: str, path: Path, need_weights: bool, tokenizer_only: bool) -> ModelFiles:
    try:
        if path.is_dir():
            return _from_folder(name, path, need_weights, tokenizer_only)
    except PermissionError as exc:
        raise ModelFileError(f"{exc.filename or path} can't be read: {exc.strerror}.") from exc
    if path.suffix == ".gguf":
        return _from_gguf(name, path, tokenizer_only)
    if path.suffix == ".safetensors":
        check_safetensors(path)
        raise ModelFileError(f"{path} holds weights only. Give its folder, which must hold config.json too.")
    raise ModelFileError(f"{path} is not a model file; Octavo reads .gguf files, and folders with *.safetensors.")


def _from_gguf(name: str, path: Path, tokenizer_only: bool) -> ModelFiles:
    file = read_gguf(path)
    return ModelFiles(
        name=name,
        path=path,
        format="gguf",
        weights=(path,),
        config={} if tokenizer_only else gguf_config.model_config(file),
        generation_config=gguf_config.generation_config(file),
    )


def _from_folder(name: str, folder: Path, need_weights: bool, tokenizer_only: bool) -> ModelFiles:
    has_config = (folder / "config.json").is_file()
    tensors = safetensors_files(folder) if need_weights and has_config else ()
    ggufs = sorted(folder.glob("*.gguf"))
    own_tokenizer = tokenizer_only and (folder / _TOKENIZER_FILE).is_file()
    whole = bool(tensors) or own_tokenizer or (has_config and not need_weights)
    if ggufs and not whole:
        if len(ggufs) > 1:
            listed = ", ".join(path.name for path in ggufs)
            raise ModelFileError(
                f"{folder} holds {len(ggufs)} .gguf files: {listed}. Give the path of the one to serve."
            )
        return _from_gguf(name, ggufs[0], tokenizer_only)
    if not whole:
        raise _incomplete(folder, has_config, tokenizer_only)
    return ModelFiles(
        name=name,
        path=folder,
        format="safetensors",
        weights=tensors,
        config=_config(folder, required=not own_tokenizer),
        generation_config=read_json_if_there(folder / "generation_config.json"),
    )


def _config(folder: Path, *, required: bool) -> dict[str, Any]:
    path = folder / "config.json"
    config = read_json(path) if required else read_json_if_there(path)
    if quantization_config(config):
        return config
    for file, method in QUANTIZATION_FILES.items():
        older = read_json_if_there(folder / file)
        if older:
            return {**config, "quantization_config": {"quant_method": method, **(older.get("quantization") or older)}}
    return config


def _incomplete(folder: Path, has_config: bool, tokenizer_only: bool) -> ModelFileError:
    if tokenizer_only:
        return ModelFileError(f"{folder} holds no tokenizer: neither {_TOKENIZER_FILE} nor a .gguf file.")
    if not has_config:
        return ModelFileError(f"{folder} holds no model: neither config.json nor a .gguf file is there.")
    others = sorted(path.name for ending in ("*.bin", "*.pt", "*.pth") for path in folder.glob(ending))
    also = (
        f" It has {others[0]}, which Octavo does not read: a file of that kind is a pickle, which can run code when it "
        "is loaded. Convert it to safetensors with the tool that made it."
        if others
        else ""
    )
    return ModelFileError(
        f"{folder} has config.json but no weights: neither {INDEX} nor {SINGLE} nor another *.safetensors file.{also} "
        "For random weights, use --load-format dummy."
    )


def _looks_like_path(model: str) -> bool:
    return (
        model.startswith(("/", ".", "~"))
        or "\\" in model
        or model.count("/") > 1
        or model.endswith("/")
        or model.lower().endswith(_FILE_ENDINGS)
    )


def _unknown(model: str) -> str:
    close = difflib.get_close_matches(model.lower(), CATALOGUE, n=1, cutoff=0.6)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"No model {model!r} was found: it is neither in the catalogue ({', '.join(CATALOGUE)}) nor a file or folder "
        f"below {Path.cwd()}.{hint}"
    )


def _other_ways() -> str:
    return f"a name of the catalogue ({', '.join(CATALOGUE)}), or a Hugging Face id such as 'owner/name'"
