"""Settings that are for another device, or for several, are named in the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from toy_engine import tiny_config
from toy_models import model_files

from octavo.build import build_core


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"enforce_eager": True}, "--enforce-eager has no effect on a CPU"),
        ({"rank_timeout_s": 7.5}, "--rank-timeout 7.5 has no effect: the model is in the engine's process"),
        ({"rank_timeout_s": 7.5, "distributed_executor_backend": "mp"}, ""),
        ({}, ""),
    ],
)
def test_a_setting_without_effect_is_named(
    settings: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        build_core(tiny_config(device="cpu", **settings), model_files())[0].close()
    assert [text in record.getMessage() for record in caplog.records if "no effect" in record.getMessage()] == (
        [True] if text else []
    )
