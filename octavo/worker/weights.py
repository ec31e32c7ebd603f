"""`WorkerWeights`: replace the weights of a served model; new ones are read while the old ones are in use."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

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
from octavo.models.load.weights import weight_layers
from octavo.nn.experts import ExpertLayer
from octavo.nn.linear import Projection
from octavo.worker.loaded import LoadedModel
from octavo.worker.worker import Worker

log = logging.getLogger(__name__)

_FORMATS: tuple[LoadFormat, ...] = get_args(LoadFormat)


class WorkerWeights:
    """Replaces the weights of one worker. Staged weights take additional host memory until they are in place."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._updates = 0
        self._received: dict[str, Tensor] | None = None

    @property
    def version(self) -> str:
        return self._worker.weight_version

    def stage(self, path: str | None, load_format: str | None = None) -> StagedWeights:
        """Read the weights of a model on this machine, by default from the files that were read last.

        May be called from any thread while the model computes. Changes nothing that is in use.

        Raises:
            InvalidRequestError: there is no such model, its shapes differ from the served one's, or it can't be read.
            EngineStateError: there is not enough memory.
            UnsupportedError: weights are in the host's memory.
        """
        worker = self._worker
        self._check_resident()
        named = load_format or ("auto" if path is not None else worker.load_format)
        form = next((known for known in _FORMATS if known == named), None)
        if form is None:
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
        """Return the files of a local model, with the settings' overrides applied."""
        place = Path(path).expanduser()
        if not place.exists():
            raise InvalidRequestError(
                "model_path must be a folder or a .gguf file on the engine's machine.", param="model_path", value=path
            )
        return with_overrides(resolve(str(place.absolute()), weights=weights), self._worker.config.config_overrides)

    def begin(self) -> None:
        """Start an update by `receive` or `take`; tensors of an unfinished update are dropped.

        Raises:
            UnsupportedError: weights are in the host's memory.
        """
        self._check_resident()
        self._received = {}

    def _check_resident(self) -> None:
        if self._worker.offload is not None:
            raise UnsupportedError(
                "Weights can't be replaced while some are kept in the host's memory (--cpu-offload-gb). Restart the "
                "server with the new ones."
            )

    def receive(self, update_info: Mapping[str, Any]) -> None:
        """Read tensors: {"path": a safetensors file, or a folder of such files}. The files may be deleted afterwards.

        Raises:
            EngineStateError: `begin` was not called.
            InvalidRequestError: the files can't be read.
        """
        received = self._expected()
        for path in _tensor_files(update_info):
            try:
                received |= load(path.read_bytes())  # not mapped: the file may change before the update is complete
            except (SafetensorError, OSError) as error:
                raise InvalidRequestError(
                    f"The tensors can't be read: {error}", param="update_info.path", value=str(path)
                ) from error

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Add tensors of this process by name; they must not change before they are staged."""
        self._expected().update(tensors)

    def stage_received(self) -> StagedWeights:
        """Build weights from the tensors received since `begin`.

        Raises:
            EngineStateError: `begin` was not called.
            InvalidRequestError: the tensors are not those of the model. All must be sent again.
        """
        received = self._expected()
        self._received = None
        try:
            return self._read(TensorCheckpoint(received))
        except (ConfigError, ModelFileError) as error:
            raise InvalidRequestError(str(error)) from error

    def _expected(self) -> dict[str, Tensor]:
        if self._received is None:
            raise EngineStateError("No update of the weights has begun; begin one first (/start_weight_update).")
        return self._received

    def _read(self, checkpoint: Checkpoint, origin: tuple[ModelFiles, LoadFormat] | None = None) -> StagedWeights:
        """Build a second model from a checkpoint, in host memory."""
        worker = self._worker
        loaded = worker.read(checkpoint, torch.device("cpu"))
        self._check_form(loaded)
        besides = [put for hook in worker.hooks if (put := hook.restage(checkpoint)) is not None]
        return StagedWeights(self, loaded, origin, besides)

    def _check_shape(self, config: Mapping[str, Any]) -> None:
        """Raise InvalidRequestError unless the configuration has the architecture and shapes of the served model."""
        spec, own = self._worker.spec_of(config), self._worker.spec
        kind, own_kind = config.get("model_type"), self._worker.files.config.get("model_type")
        if kind != own_kind:
            raise InvalidRequestError(f"The weights are of a {kind} model, the served one is {own_kind}.")
        for field in dataclasses.fields(own):
            new, old = getattr(spec, field.name), getattr(own, field.name)
            if new != old:
                raise InvalidRequestError(
                    f"The weights are of a model with {field.name} {new}, the served one has {old}. Only weights of "
                    "the same architecture and shapes can replace them; start another server for these."
                )

    def _check_room(self, stored: int) -> None:
        room = host.available_memory()
        if stored > room:
            raise EngineStateError(
                f"The new weights need {stored / (1 << 30):.2f} GiB of host memory in addition to those in use, but "
                f"only {room / (1 << 30):.2f} GiB are free. Free memory, or restart the server with them."
            )

    def _check_form(self, loaded: LoadedModel) -> None:
        """Raise InvalidRequestError unless the weights are stored as the served ones are. On a GPU, each layer's must
        be, since recorded steps read them at the places of the old ones."""
        worker = self._worker
        new, old = worker.form_of(loaded.model), worker.weight_form
        if new != old:
            raise InvalidRequestError(
                f"The weights would be stored as {new}, but the served ones are {old}: save them in the same format.",
                param="model_path",
            )
        if not worker.device.resident or not isinstance(worker.model, nn.Module):
            return
        for mine, its in zip(weight_layers(worker.model), weight_layers(loaded.source), strict=True):
            if isinstance(mine, Projection) and isinstance(its, Projection) and mine.packed_as != its.packed_as:
                raise InvalidRequestError(
                    f"The weights of {its.path} would be stored as {its.packed_as or new}, but the served ones are "
                    f"{mine.packed_as or old}: save them in the same format, or start another server for these.",
                    param="model_path",
                )
            if isinstance(mine, ExpertLayer) and isinstance(its, ExpertLayer) and _layouts(mine) != _layouts(its):
                raise InvalidRequestError(
                    f"The experts of {its.path} would be stored in another form than the served ones: save them in the "
                    "same format, or start another server for these.",
                    param="model_path",
                )

    def put_in_place(self, staged: StagedWeights, version: str | None, *, rescale: bool) -> None:
        worker = self._worker
        self._updates += 1
        worker.adopt(staged.loaded, rescale=rescale)
        for put in staged.besides:
            put()
        worker.weight_version = version or f"update-{self._updates}"
        if staged.origin is not None:
            worker.files, worker.load_format = staged.origin
            worker.files_version = worker.weight_version
        host.trim_memory()
        log.info("replaced the weights by version %s", worker.weight_version)


def _layouts(layer: ExpertLayer) -> list[object]:
    return [matrices.layout for matrices, _ in layer.packed_on_gpu]


@dataclasses.dataclass(slots=True)
class StagedWeights:
    """Weights that are ready to replace those in use.

    Attributes:
        origin: their files and load format; None for received tensors.
        besides: puts those of features in place.
    """

    weights: WorkerWeights
    loaded: LoadedModel
    origin: tuple[ModelFiles, LoadFormat] | None
    besides: Sequence[Callable[[], None]] = ()

    def put_in_place(self, version: str | None, *, rescale: bool) -> None:
        self.weights.put_in_place(self, version, rescale=rescale)


def _tensor_files(update_info: Mapping[str, Any]) -> list[Path]:
    """Return the safetensors files that an update names.

    Raises:
        UnsupportedError: the update uses another transport.
        InvalidRequestError: there are no such files.
    """
    if "path" not in update_info:
        raise UnsupportedError(
            "This engine reads weights from safetensors files only, neither by NCCL nor by handles of another "
            'process\'s memory: send {"path": FILE}. A file in /dev/shm stays in memory.',
            param="update_info",
        )
    path = Path(str(update_info["path"])).expanduser()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise InvalidRequestError(
            "update_info.path must be a safetensors file on the engine's machine, or a folder with such files.",
            param="update_info.path",
            value=str(update_info["path"]),
        )
    return files
