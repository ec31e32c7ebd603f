"""A folder for files and batches belongs to one server at a time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from batch_kit import get, running
from server_kit import make_house, saying

from octavo.config import ServerConfig
from octavo.server.batch.store import BatchStore, FolderInUseError

HOLDER = """
import sys
from pathlib import Path
from octavo.server.batch.store import BatchStore
store = BatchStore(Path(sys.argv[1]))
store.open()
print("open", flush=True)
sys.stdin.read()
"""


def test_a_folder_is_free_once_its_server_closes_it(tmp_path: Path) -> None:
    first, second = BatchStore(tmp_path), BatchStore(tmp_path)
    with ThreadPoolExecutor(1) as elsewhere:  # the server opens and closes it on whichever thread is free
        elsewhere.submit(first.open).result()
        with pytest.raises(FolderInUseError):
            second.open()
        first.close()
        second.open()
        second.close()
    assert (tmp_path / "lock").exists()


def test_the_folder_of_a_killed_server_is_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        store = BatchStore(tmp_path)
        with pytest.raises(FolderInUseError):
            store.open()
        holder.kill()
        holder.wait()
        store.open()
        store.close()


def test_a_second_server_says_what_to_do(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = (make_house(saying("Fine"), ServerConfig(jobs_dir=str(tmp_path))).app for _ in range(2))
        async with running(first):
            assert (await get(first, "/v1/files")).status == 200
            async with running(second):
                refused = await get(second, "/v1/files")
                assert refused.status == 503
                assert "--jobs-dir" in refused.error()["message"]
        async with running(second_try := make_house(saying("Fine"), ServerConfig(jobs_dir=str(tmp_path))).app):
            assert (await get(second_try, "/v1/files")).status == 200

    asyncio.run(scenario())
