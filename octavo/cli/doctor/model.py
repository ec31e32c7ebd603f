"""The named model: whether it is found, whole, understood, and fits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.cli.doctor.check import Area, Check, Finding, Wish, broken, fine, warning
from octavo.cli.flags.units import show_bytes
from octavo.core.errors import OctavoError
from octavo.core.gpus import Gpu, known_as
from octavo.core.nvml import GpuState, Nvml, NvmlError, chosen
from octavo.device.early import is_cpu
from octavo.device.host import available_memory, free_swap
from octavo.hub.files import ModelFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is known of the model. A problem is "" if there is none, and None if it was not looked for.

    Attributes:
        found: where it is.
        absent: the command that downloads it, if it has a name but is not here.
        problem: why it can't be found, or its files are damaged.
        weight_bytes: of its files; 0 if only its configuration is here.
        text_problem: why its tokenizer or chat template can't be used.
        chats: it has a chat template.
        config_problem: why it can't be built from its configuration.
        architecture: its name.
        memory: host memory that can be used, with swap space; for a model on a CPU.
        gpu: kind of the GPU that it would run on; "" for a CPU.
        missing: bytes of the GPU that are missing for it.
        longest: tokens of its longest request there.
    """

    found: str = ""
    absent: str = ""
    problem: str = ""
    weight_bytes: int = 0
    text_problem: str | None = None
    chats: bool = True
    config_problem: str | None = None
    architecture: str = ""
    memory: int | None = None
    gpu: str = ""
    missing: int = 0
    longest: int = 0


def read(wish: Wish) -> Model | None:
    if not wish.has_model:
        return None
    name = wish.engine.model.model
    if to_pull(name, wish.engine.model.download_dir):
        return Model(absent=f"octavo pull {name}")
    try:
        files = files_of(wish)
    except OctavoError as error:
        return Model(problem=str(error))
    found = Model(
        found=str(files.path),
        weight_bytes=files.weight_bytes,
        architecture=str((files.config.get("architectures") or ["unknown"])[0]),
    )
    found = _with_text(found, wish, files)
    return found if wish.quick else _with_fit(found, wish, files)


def to_pull(name: str, download_dir: str | None) -> bool:
    """Return whether a model of the catalogue is not on this machine yet."""
    from octavo.hub.catalogue import CATALOGUE
    from octavo.hub.pull import pulled

    folder = Path(download_dir).expanduser() if download_dir else None
    return name in CATALOGUE and pulled(CATALOGUE[name], folder) is None


def files_of(wish: Wish) -> ModelFiles:
    """Return the model's files, with its weights if they are here; only small files are downloaded.

    Raises:
        ModelNotFoundError, ModelFileError: as `resolve`.
        ConfigError: an override is invalid.
    """
    from octavo.hub.safetensors_files import safetensors_files
    from octavo.text.sources import model_files

    files = model_files(wish.engine.model, weights=False)
    if files.format == "gguf" or not wish.engine.needs_weights:
        return files
    return dataclasses.replace(files, weights=safetensors_files(files.path))


def _with_text(found: Model, wish: Wish, files: ModelFiles) -> Model:
    from octavo.text.model_text import load_text

    try:
        text = load_text(files, wish.engine.model, chat_template=wish.server.chat_template)
    except OctavoError as error:
        return dataclasses.replace(found, text_problem=str(error))
    return dataclasses.replace(found, text_problem="", chats=text.chat is not None)


def _with_fit(found: Model, wish: Wish, files: ModelFiles) -> Model:
    """Add whether the model can be built, and fits. Imports torch."""
    from octavo.build_worker import implementation_of
    from octavo.models.encoders.registry import is_encoder

    encodes = is_encoder(files.config)
    problem = "" if encodes else _problem_of(lambda: implementation_of(wish.engine, files).spec_of(files.config))
    found = dataclasses.replace(found, config_problem=problem)
    if is_cpu(wish.engine.device.device):
        return dataclasses.replace(found, memory=available_memory() + free_swap())
    gpu = None if problem or encodes else _gpu()
    return found if gpu is None else _on_gpu(found, wish, files, gpu)


def _on_gpu(found: Model, wish: Wish, files: ModelFiles, gpu: GpuState) -> Model:
    from octavo.build_plan import plan_of

    memory = gpu.memory_total or 0
    kind = known_as(gpu.name) or Gpu(gpu.name, memory)
    try:
        estimate = plan_of(wish.engine, files, dataclasses.replace(kind, memory=memory))
    except OctavoError as error:
        return dataclasses.replace(found, config_problem=str(error))
    estimate = estimate.beside(gpu.memory_used or 0)
    return dataclasses.replace(found, gpu=gpu.name, missing=estimate.missing, longest=estimate.longest)


def _gpu() -> GpuState | None:
    """Return the first GPU that this process may use."""
    try:
        nvml = Nvml.load()
    except NvmlError:
        return None
    found = chosen(nvml.states(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    nvml.close()
    return found[0] if found and found[0].memory_total else None


def _problem_of(run: Callable[[], object]) -> str:
    try:
        run()
    except OctavoError as error:
        return str(error)
    return ""


def judge_files(found: Model) -> Finding:
    if found.absent:
        return fine(f"it is not here yet: octavo serve downloads it, or {found.absent}")
    if found.problem:
        return broken(
            found.problem, "give a name of octavo pull --list, OWNER/NAME, or a folder or .gguf file that is whole"
        )
    if not found.weight_bytes:
        return fine(f"{found.found}, without weights: octavo serve downloads them, or makes random ones")
    return fine(f"{found.found}, {show_bytes(found.weight_bytes)} of weights, whole by their headers")


def judge_text(found: Model) -> Finding | None:
    if found.text_problem is None:
        return None
    if found.text_problem:
        return broken(found.text_problem, "download the model's tokenizer files, too, or set --tokenizer")
    if not found.chats:
        return warning(
            "the tokenizer can be used, but the model has no chat template: chats are refused",
            "set --chat-template, or call /v1/completions",
        )
    return fine("they can be used")


def judge_config(found: Model) -> Finding | None:
    if found.config_problem is None:
        return None
    if found.config_problem:
        return broken(found.config_problem, "docs/models.md lists what is supported")
    return fine(f"{found.architecture} is supported")


def judge_fit(found: Model) -> Finding | None:
    if found.missing:
        return broken(
            f"{show_bytes(found.missing)} of memory are missing on the {found.gpu}, with what others hold of it",
            "octavo plan MODEL says what would be enough",
        )
    if found.gpu:
        return fine(f"it fits the {found.gpu}, with requests of up to {found.longest:,} tokens")
    if found.memory is None or not found.weight_bytes:
        return None
    have, need = show_bytes(found.memory), show_bytes(found.weight_bytes)
    if found.weight_bytes > found.memory:
        return broken(
            f"the weights take {need}, and {have} of memory and swap space can be used",
            "take a smaller model or smaller weights (a quantized GGUF), or free memory",
        )
    if found.weight_bytes > 0.8 * found.memory:
        return warning(f"the weights take {need} of {have}: little is left for the KV cache", "take smaller weights")
    return fine(f"the weights take {need} of the {have} that can be used")


AREA = Area(
    "model",
    read,
    (
        Check("files", judge_files),
        Check("tokenizer and chat template", judge_text),
        Check("architecture", judge_config),
        Check("memory", judge_fit),
    ),
)
