"""`SiblingProcesses`: an API process's view of the server's other processes."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.board import Board
from octavo.server.siblings.link import Relayed, ask


class SiblingProcesses:
    """The other processes of a server.

    Args:
        index: this process's number; process 0 leads and holds state that can exist only once.
        count: number of all processes.
        folder: holds their socket files and their shared board; private to them.
    """

    def __init__(self, index: int, count: int, folder: Path) -> None:
        self.index = index
        self.others = [number for number in range(count) if number != index]
        self.board = Board(index, count, folder / "board")
        self._folder = folder

    @property
    def leads(self) -> bool:
        return self.index == 0

    def path(self, index: int) -> Path:
        """Return the socket file of a process."""
        return self._folder / f"api-{index}.sock"

    def relayed(self, request: Request, index: int = 0) -> Response:
        """Return another process's response to a request."""
        return Relayed(self.path(index), request.state.request_id)

    async def having(self, url: str, request_id: str) -> int | None:
        """Return the process that has something at a URL; None if none has."""
        asked = (ask(self.path(number), "GET", url, request_id) for number in self.others)
        for number, answer in zip(self.others, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answer, tuple) and answer[0] == HTTPStatus.OK:
                return number
        return None

    async def first(self, method: str, url: str, request_id: str) -> Response | None:
        """Ask the other processes. Return the first response other than "not found"; None if there is none."""
        answers = (ask(self.path(number), method, url, request_id) for number in self.others)
        for answer in await asyncio.gather(*answers, return_exceptions=True):
            if isinstance(answer, tuple) and answer[0] != 404:
                status, body = answer
                return Response(body, status, media_type="application/json")
        return None
