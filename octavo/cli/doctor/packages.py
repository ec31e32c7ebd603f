"""Python and the installed packages, by their metadata: nothing is imported."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from octavo.cli.doctor.check import Area, Check, Finding, Wish, broken, fine, listed
from octavo.core.errors import ConfigError

_RAY = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packages:
    """Python and its packages.

    Attributes:
        python: its version.
        needs_python: the versions that Octavo takes, such as ">=3.11"; "" if Octavo is not installed as a package.
        bits: of an address.
        wrong: (requirement, installed version or "") of requirements that are not met.
        count: of Octavo's requirements.
        needs_ray, has_ray: Ray is asked for, and installed.
        tracing_problem: why traces can't be sent as asked; "" if they can.
    """

    python: str
    needs_python: str
    bits: int
    wrong: tuple[tuple[str, str], ...] = ()
    count: int = 0
    needs_ray: bool = False
    has_ray: bool = False
    tracing_problem: str = ""


def read(wish: Wish) -> Packages:
    wrong: list[tuple[str, str]] = []
    needs, count = "", 0
    try:
        needs = metadata.metadata("octavo")["Requires-Python"]
        requirements = metadata.requires("octavo") or []
    except metadata.PackageNotFoundError:
        requirements = []
    for requirement, installed, met in _compared(requirements):
        count += 1
        if not met:
            wrong.append((requirement, installed))
    return Packages(
        python=platform.python_version(),
        needs_python=needs,
        bits=64 if sys.maxsize > 1 << 32 else 32,
        wrong=tuple(wrong),
        count=count,
        needs_ray=wish.engine.device.distributed_executor_backend == _RAY,
        has_ray=importlib.util.find_spec(_RAY) is not None,
        tracing_problem=_tracing_problem(wish),
    )


def _compared(requirements: list[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield each requirement that holds without extras: its text, the installed version, and whether that meets it."""
    from packaging.requirements import Requirement  # huggingface-hub, which Octavo needs, needs it

    for text in requirements:
        one = Requirement(text)
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            yield f"{one.name}{one.specifier}", "", False
            continue
        yield f"{one.name}{one.specifier}", installed, one.specifier.contains(installed, prereleases=True)


def _tracing_problem(wish: Wish) -> str:
    if wish.server.otlp_traces_endpoint is None:
        return ""
    from octavo.server.tracing.start import check_traces

    try:
        check_traces(wish.server)
    except ConfigError as error:
        return str(error)
    return ""


def judge_python(found: Packages) -> Finding:
    if found.bits < 64:
        return broken(f"Python {found.python} has {found.bits}-bit addresses", "install a 64-bit Python")
    if not found.needs_python:
        return fine(f"Python {found.python}; Octavo is not installed as a package, so nothing is compared")
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(found.needs_python).contains(found.python, prereleases=True):
        return broken(
            f"Python {found.python}, but Octavo needs {found.needs_python}",
            "make a virtual environment with a newer Python (python3.12 -m venv .venv) and install Octavo there",
        )
    return fine(f"Python {found.python}")


def judge_packages(found: Packages) -> Finding | None:
    if not found.needs_python:
        return None
    if not found.wrong:
        return fine(f"all {found.count} have a version that Octavo takes")
    texts = [f"{need} is needed, {have or 'none'} is installed" for need, have in found.wrong]
    wanted = " ".join(f"'{need}'" for need, _ in found.wrong)
    return broken(listed(texts), f"{sys.executable} -m pip install {wanted}")


def judge_ray(found: Packages) -> Finding | None:
    if not found.needs_ray:
        return None
    if found.has_ray:
        return fine("the package ray is there")
    return broken(
        "--distributed-executor-backend ray needs the package ray", f"{sys.executable} -m pip install 'octavo[ray]'"
    )


def judge_tracing(found: Packages) -> Finding | None:
    if not found.tracing_problem:
        return None
    return broken(found.tracing_problem, "without traces, leave --otlp-traces-endpoint out")


AREA = Area(
    "packages",
    read,
    (
        Check("Python", judge_python),
        Check("versions", judge_packages),
        Check("Ray", judge_ray),
        Check("traces", judge_tracing),
    ),
)
