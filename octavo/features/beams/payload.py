"""The feature's key in requests' options. There is no worker half, so no payload."""

from __future__ import annotations

NAME = "beams"
