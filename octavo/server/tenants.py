"""`Tenants`: on whose behalf a request is made. Tenants share the engine under `--scheduling-policy fair`."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.parsing import tenant_name

_NAMED_KEY = re.compile(r"(\S+)\s+name=(.*)")
_HEADER = "header:"


class ApiKeys:
    """The accepted API keys; without keys, every request is accepted.

    Args:
        keys: each may be followed by ` name=NAME`, its tenant; several keys may have one. Without a name, the tenant
            is called after the key's digest.

    Raises:
        ConfigError: a name can't be one of a tenant.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._tenants = dict(_with_tenant(key) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def allow(self, headers: Headers) -> bool:
        """Return whether `Authorization: Bearer` or `x-api-key` contains a valid key. Takes constant time for wrong
        keys."""
        return not self._tenants or self.tenant(headers) is not None

    def tenant(self, headers: Headers) -> str | None:
        """Return the tenant of the valid key in the headers; None if there is none."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        shown = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        digests = [_digest(one) for one in shown if one]
        found = [known for one in digests for known in self._tenants if hmac.compare_digest(one, known)]
        return self._tenants[found[0]] if found else None


def _with_tenant(given: str) -> tuple[bytes, str]:
    named = _NAMED_KEY.fullmatch(given)
    if named is None:
        digest = _digest(given)
        return digest, f"key-{digest.hex()[:8]}"
    try:
        return _digest(named[1]), tenant_name(named[2].strip())
    except ValueError as error:
        raise ConfigError(f"An API key has name={named[2]}, but {error}.") from None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class Tenants:
    """Names the tenant of each request, as `--tenant-by` says; "" if there is none.

    By default it is the API key's, which a client can't invent.
    """

    def __init__(self, by: str, keys: ApiKeys) -> None:
        self._header = by.removeprefix(_HEADER) if by.startswith(_HEADER) else None
        self._by_user = by == "user"
        self._keys = keys

    def of_headers(self, headers: Headers) -> str:
        """Return the tenant that the headers of a request name.

        Raises:
            InvalidRequestError: the header's value can't be a name.
        """
        if self._header is not None:
            return _checked(headers.get(self._header) or "", self._header)
        return "" if self._by_user else self._keys.tenant(headers) or ""

    def of_body(self, body: Any, found: str) -> str:
        """Return the tenant that a body names if bodies do, else `found`, which the headers name.

        Raises:
            InvalidRequestError: the body's `user` can't be a name.
        """
        return _checked(getattr(body, "user", None) or "", "user") if self._by_user else found


def _checked(name: str, param: str) -> str:
    try:
        return tenant_name(name) if name else ""
    except ValueError as error:
        raise InvalidRequestError(f"{param} names a tenant, and {error}.", param=param, value=name[:80]) from None
