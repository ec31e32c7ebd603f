"""Settings of the timelines."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core import quantities
from octavo.core.flag import setting
from octavo.features import FeatureSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSettings(FeatureSettings):
    """
    Attributes:
        request_history: ended requests whose timelines are kept, choices counted; 0 keeps no timelines at all.
    """

    request_history: int = setting(
        1024,
        "ended requests, choices counted, that `octavo why` and /debug/requests/ID explain; 0 explains none, running "
        "ones neither",
        read=quantities.natural,
        metavar="N",
    )


SETTINGS = TimelineSettings
