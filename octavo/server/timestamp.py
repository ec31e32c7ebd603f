"""Times in answers, in the form of RFC 3339."""

from __future__ import annotations

import datetime


def timestamp(seconds: float) -> str:
    """Return a time, in seconds since 1970, as a text in UTC."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")
