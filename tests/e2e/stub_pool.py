"""A server of several models whose processes are real, over engine cores without a model.

`python stub_pool.py STEP_SECONDS NAME,NAME [flags]`. A model named "broken" can't be loaded.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator

from stub_server import frontend_of, stub_core

from octavo.cli.flags.args import add_settings, server_from, values
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.flags.table import POOL_GROUPS, SERVER_GROUPS
from octavo.cli.serve import announce, pool_from
from octavo.config import EngineConfig, ServerConfig
from octavo.core.errors import ConfigError
from octavo.engine.client import CoreClient
from octavo.pool import child_main
from octavo.pool.run import run_pool
from octavo.pool.settings import ModelEntry
from octavo.text.frontend import Frontend


@contextlib.asynccontextmanager
async def open_frontend(engine: EngineConfig, server: ServerConfig) -> AsyncIterator[Frontend]:
    if engine.model.model == "broken":
        raise ConfigError("The weights take too much.")
    core = stub_core(float(os.environ["STUB_STEP_S"]))
    client = await CoreClient.start(core, max_unread_tokens=server.max_unread_tokens)
    try:
        yield frontend_of(client)
    finally:
        await client.close()


def main(names: list[str], flags: list[str]) -> int:
    parser = OctavoParser("stub", words="", description="A server of several models over stubs.")
    add_settings(parser, SERVER_GROUPS)
    add_settings(parser, POOL_GROUPS)
    found = values(parser, parser.parse_args(flags))
    server = server_from({target: value for target, value in found.items() if "served_model_name" not in target})
    entries = [ModelEntry(names=(name,), added=(), engine=EngineConfig.of(model=name), server=server) for name in names]
    return run_pool(entries, pool_from(found), server, [sys.executable, __file__, "child"], announce)


if __name__ == "__main__":
    if sys.argv[1] == "child":
        sys.exit(child_main.main(open_frontend))
    os.environ["STUB_STEP_S"] = sys.argv[1]
    sys.exit(main(sys.argv[2].split(","), sys.argv[3:]))
