"""Request bodies in the OpenAPI document. The routes read their bodies themselves, so FastAPI can't derive them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from octavo.server.schema.limits import narrow

_REF = "#/components/schemas/{model}"


STREAM: dict[str, Any] = {
    "responses": {
        "200": {
            "description": "The whole answer; or, with `stream`, its parts as server-sent events.",
            "content": {"application/json": {"schema": {}}, "text/event-stream": {"schema": {"type": "string"}}},
        }
    }
}
"""Response part of `openapi_extra` for routes that can stream."""


def describe(body: type[BaseModel], *, streams: bool = False) -> dict[str, Any]:
    """Return a route's `openapi_extra`: its body, and its response if that may be a stream."""
    schema = {"$ref": _REF.format(model=body.__name__)}
    said = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    return said | STREAM if streams else said


def install(app: FastAPI, bodies: list[type[BaseModel]], limits: Mapping[str, list[dict[str, Any]]]) -> None:
    """Add `bodies` to the app's OpenAPI document, restricted by `limits` from `limits.py`."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            defined = copy.deepcopy(definitions.get("$defs", {}))
            for name, schema in defined.items():
                for field, part in schema.get("properties", {}).items():
                    narrow(part, [*limits.get(field, ()), *limits.get(f"{name}.{field}", ())])
            schemas.update(defined)
            for path, methods in document["paths"].items():
                for operation in methods.values():
                    _declare(operation, re.findall(r"{(\w+)}", path))
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to change it


def _declare(operation: dict[str, Any], names: list[str]) -> None:
    """Declare the parameters of a path that its route reads from the request itself."""
    known = operation.setdefault("parameters", []) if names else []
    declared = {one["name"] for one in known}
    form = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    known += [{"name": name, **form} for name in names if name not in declared]
