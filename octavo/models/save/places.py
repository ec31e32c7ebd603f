"""What all ways of writing a quantized model check: its source, and the new file or folder."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gguf import GGMLQuantizationType as Kind
from safetensors import SafetensorError

from octavo.core.errors import ConfigError
from octavo.hub.files import ModelFiles
from octavo.hub.gguf_file import read_gguf
from octavo.models.encoders.registry import is_encoder
from octavo.models.load.quantized.table import method_of


def check_source(files: ModelFiles) -> None:
    """Raise ConfigError for a model that is quantized already, or that would be expanded to be served."""
    if files.format == "safetensors" and method_of(files.config) is not None:
        raise ConfigError(f"{files.name} is quantized already. Give the model that it was made from.")
    if is_encoder(files.config):
        raise ConfigError(
            f"{files.name} makes embeddings. Octavo computes them with unquantized weights: serve it as it is."
        )


def rounded_types(files: ModelFiles) -> list[str]:
    """Return the names of the quantized types of a GGUF file's tensors; none for other files."""
    if files.format != "gguf":
        return []
    kinds = {tensor.kind for path in files.weights for tensor in read_gguf(path).tensors.values()}
    return [Kind(kind).name for kind in sorted(kinds) if kind not in (Kind.F32, Kind.F16, Kind.BF16)]


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless the folder is new or empty."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} exists and is not a folder. Name a new folder.")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} exists and is not empty. Name a new folder.")


@contextmanager
def new_place(path: Path, *, folder: bool) -> Iterator[None]:
    """Make a new folder, or that of a new file; if the block fails or the process is terminated, remove what it wrote.

    Raises:
        ConfigError: it can't be written.
    """
    try:
        (path if folder else path.parent).mkdir(parents=True, exist_ok=True)
        with _termination_raised():
            yield
    except BaseException as error:
        with suppress(OSError):
            shutil.rmtree(path) if folder else path.unlink()
        if isinstance(error, OSError | SafetensorError):
            raise ConfigError(
                f"{path} can't be written: {error}. Free space there, or name a place that can be written."
            ) from error
        raise


@contextmanager
def _termination_raised() -> Iterator[None]:
    """Let SIGTERM raise SystemExit instead of ending the process at once, as SIGINT raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled there only
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
