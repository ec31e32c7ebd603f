"""Bytes of any lengths reach every reader of a ring in order, however small it is."""

from __future__ import annotations

import os
import random
import threading

import pytest

from octavo.engine.frames import Frames, frame
from octavo.engine.ring import RingHandles, RingReader, RingWriter


@pytest.mark.parametrize("size", [4096, 1 << 16])
def test_each_reader_gets_every_message(size: int) -> None:
    rng = random.Random(size)
    messages = [rng.randbytes(rng.choice([0, 1, 50, 4095, 4096, 20_000])) for _ in range(200)]
    ring = RingWriter(3, size)
    found: list[list[bytes]] = [[] for _ in range(3)]

    def read(number: int) -> None:
        reader, frames = RingReader(RingHandles(*map(os.dup, ring.handles(number)))), Frames()
        while len(found[number]) < len(messages):
            for data in reader.take():
                found[number] += frames.take(data)
        reader.close()

    readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for reader in readers:
        reader.start()
    for message in messages:
        ring.write(frame(message), lambda: None)
    for reader in readers:
        reader.join()
    ring.close()
    assert found == [messages] * 3


def test_a_writer_without_room_asks_whether_to_go_on() -> None:
    ring = RingWriter(2, 4096)
    ring.write(bytes(4096), lambda: pytest.fail("there is room"))

    def ended() -> None:
        raise ConnectionError("no reader")

    with pytest.raises(ConnectionError, match="no reader"):
        ring.write(b"more", ended)
    ring.close()
    ring.close()
