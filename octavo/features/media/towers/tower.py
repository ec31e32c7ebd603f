"""`Tower`: the interface of what encodes images or audio, and how one is loaded."""

from __future__ import annotations

import contextlib
import importlib
import re
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.core.errors import ConfigError, ModelFileError, OctavoError
from octavo.features.media.kinds import Kind, kind_of
from octavo.hub.text_config import with_halves
from octavo.models.hf_config import whole
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.renamed import RenamedCheckpoint
from octavo.models.load.weights import load_weights, wanted_bytes
from octavo.models.text_defaults import TEXT_DEFAULTS
from octavo.nn.build import Build

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)


Encoding = Generator[None, None, Tensor]
"""Computes embeddings, a layer at a time."""


class Pixels:
    """Turns bytes of colors into the numbers that a tower reads: (value * scale - mean) / std.

    Args:
        processor: see `MediaInfo`.
        standard: the preprocessor's default mean and deviation are a half, instead of CLIP's.

    Raises:
        ModelFileError: a field is not three numbers.
    """

    def __init__(self, processor: Mapping[str, Any], build: Build, *, standard: bool) -> None:
        mean, std = (_HALF, _HALF) if standard else (_CLIP_MEAN, _CLIP_STD)
        scale = float(processor.get("rescale_factor", 1 / 255)) if processor.get("do_rescale", True) else 1.0
        if not processor.get("do_normalize", True):
            mean, std = (0.0,) * 3, (1.0,) * 3
        self._dtype, self._scale = build.dtype, scale
        self._mean, self._std = (
            torch.tensor(_three(processor, name, default), device=build.device)
            if processor.get("do_normalize", True)
            else torch.tensor(default, device=build.device)
            for name, default in (("image_mean", mean), ("image_std", std))
        )

    def __call__(self, images: Tensor) -> Tensor:
        """[n, height, width, 3] uint8 to [n, 3, height, width] of the model's dtype."""
        values = (images.float() * self._scale - self._mean) / self._std
        return values.permute(0, 3, 1, 2).to(self._dtype)


def _three(processor: Mapping[str, Any], name: str, default: tuple[float, ...]) -> list[float]:
    value = processor.get(name)
    if value is None:
        return list(default)
    if not isinstance(value, list | tuple) or len(value) != 3 or not all(isinstance(one, int | float) for one in value):
        raise ModelFileError(f"The model's preprocessor has {name}={value!r}, which should be three numbers.")
    return [float(one) for one in value]


class Tower(nn.Module):
    """A tower with its projector.

    Attributes:
        hidden_size: numbers of an embedding for the decoder's input.
        additions: of the decoder's first layers whose outputs embeddings of images are added to, too.
        patch_size: pixels of a patch's edge; of images only.
        most: embeddings of the largest item.
        most_patches: patches of the largest item.
        num_layers: how many times `encoding` yields, at most.
        width: numbers per patch of the largest intermediate results.
        names: patterns of prefixes of the checkpoint's names -> those of this module.
        unneeded: prefixes of tensors of the tower that are not used.
    """

    hidden_size: int
    additions: int = 0
    patch_size: int
    most: int
    most_patches: int
    num_layers: int
    width: int
    names: tuple[tuple[str, str], ...]
    unneeded: tuple[str, ...] = ()
    dtype: torch.dtype
    nbytes: int = 0

    @abstractmethod
    def encoding(self, data: Tensor, layout: tuple[int, ...], /) -> Encoding:
        """Return an item's embeddings, [count, (1 + additions) * hidden_size] of the model's dtype: those for the
        decoder's input, then those of each addition. Yield after each layer, so that steps can be computed in between.

        Args:
            data: as in `MediaItem`, on the tower's device.
            layout: see `MediaItem`.
        """

    @property
    def patch_numbers(self) -> int:
        """Numbers of an item's data for each patch; of images, their pixels."""
        return self.patch_size**2

    def workspace_bytes(self, patches: int) -> int:
        """Return the memory of intermediate results for this number of patches, at most."""
        pixels = 3 * patches * self.patch_size**2
        return patches * self.width * self.dtype.itemsize + 3 * pixels * 4  # colors are float32 while they are scaled


BuildTower = Callable[[Mapping[str, Any], Mapping[str, Any], Build], Tower]


def decoder_size(config: Mapping[str, Any]) -> int:
    """Return the hidden size of a model's decoder, which may be the default of its family."""
    text = config["text_config"]
    return whole({**TEXT_DEFAULTS.get(str(text.get("model_type") or ""), {}), **text}, "hidden_size", 4096)


def load_tower(config: Mapping[str, Any], processor: Mapping[str, Any], build: Build, checkpoint: Checkpoint) -> Tower:
    """Build the tower of a model's configuration and load its weights.

    Raises:
        ConfigError, ModelFileError: something is not supported, missing or damaged; the text names the setting with
            which the model is served without the tower.
    """
    with _refused(kind_of(config)):
        tower = _built(config, processor, build)
        named = _renamed(checkpoint, tower.names)
        tower.nbytes = load_weights(tower, named, unneeded=tower.unneeded).nbytes
    return tower


def has_tower(checkpoint: Checkpoint, tower: Tower) -> bool:
    """Return whether a checkpoint has tensors of a tower, or makes random ones."""
    return not checkpoint.names() or bool(_renamed(checkpoint, tower.names).names())


def planned_tower(config: Mapping[str, Any], processor: Mapping[str, Any], build: Build) -> Tower:
    """Build the tower of a model's configuration without weights; its `nbytes` are those that they would take. Raises
    as `load_tower`."""
    with _refused(kind_of(config)):
        tower = _built(config, processor, build)
    tower.nbytes = wanted_bytes(tower)
    return tower


def _built(config: Mapping[str, Any], processor: Mapping[str, Any], build: Build) -> Tower:
    kind = kind_of(config)
    make: BuildTower = importlib.import_module(f"octavo.features.media.towers.{kind.tower}").build_tower
    try:
        return make(with_halves(config), processor, build)
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"The model's {kind.half} is incomplete: {exc!r}.") from exc


@contextlib.contextmanager
def _refused(kind: Kind) -> Iterator[None]:
    """Add to errors how the model is served without its tower."""
    try:
        yield
    except OctavoError as exc:
        raise type(exc)(
            f"{exc} To serve the model for text only, set --limit-mm-per-prompt '{{\"{kind.modality}\": 0}}'."
        ) from exc


def _renamed(checkpoint: Checkpoint, names: tuple[tuple[str, str], ...]) -> Checkpoint:
    """Return the part of a checkpoint that is a tower's, with its names."""
    forms = [(re.compile(pattern), own) for pattern, own in names]

    def rename(name: str) -> str | None:
        for pattern, own in forms:
            if found := pattern.match(name):
                return own + name[found.end() :]
        return None

    return RenamedCheckpoint(checkpoint, rename) if checkpoint.names() else checkpoint
