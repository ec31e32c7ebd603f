"""Routes that answer with vectors, labels and scores instead of text."""

from __future__ import annotations

from octavo.features.pooling.http.routes import BODIES, limits, routes

__all__ = ["BODIES", "limits", "routes"]
