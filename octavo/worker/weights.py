"""`WorkerWeights`: other weights for a served model, read beside those in use and then put in their place."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from octavo.core.errors import (
    ConfigError,
    EngineStateError,
    InvalidRequestError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedError,
)
from octavo.device import host
from octavo.hub.files import ModelFiles
from octavo.hub.overrides import with_overrides
from octavo.hub.resolve import resolve
from octavo.models.load import LoadFormat, open_checkpoint
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.tensors import TensorCheckpoint
from octavo.worker.worker import Loaded, Worker

log = logging.getLogger(__name__)

_FORMATS = get_args(LoadFormat)


class WorkerWeights:
    """Other weights for one worker. What is staged takes memory of its own on the host until it is in place."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._updates = 0
        self._received: dict[str, Tensor] | None = None

    @property
    def version(self) -> str:
        return self._worker.weight_version

    def stage(self, path: str | None, load_format: str | None = None) -> Staged:
        """Read the weights of a model on this machine; by default the files that were read last.

        Any thread may do it while the model computes. Nothing that is in use changes.

        Raises:
            InvalidRequestError: there is no such model, it is not of the served one's shape, or it can't be read.
            EngineStateError: there is no memory for it.
        """
        worker = self._worker
        form = load_format or ("auto" if path is not None else worker.load_format)
        if form not in _FORMATS:
            raise InvalidRequestError(
                f"load_format must be one of {', '.join(_FORMATS)}.", param="load_format", value=load_format
            )
        try:
            files = worker.files if path is None else self._find(path, weights=form != "dummy")
            self._check_shape(files.config)
            self._check_room(files.weight_bytes)
            return self._read(open_checkpoint(files, form, worker.config.seed), (files, form))
        except (ConfigError, ModelFileError, ModelNotFoundError) as error:
            raise InvalidRequestError(str(error), param="model_path", value=path) from error

    def _find(self, path: str, *, weights: bool) -> ModelFiles:
        """A model with the settings' overrides. Nothing is downloaded."""
        place = Path(path).expanduser()
        if not place.exists():
            raise InvalidRequestError(
                "model_path must be a folder or a .gguf file on the engine's machine.", param="model_path", value=path
            )
        return with_overrides(resolve(str(place.absolute()), weights=weights), self._worker.config.config_overrides)

    def begin(self) -> None:
        """Wait for tensors, to be sent by `receive`; those of an update that was not finished are dropped."""
        self._received = {}

    def receive(self, update_info: Mapping[str, Any]) -> None:
        """Read some of the tensors: {"path": a safetensors file, or a folder with some}. They may be gone afterwards.

        Raises:
            EngineStateError: nobody has begun.
            InvalidRequestError: they can't be read from there.
        """
        received = self._expected()
        for path in _tensor_files(update_info):
            try:
                received |= load(path.read_bytes())  # not mapped: the file may be gone, or another, by the end
            except (SafetensorError, OSError) as error:
                raise InvalidRequestError(
                    f"The tensors can't be read: {error}", param="update_info.path", value=str(path)
                ) from error

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """`receive` for tensors of this process; they must not change before they are staged."""
        self._expected().update(tensors)

    def stage_received(self) -> Staged:
        """Make weights of all that was received since `begin`.

        Raises:
            EngineStateError: nobody has begun.
            InvalidRequestError: the tensors are not those of the model. All must be sent again.
        """
        received = self._expected()
        self._received = None
        try:
            return self._read(TensorCheckpoint(received))
        except ModelFileError as error:
            raise InvalidRequestError(str(error)) from error

    def _expected(self) -> dict[str, Tensor]:
        if self._received is None:
            raise EngineStateError("No update of the weights has begun; begin one first (/start_weight_update).")
        return self._received

    def _read(self, checkpoint: Checkpoint, origin: tuple[ModelFiles, LoadFormat] | None = None) -> Staged:
        """A model beside the served one, on the host."""
        worker = self._worker
        loaded = worker.read(checkpoint, torch.device("cpu"))
        self._check_form(loaded)
        return Staged(self, loaded, origin)

    def _check_shape(self, config: Mapping[str, Any]) -> None:
        """Raises InvalidRequestError unless the configuration is that of the served model, as far as weights go."""
        spec, own = self._worker.spec_of(config), self._worker.spec
        kind, own_kind = config.get("model_type"), self._worker.files.config.get("model_type")
        if kind != own_kind:
            raise InvalidRequestError(f"The weights are of a {kind} model, the served one is {own_kind}.")
        for field in dataclasses.fields(own):
            new, old = getattr(spec, field.name), getattr(own, field.name)
            if new != old:
                raise InvalidRequestError(
                    f"The weights are of a model with {field.name} {new}, the served one has {old}. Only weights of "
                    "the same architecture and shapes can take its place; start another server for these."
                )

    def _check_room(self, stored: int) -> None:
        room = host.available_memory()
        if stored > room:
            raise EngineStateError(
                f"The files of the weights hold {stored / (1 << 30):.2f} GiB, but only {room / (1 << 30):.2f} GiB of "
                "the host's memory are free, and they are read beside those in use. Free memory, or start anew."
            )

    def _check_form(self, loaded: Loaded) -> None:
        new, old = self._worker.form_of(loaded.model), self._worker.weight_form
        if new != old:
            raise InvalidRequestError(
                f"The weights would be kept as {new}, where the served ones are {old}: store them in the same format.",
                param="model_path",
            )

    def put_in_place(self, staged: Staged, version: str | None, *, rescale: bool) -> None:
        worker = self._worker
        self._updates += 1
        worker.adopt(staged.loaded, rescale=rescale)
        worker.weight_version = version or f"update-{self._updates}"
        if staged.origin is not None:
            worker.files, worker.load_format = staged.origin
            worker.files_version = worker.weight_version
        host.trim_memory()
        log.info("the weights were replaced; they are now %s", worker.weight_version)


@dataclasses.dataclass(slots=True)
class Staged:
    """Weights that are ready to take the place of those in use.

    Attributes:
        origin: the files that they were read from, and how; None for tensors that are on no disk.
    """

    weights: WorkerWeights
    loaded: Loaded
    origin: tuple[ModelFiles, LoadFormat] | None

    def put_in_place(self, version: str | None, *, rescale: bool) -> None:
        self.weights.put_in_place(self, version, rescale=rescale)


def _tensor_files(update_info: Mapping[str, Any]) -> list[Path]:
    """
    Raises:
        UnsupportedError: the tensors would come in another way.
        InvalidRequestError: there is nothing of the kind.
    """
    if "path" not in update_info:
        raise UnsupportedError(
            "This engine takes weights from safetensors files alone, neither by NCCL nor by handles of another "
            'process\'s memory: send {"path": FILE}. A file in /dev/shm never touches a disk.',
            param="update_info",
        )
    path = Path(str(update_info["path"])).expanduser()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise InvalidRequestError(
            "update_info.path must be a safetensors file on the engine's machine, or a folder with some.",
            param="update_info.path",
            value=str(update_info["path"]),
        )
    return files
