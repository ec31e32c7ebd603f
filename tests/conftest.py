"""Fixtures that several floors' tests share."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

# Without a GPU the tests run Triton's kernels in its interpreter, which must be asked for before they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

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


# On a machine with other work to do, a slow example says nothing about the code.
settings.register_profile("octavo", deadline=None)
settings.load_profile("octavo")
