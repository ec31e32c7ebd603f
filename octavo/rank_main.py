"""`python -m octavo.rank_main`: the process of one rank. Started by `RankProcess`, never by hand."""

from __future__ import annotations

import logging
import os
import sys

from octavo.engine.multiproc import receive_rank
from octavo.engine.plan_codec import PlanCodec
from octavo.engine.rank import RankServer


def main() -> int:
    peer, (config, files, level) = receive_rank()
    logging.basicConfig(level=level, format="%(levelname)s %(asctime)s rank %(name)s: %(message)s")
    from octavo.build_worker import build_local
    from octavo.features import payload_types

    code = RankServer(peer, lambda: build_local(config, files), PlanCodec(payload_types())).run()
    if code:  # destructors of tensors and graphs fail on a lost device
        logging.shutdown()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
