"""Ranks of other machines: who may join, and how long the engine waits."""

from __future__ import annotations

import threading

import pytest

from octavo.core.errors import ConfigError
from octavo.core.worker_info import RankPlace
from octavo.engine.node import run_node
from octavo.engine.remote_rank import NodeListener
from octavo.engine.ring import RingWriter


def test_a_machine_with_other_settings_is_refused_with_the_reason_on_both(caplog: pytest.LogCaptureFixture) -> None:
    listener, ring = NodeListener(0, "these", patience_s=1.0), RingWriter(1)
    errors: list[str] = []

    def join() -> None:
        try:
            run_node([1], ("127.0.0.1", listener.port), "others", lambda place, handles: pytest.fail("it was started"))
        except ConfigError as error:
            errors.append(str(error))

    node = threading.Thread(target=join)
    node.start()
    with pytest.raises(ConfigError, match="Node 1 with rank 1 did not join within 1 s"):
        listener.admit(1, RankPlace(1, 2), 1, ring.handles(0))
    node.join()
    reason = "its model, its settings, its key or its version of Octavo differ from those of node 0. Start all nodes"
    assert len(errors) == 1
    assert errors[0].startswith(f"Node 0 refuses rank 1: {reason}")
    assert f"a machine at 127.0.0.1 is refused: {reason}" in caplog.text
    listener.close()
    ring.close()


def test_an_engine_that_is_not_there_is_not_waited_for_forever() -> None:
    listener = NodeListener(0, "")
    port = listener.port
    listener.close()
    with pytest.raises(ConfigError, match=rf"Rank 3 did not reach the engine at 127.0.0.1:{port} within 0.1 s"):
        run_node([3], ("127.0.0.1", port), "", lambda place, handles: pytest.fail("it was started"), 0.1)


def test_a_port_in_use_is_refused() -> None:
    listener = NodeListener(0, "")
    with pytest.raises(ConfigError, match=f"--master-port {listener.port} can't be used"):
        NodeListener(listener.port, "")
    listener.close()
