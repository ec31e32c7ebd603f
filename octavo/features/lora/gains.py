"""Gains of DoRA (https://arxiv.org/abs/2402.09353): the factor of each output, magnitude / norm(W + scale * B A)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from octavo.core.errors import EngineStateError, UnsupportedError
from octavo.features.lora.layout import Piece
from octavo.features.lora.targets import Layer, Targets
from octavo.models.load.checkpoint import Checkpoint
from octavo.nn.linear import Linear
from octavo.nn.quant.none import Unquantized
from octavo.nn.shard import Cut
from octavo.nn.weights import TensorSpec

_ROWS = 1024
"""Rows of a matrix that are computed at once."""


class BaseNorms:
    """Computes gains from the base weights of one rank, which are dequantized if they are quantized.

    Weights that a layer keeps in a form of its own, and those that other ranks have parts of, are read from the
    checkpoint again.
    """

    def __init__(self, targets: Targets, checkpoint: Callable[[], Checkpoint]) -> None:
        """
        Args:
            checkpoint: opens the checkpoint that the model's weights are from, in the model's names.
        """
        self._targets = targets
        self._open = checkpoint
        self._checkpoint: Checkpoint | None = None
        self._changed = threading.Condition()
        """Guards the two fields below."""
        self._reading = 0
        """Threads that read weights."""
        self._closed = False

    def close(self) -> None:
        """Wait until no thread reads weights, which are freed next, and refuse to read them from now on."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._reading)

    @contextmanager
    def _reading_weights(self) -> Iterator[None]:
        """Keep `close` waiting. Raises EngineStateError if it was called."""
        with self._changed:
            if self._closed:
                raise EngineStateError(
                    "The engine sleeps, so adapters with magnitudes (use_dora) can't be read. Wake it up first "
                    "(/wake_up)."
                )
            self._reading += 1
        try:
            yield
        finally:
            with self._changed:
                self._reading -= 1
                self._changed.notify_all()

    def weights_replaced(self) -> None:
        """The checkpoint that was opened is not the model's any more."""
        self._checkpoint = None

    def gains(self, piece: Piece, a: Tensor, b: Tensor, magnitudes: Tensor) -> Tensor:
        """Return the gains of this rank's outputs; see `Gains` in `reader.py`.

        Raises:
            UnsupportedError: the layer's weights were received as tensors and can't be read.
            EngineStateError: it is closed.
        """
        own = self._targets.cuts[piece.target][piece.part]
        with self._reading_weights():
            weight = self._weight(piece, own)
            a, b = a.to(weight.device, torch.float32), own.rows_of(b).to(weight.device, torch.float32) * piece.scale
            parts = zip(weight.split(_ROWS), b.split(_ROWS), strict=True)
            norms = [torch.linalg.vector_norm(torch.addmm(w.float(), part, a), dim=1) for w, part in parts]
            return own.rows_of(magnitudes).float() / torch.cat(norms).cpu()

    def _weight(self, piece: Piece, cut: Cut) -> Tensor:
        """Return the base weights of a piece, this rank's outputs and all inputs."""
        layer = self._targets.layers[piece.target]
        assert layer is not None, "gains are of the rank's own layers"
        assert not hasattr(layer, "rows"), "embeddings have no gains"
        own = self._in_layer(layer, piece.part)
        if own is not None:
            return own
        target = self._targets.targets[piece.target]
        part = target.parts[piece.part]
        if self._checkpoint is None:
            try:
                self._checkpoint = self._open()
            except UnsupportedError as error:
                raise UnsupportedError(
                    f"The norms of {target.name(piece.part)}, which adapters with magnitudes (use_dora) need, are not "
                    f"known: {error} Load the weights from files, or an adapter without use_dora."
                ) from None
        spec = TensorSpec((part.outputs, part.inputs), torch.float32, out_dim=0, in_dim=1)
        return cut.rows_of(self._checkpoint.tensor(f"{target.name(piece.part)}.weight", spec))

    def _in_layer(self, layer: Layer, part: int) -> Tensor | None:
        """Return a part's weights if the layer has them as a plain matrix with all inputs; else None."""
        scheme = getattr(layer, "scheme", None)
        if not isinstance(scheme, Unquantized) or scheme.weight is None or layer.offloaded:
            return None
        if not isinstance(layer, Linear):
            return scheme.weight
        if layer.cuts[part].inputs is not None:
            return None
        own: Tensor = scheme.weight.split(layer.sizes)[part]
        return own
