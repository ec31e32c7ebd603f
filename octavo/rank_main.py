"""`python -m octavo.rank_main`: the process of one rank. Started by `RankProcess`, never by hand."""

from __future__ import annotations

import logging
import os
import sys

from octavo.core.log import FORM
from octavo.engine.plan_codec import PlanCodec
from octavo.engine.rank import RankServer
from octavo.engine.rank_process import receive_rank


def main() -> int:
    peer, ring, (config, files, level, place) = receive_rank()
    logging.basicConfig(level=level, format=FORM)
    from octavo.build_worker import build_rank
    from octavo.features import payload_types

    codec = PlanCodec(payload_types())
    code = RankServer(peer, ring, lambda: build_rank(config, files, place), codec, answers=place.answers).run()
    if code or place.size > 1:  # destructors of tensors, graphs and groups fail or wait where a device or rank is lost
        logging.shutdown()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
