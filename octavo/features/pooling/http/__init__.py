"""Routes that answer with vectors, labels and scores instead of text."""

from __future__ import annotations

from octavo.features.pooling.http.routes import BODIES, invocations, limits, routes

__all__ = ["BODIES", "invocations", "limits", "routes"]
