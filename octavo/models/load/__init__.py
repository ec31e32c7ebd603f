"""Loading weights: `open_checkpoint` finds the source, `weights.load_weights` fills the model from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from octavo.core.errors import ModelFileError
from octavo.hub.files import ModelFiles

if TYPE_CHECKING:
    from octavo.models.load.checkpoint import Checkpoint

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]


def open_checkpoint(
    files: ModelFiles,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    device: str = "cpu",
) -> Checkpoint:
    """Open the source of a model's weights. Reads headers only. Quantized weights look like plain matrices.

    Args:
        load_format: "auto" depends on the files; "dummy" makes random weights from `seed`.
        device: device of random weights; no effect on others.

    Raises:
        ConfigError: weights are quantized by a method that is not supported.
        ModelFileError: files are missing, corrupt or truncated.
    """
    # Imported here so that a process imports only the format that it reads.
    if load_format == "dummy":
        from octavo.models.load.dummy import DummyCheckpoint

        return DummyCheckpoint(seed, device)
    if not files.weights:
        raise ModelFileError(
            f"Model {files.name} has no weight files in {files.path}; get it again, or use --load-format dummy."
        )
    kind = files.format if load_format == "auto" else load_format
    if kind == "safetensors":
        from octavo.models.load.quantized.table import dequantizing
        from octavo.models.load.safetensors import SafetensorsCheckpoint

        return dequantizing(SafetensorsCheckpoint(files.weights), files.config)
    if files.format != "gguf":
        raise ModelFileError(
            f"Model {files.name} is not stored as GGUF; use --load-format {files.format}, or leave it out."
        )
    if len(files.weights) > 1:
        names = ", ".join(path.name for path in files.weights)
        raise ModelFileError(
            f"Model {files.name} is split over several GGUF files ({names}); join them into one first."
        )
    from octavo.models.load.gguf import GGUFCheckpoint

    return GGUFCheckpoint(files.weights[0])
