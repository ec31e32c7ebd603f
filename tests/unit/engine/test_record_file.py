"""Records of runs whose file can't be continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.engine.plan_codec import PlanCodec
from octavo.engine.record import FORM, Header, PlanRecorder


def test_a_full_disk_ends_the_record_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    nothing: Any = None
    recorder = PlanRecorder(Path("/dev/full"), 1 << 20, Header(FORM, "0", {}, nothing, nothing), PlanCodec({}))
    recorder.sampled(1, {})
    recorder.gave(1, None)
    recorder.close()
    assert caplog.text.count("recording steps in /dev/full stops here") == 1
    assert "No space left on device" in caplog.text
