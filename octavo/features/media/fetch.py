"""Get the bytes of an image, a video or audio that a request names by a URL: `data:`, `http(s):`, `file:`.

A server that fetches what clients name can be used to reach hosts that only it can reach. So a host's address is looked
up once, must be public unless the settings name the host, and is the one that is connected to. Redirects are followed
by the same rules.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

from octavo.core.errors import InvalidRequestError
from octavo.version import __version__

_REDIRECTS = 3
_CHUNK = 1 << 16
_EXAMPLES = {"image": "data:image/png", "audio": "data:audio/wav", "video": "data:video/mp4"}
_FRAMES = "data:video/jpeg;base64,"
_SHOWN = 120
"""Characters of a URL that errors show."""


@dataclass(frozen=True, slots=True)
class Fetcher:
    """What may be fetched; see `MediaSettings`.

    Attributes:
        modality: what it is, in flags and errors.
    """

    domains: tuple[str, ...]
    local_path: str
    timeout_s: float
    max_bytes: int
    modality: str = "image"

    def fetch(self, url: Any, param: str) -> bytes:
        """Return the bytes. Blocks up to the timeout.

        Raises:
            InvalidRequestError: the URL is malformed, may not be fetched, or can't be.
        """
        if not isinstance(url, str) or not url:
            raise InvalidRequestError(
                f"{param} must be a URL, such as {_EXAMPLES[self.modality]};base64,...", param=param
            )
        try:
            scheme = urlsplit(url[:_SHOWN]).scheme.lower()
        except ValueError:
            scheme = ""
        match scheme:
            case "data":
                return self.checked(_of_data(url, param), param)
            case "http" | "https":
                return self.checked(self._of_host(url, param), param)
            case "file":
                return self.checked(self._of_file(url, param), param)
        raise InvalidRequestError(
            f"{param} is {_shown(url)}; it must be a URL that begins with data:, http:, https: or file:.",
            param=param,
            value=_shown(url),
        )

    def frames(self, url: Any, most: int, param: str) -> list[bytes] | None:
        """Return the JPEG files of a URL that begins with data:video/jpeg;base64, where commas separate them; None for
        another URL.

        Args:
            most: files.

        Raises:
            InvalidRequestError: one is not valid base64, or they are too many, or too large together.
        """
        if not isinstance(url, str) or url[: len(_FRAMES)].lower() != _FRAMES:
            return None
        count = url.count(",", len(_FRAMES)) + 1
        if count > most:
            raise InvalidRequestError(
                f"{param} has {count:,} frames; video may have {most:,} (--max-video-frames). Send fewer frames.",
                param=param,
                value=count,
            )
        found = [_of_base64(one, param) for one in url[len(_FRAMES) :].split(",")]
        if sum(map(len, found)) > self.max_bytes:
            raise self._too_large(param)
        return found

    def checked(self, data: bytes, param: str) -> bytes:
        if len(data) > self.max_bytes:
            raise self._too_large(param)
        return data

    def _too_large(self, param: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{param} is larger than {self.max_bytes:,} bytes (--max-{self.modality}-bytes). Send a smaller file.",
            param=param,
        )

    # Files

    def _of_file(self, url: str, param: str) -> bytes:
        if not self.local_path:
            raise InvalidRequestError(
                f"{param} is a file:// URL, and this server reads no files. Start it with --allowed-local-media-path "
                f"DIR, or send the {self.modality} as a data: URL.",
                param=param,
                value=_shown(url),
            )
        parts = urlsplit(url)
        path = Path(os.fsdecode(unquote_to_bytes(parts.path)))
        try:
            real = path.resolve()
            inside = parts.netloc in ("", "localhost") and real.is_relative_to(self.local_path)
            if inside and real.is_file():
                with real.open("rb") as file:
                    return file.read(self.max_bytes + 1)
        except (OSError, ValueError):
            pass
        raise InvalidRequestError(  # the same whether there is a file outside of the folder or not
            f"{param} must name a file in the folder of --allowed-local-media-path; {_shown(url)} does not.",
            param=param,
            value=_shown(url),
        )

    # Hosts

    def _of_host(self, url: str, param: str) -> bytes:
        until = time.monotonic() + self.timeout_s
        for _ in range(_REDIRECTS + 1):
            try:
                found = self._get(url, until, param)
            except InvalidRequestError:
                raise
            except Exception as exc:  # sockets, TLS and HTTP raise many types
                late = isinstance(exc, TimeoutError) or time.monotonic() >= until
                why = (
                    f"it took longer than {self.timeout_s:g} s (--{self.modality}-fetch-timeout)" if late else str(exc)
                )
                raise _not_fetched(url, why, param) from None
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise _not_fetched(url, f"it redirects more than {_REDIRECTS} times", param)

    def _get(self, url: str, until: float, param: str) -> bytes | str:
        """Return the body of the answer, or where it redirects to."""
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        if parts.scheme not in ("http", "https") or not host:
            raise _not_fetched(url, "it leads to another kind of URL than http or https", param)
        addresses = self._addresses(host, parts.port or (443 if parts.scheme == "https" else 80), url, param)
        link = _Connection(host, addresses, until, secure=parts.scheme == "https")
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            link.request("GET", target, headers={"User-Agent": f"octavo/{__version__}", "Accept": f"{self.modality}/*"})
            with contextlib.closing(link.getresponse()) as answer:
                if answer.status in (301, 302, 303, 307, 308) and (place := answer.getheader("Location")):
                    return place
                if answer.status != 200:
                    raise _not_fetched(url, f"the host answered {answer.status} {answer.reason}", param)
                return self._body(answer, link, until)
        finally:
            link.close()

    def _body(self, answer: http.client.HTTPResponse, link: _Connection, until: float) -> bytes:
        """Read up to the limit of bytes and one more."""
        data = bytearray()
        while len(data) <= self.max_bytes:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if link.sock is not None:
                link.sock.settimeout(left)
            piece = answer.read1(_CHUNK)
            if not piece:
                break
            data += piece
        return bytes(data)

    def _addresses(self, host: str, port: int, url: str, param: str) -> list[tuple[str, int]]:
        """Return the addresses to connect to; refuse a host that may not be."""
        named = host.lower() in self.domains
        if self.domains and not named:
            raise InvalidRequestError(
                f"{param}: files may be fetched from {', '.join(self.domains)} (--allowed-media-domains), and not "
                f"from {host}. Send the {self.modality} as a data: URL.",
                param=param,
                value=_shown(url),
            )
        found = [str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        if not named and not all(_is_public(one) for one in found):
            raise InvalidRequestError(
                f"{param}: {host} has an address that is not public, so it is not connected to. Name the host in "
                f"--allowed-media-domains, or send the {self.modality} as a data: URL.",
                param=param,
                value=_shown(url),
            )
        return [(address, port) for address in dict.fromkeys(found)]


class _Connection(http.client.HTTPConnection):
    """A connection to one of some addresses, whatever the host's name stands for later."""

    def __init__(self, host: str, addresses: Sequence[tuple[str, int]], until: float, *, secure: bool) -> None:
        default, port = 443 if secure else 80, addresses[0][1]
        super().__init__(host, None if port == default else port)
        self._host, self._secure, self._addresses, self._until = host, secure, addresses, until

    def connect(self) -> None:
        self.sock = self._connected()
        if self._secure:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self._host)

    def _connected(self) -> socket.socket:
        """Connect to the first address that answers: a host may have some that can't be reached from here."""
        for number, address in enumerate(self._addresses, start=1):
            try:
                return socket.create_connection(address, timeout=max(0.001, self._until - time.monotonic()))
            except OSError:
                if number == len(self._addresses):
                    raise
        raise OSError("the host has no address")


def _of_data(url: str, param: str) -> bytes:
    """Return the content of a data URL (RFC 2397)."""
    head, comma, body = url.partition(",")
    if not comma:
        raise InvalidRequestError(f"{param} is a data: URL without a comma before its data.", param=param)
    if not head.endswith(";base64"):
        return unquote_to_bytes(body)
    return _of_base64(body, param)


def _of_base64(body: str, param: str) -> bytes:
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequestError(f"{param} is not valid base64: {exc}. Encode the file again.", param=param) from None


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return (found if mapped is None else mapped).is_global and not found.is_multicast


def _not_fetched(url: str, why: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param}: {_shown(url)} could not be fetched: {why}. Check the URL, or send the content as a data: URL.",
        param=param,
        value=_shown(url),
    )


def _shown(url: str) -> str:
    return url if len(url) <= _SHOWN else url[:_SHOWN] + "..."
