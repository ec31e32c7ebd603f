"""Errors that mean that memory ran out, whoever raises them."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch

from octavo.core.errors import ConfigError, ModelFileError
from octavo.core.memory import memory_errors

TOO_MUCH = 1 << 60


def as_file_error() -> None:
    try:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    except OSError as error:
        raise ModelFileError("weights.gguf can't be read.") from error


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: np.empty(TOO_MUCH, dtype=np.uint8),
        lambda: torch.empty(TOO_MUCH, dtype=torch.uint8),
        lambda: bytearray(TOO_MUCH),
        as_file_error,
    ],
    ids=["numpy", "torch", "python", "a file"],
)
def test_they_become_one_error_with_a_remedy(allocate):
    with (
        pytest.raises(ConfigError, match=r"^Not enough memory: .*\. .*(container|ulimit -v).* lower --kv-cache-memory"),
        memory_errors(),
    ):
        allocate()


@pytest.mark.parametrize("error", [ConfigError("its own remedy"), RuntimeError("a bug"), OSError(errno.ENOENT, "no")])
def test_others_stay_as_they_are(error):
    with pytest.raises(type(error)) as caught, memory_errors():
        raise error
    assert caught.value is error
