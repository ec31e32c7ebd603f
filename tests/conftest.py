"""Fixtures that several floors' tests share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tests in several processes share the cores: torch's own threads would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from examples import examples
from hypothesis import settings

# Without a GPU the tests run Triton's kernels in its interpreter, which must be asked for before they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from quick_interpreter import quicken

from octavo.hub.files import ModelFiles
from octavo.hub.resolve import resolve


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    """The real default model, pulled into Octavo's cache on the first use."""
    return resolve("smollm2")


@pytest.fixture(scope="session")
def minilm_files() -> ModelFiles:
    """The catalogue's embedding model, pulled into Octavo's cache on the first use."""
    return resolve("minilm")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets, whose names may have 107 bytes (unix(7)), wherever temporary files go."""
    with tempfile.TemporaryDirectory(prefix="sockets-", dir=min(tempfile.gettempdir(), "/tmp", key=len)) as folder:
        yield Path(folder)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked as in need of the feature that tools/deletion.py has deleted."""
    deleted = os.environ.get("DELETED_FEATURE")
    if deleted is not None:
        gone = [item for item in items if any(deleted in mark.args for mark in item.iter_markers("features"))]
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=gone)


# On a machine with other work to do, a slow example says nothing about the code.
settings.register_profile("octavo", deadline=None, max_examples=examples(160))
settings.load_profile("octavo")


if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()
