"""`PrefillServers`: has other servers compute prompts, over their HTTP API."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import msgspec

from octavo.features.kv_transfer.offer import PARAM, Offer
from octavo.features.kv_transfer.settings import is_loopback

log = logging.getLogger(__name__)

_AT_ONCE = 64
"""Most prompts that are with other servers; further ones wait here."""
_PAUSE_S, _LONGEST_S = 5.0, 60.0
"""Pause after a failure; it doubles with each further failure, up to the longest."""
_REFUSED_S = 60.0
"""Pause of a server whose blocks can't be used."""
_OF_THE_PROMPT = 400, 413, 422
"""Statuses that mean one prompt, such as one that is too long for the server."""
_MOST_ERROR_BYTES = 2000


class AskedError(Exception):
    """A server did not compute a prompt. The text says why.

    Attributes:
        pauses: the server should be paused, since further prompts would probably fail, too.
    """

    def __init__(self, text: str, *, pauses: bool = True) -> None:
        super().__init__(text)
        self.pauses = pauses


class _Choice(msgspec.Struct):
    """An answer of /v1/completions, as far as it is read."""

    kv_transfer_params: dict[str, object] | None = None


@dataclass(slots=True, eq=False)
class _Server:
    """
    Attributes:
        tokens: of prompts that it computes for this engine.
        again: when it may be asked again, on the clock.
        failures: in a row. If there are any, the server gets one prompt at a time, so that few requests wait for a
            server that hangs.
    """

    url: str
    parts: SplitResult
    tokens: int = 0
    again: float = 0.0
    failures: int = 0

    @property
    def host(self) -> str:
        return self.parts.hostname or ""

    def may_be_asked(self, now: float) -> bool:
        return self.again <= now and not (self.failures and self.tokens)


class Asked:
    """A prompt that another server is to compute.

    Attributes:
        offer: its answer; None for none: then the prompt is computed here.
        server: the URL of the server that computes it; "" before.
        since: when it was asked for, in seconds of `time.monotonic()`.
    """

    def __init__(self, tokens: Sequence[int], salt: str, priority: int) -> None:
        self.tokens, self.salt, self.priority = tokens, salt, priority
        self.offer: Offer | None = None
        self.server = ""
        self.since = time.monotonic()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._given_up = False
        self.ended: Future[None] = Future()

    @property
    def done(self) -> bool:
        return self.ended.done()

    @property
    def given_up(self) -> bool:
        return self._given_up

    def begin(self, connection: socket.socket) -> None:
        """It is being computed at the end of this connection."""
        with self._lock:
            self._socket = connection
        if self._given_up:
            self.give_up()

    def give_up(self) -> None:
        """Cancel the request: close the connection, so that the server aborts it."""
        with self._lock:
            self._given_up = True
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


