"""`python -m octavo.server.siblings.main`: another API process of a server. Started only by `Crew`."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys

from octavo.core.errors import OctavoError
from octavo.core.garbage import seldom_collecting
from octavo.core.memory import memory_errors
from octavo.engine.client import CoreClient
from octavo.engine.process import GROUP_SIGNALS, CoreElsewhere, die_with_parent
from octavo.server.process.log import log_to
from octavo.server.process.run import loop_factory
from octavo.server.process.serving import serve
from octavo.server.process.stop import Stop
from octavo.server.siblings.crew import Charge
from octavo.server.siblings.siblings import SiblingProcesses

logger = logging.getLogger("octavo.server")

_STDIN, _STDOUT = 0, 1


def main() -> int:
    for number in GROUP_SIGNALS:  # signals reach the whole group; the first process decides
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    charge = pickle.loads(_read(int.from_bytes(_read(8))))
    log_to(charge.config, f"API {charge.index}")
    try:
        with memory_errors(), asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(charge))
    except OctavoError as exc:
        logger.error("%s", exc)
        return 1
    return 0


async def _serve(charge: Charge) -> None:
    config = charge.config
    stop = Stop()

    def told() -> None:
        """Handle a byte, which asks to stop, or the end of the pipe: the first process has ended."""
        if not os.read(_STDIN, 1):
            os._exit(1)
        stop.request()

    asyncio.get_running_loop().add_reader(_STDIN, told)
    client = await CoreClient.start(
        CoreElsewhere(charge.core_address, charge.core_pid),
        stall_after_s=config.stall_after_s,
        max_unread_tokens=config.max_unread_tokens,
    )
    try:
        frontend = await asyncio.to_thread(charge.twin, client)
        with seldom_collecting():
            await serve(
                frontend,
                config,
                sock=socket.socket(fileno=charge.listens),
                announce=lambda _: _say_ready(),
                stop=stop,
                siblings=SiblingProcesses(charge.index, charge.count, charge.folder),
            )
    finally:
        await client.close()


def _say_ready() -> None:
    os.write(_STDOUT, b".")


def _read(size: int) -> bytes:
    """Read exactly `size` bytes of standard input."""
    data = b""
    while len(data) < size:
        part = os.read(_STDIN, size - len(data))
        if not part:
            sys.exit(1)
        data += part
    return data


if __name__ == "__main__":
    sys.exit(main())
