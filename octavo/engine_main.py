"""`python -m octavo.engine_main`: an engine core's process. Started by `CoreProcess`, never by hand."""

from __future__ import annotations

import logging
import sys

from octavo.engine.core_server import CoreServer
from octavo.engine.process import receive_payload


def main() -> int:
    address, (config, files, log_level) = receive_payload()
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(asctime)s %(name)s: %(message)s")
    server = CoreServer(address)
    from octavo.build import build_core

    return server.run(lambda on_phase: build_core(config, files, on_phase))


if __name__ == "__main__":
    sys.exit(main())