class PrefillServers:
    """
    Args:
        urls: of the servers.
        api_key: theirs; None for none.
        timeout: seconds that a prompt may take.
        clock: seconds.

    Attributes:
        num_asked, num_failed: prompts so far.
    """

    def __init__(
        self,
        urls: Sequence[str],
        api_key: str | None,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._servers = [_Server(url.rstrip("/"), urlsplit(url)) for url in urls]
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self._clock = clock
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="octavo-prefill")
        self.num_asked = self.num_failed = 0

    def ask(self, tokens: Sequence[int], salt: str, priority: int) -> Asked:
        """Have one of the servers compute a prompt.

        Args:
            salt: the prompt's namespace; see `GenerateRequest`.
        """
        asked = Asked(tokens, salt, priority)
        self.num_asked += 1
        self._threads.submit(self._run, asked)
        return asked

    def refuse(self, asked: Asked) -> None:
        """Pause the server of this offer, which does not match. Its other offers would not match either."""
        for server in self._servers:
            if server.url == asked.server:
                server.again = self._clock() + _REFUSED_S

    def _pause(self, server: _Server) -> None:
        """Pause a server. Failures during a pause don't extend it."""
        with self._lock:
            now = self._clock()
            if server.again <= now:
                server.failures += 1
                server.again = now + min(_PAUSE_S * 2 ** (server.failures - 1), _LONGEST_S)

    def _count_failed(self) -> None:
        with self._lock:
            self.num_failed += 1

    def _run(self, asked: Asked) -> None:
        """Ask one server after the other, the one with the fewest tokens first, until one has computed the prompt."""
        errors: dict[str, str] = {}
        try:
            while not asked.given_up and (server := self._take(asked, errors)) is not None:
                try:
                    asked.offer = self._post(server, asked)
                    server.failures = 0
                    return
                except AskedError as error:
                    errors[server.url] = str(error)
                    if error.pauses:
                        self._pause(server)
                finally:
                    with self._lock:
                        server.tokens -= len(asked.tokens)
            if not asked.given_up:
                self._count_failed()
                log.log(
                    logging.WARNING if errors else logging.DEBUG,
                    "no prefill server computed a prompt of %d tokens, so it is computed here: %s",
                    len(asked.tokens),
                    "; ".join(f"{url}: {error}" for url, error in errors.items())
                    or "all of them are paused after failures",
                )
        except Exception:  # in a thread, whose end the request waits for
            self._count_failed()
            log.exception("failed to ask prefill servers; a prompt is computed here")
        finally:
            asked.ended.set_result(None)

    def _take(self, asked: Asked, tried: Container[str]) -> _Server | None:
        """Return the next server to ask; None if there is none, or no time left."""
        with self._lock:
            now = self._clock()
            ready = [one for one in self._servers if one.may_be_asked(now) and one.url not in tried]
            if not ready or now - asked.since > self._timeout:
                return None
            server = min(ready, key=lambda one: one.tokens)
            server.tokens += len(asked.tokens)
            asked.server = server.url
            return server

    def _post(self, server: _Server, asked: Asked) -> Offer | None:
        """Return a server's offer; None if it keeps no block of the prompt.

        Raises:
            AskedError: it did not compute the prompt.
        """
        body = {
            "prompt": asked.tokens,
            "max_tokens": 1,
            "temperature": 0,
            PARAM: {"do_remote_decode": True},
        }
        body |= {"cache_salt": asked.salt} if asked.salt else {}
        body |= {"priority": asked.priority} if asked.priority else {}
        kind = http.client.HTTPSConnection if server.parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(server.host, server.parts.port, timeout=self._timeout)
        try:
            connection.connect()
            asked.begin(connection.sock)
            connection.request("POST", f"{server.parts.path}/v1/completions", msgspec.json.encode(body), self._headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise AskedError(str(error) or type(error).__name__) from None
        finally:
            connection.close()
        if response.status != http.client.OK:
            text = f"status {response.status}: {answer[:_MOST_ERROR_BYTES].decode(errors='replace')}"
            raise AskedError(text, pauses=response.status not in _OF_THE_PROMPT)
        return offer_of(answer, server.host)


def offer_of(answer: bytes, host: str) -> Offer | None:
    """Read the answer of a server at this host; None if it keeps no block of the prompt.

    Raises:
        AskedError: its blocks can't be fetched.
    """
    try:
        found = msgspec.json.decode(answer, type=_Choice).kv_transfer_params
        if found is None:
            raise AskedError(f"its answer has no {PARAM}; start it with --kv-transfer-config")
        if not found.get("do_remote_prefill"):
            return None
        offer = msgspec.convert(found, Offer)
    except msgspec.MsgspecError as error:
        raise AskedError(f"its answer is not that of an Octavo server: {error}") from None
    if is_loopback(offer.remote_host) and not is_loopback(host):
        raise AskedError(
            f"it sends KV blocks from {offer.remote_host}, which only its own machine reaches; set kv_ip of its "
            "--kv-transfer-config to an address that this machine reaches"
        )
    ranks = [(named or host, port) for named, port in offer.remote_ranks]
    return msgspec.structs.replace(offer, remote_host=ranks[0][0], remote_ranks=ranks)
