"""Where the server is that all clients talk to; `run.py` starts it and sets the variables."""

from __future__ import annotations

import os

import pytest

MODEL = "smollm2"


@pytest.fixture(scope="session")
def url() -> str:
    """The server's address, without a path."""
    return os.environ["OCTAVO_URL"].rstrip("/")
