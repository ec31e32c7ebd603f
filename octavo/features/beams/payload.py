"""The name by which requests' options call the feature. Nothing is sent to a worker half."""

from __future__ import annotations

NAME = "beams"
