"""`python -m octavo.rank_main DEVICE`: the process of one rank. Started by `RankProcess`, never by hand."""

from __future__ import annotations

import logging
import os
import sys
import time

import msgspec

from octavo.core.garbage import collect_seldom
from octavo.core.log import FORM
from octavo.device.early import begin_context, without_collection
from octavo.engine.plan_codec import PlanCodec
from octavo.engine.rank import RankServer
from octavo.engine.rank_process import RankStart

log = logging.getLogger("octavo.rank_main")


def main(device: str) -> int:
    start = RankStart()
    began = time.perf_counter()
    on_gpu = begin_context(device) is not None
    with without_collection():
        from octavo.build_worker import build_rank  # imports torch, as the engine does meanwhile
        from octavo.features import payload_types

        if on_gpu:  # what a worker imports later, while the other ranks wait
            import octavo.worker.resident.ahead
            import octavo.worker.resident.replay  # noqa: F401

    imported = time.perf_counter()
    peer, ring, (config, files, level, place), memory = start.receive()
    logging.basicConfig(level=level, format=FORM)
    waited = time.perf_counter() - imported
    log.info("imported in %.1f s, then waited %.1f s for the engine", imported - began, waited)
    place = msgspec.structs.replace(place, memory=memory)
    collect_seldom()
    codec = PlanCodec(payload_types())
    code = RankServer(peer, ring, lambda: build_rank(config, files, place), codec, answers=place.answers).run()
    if code or place.size > 1:  # destructors of tensors, graphs and groups fail or wait where a device or rank is lost
        logging.shutdown()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
