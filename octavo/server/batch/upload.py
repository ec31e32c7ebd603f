"""Parsing of an upload: `multipart/form-data` with one file (RFC 7578)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import IO

from python_multipart.exceptions import FormParserError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from octavo.server.errors import ApiError

_MAX_FIELDS = 16
_AROUND = 64 * 1024
"""Allowance in bytes for the other fields and the boundaries."""


@dataclass(frozen=True, slots=True)
class Upload:
    """One file in temporary storage, and the other form fields."""

    name: str
    content: IO[bytes]
    fields: Mapping[str, str]


async def read_upload(request: Request, max_bytes: int, *, flag: str = "--max-file-bytes") -> Upload:
    """Read the form field `file`. The caller closes `content`.

    Args:
        flag: the setting of `max_bytes`, for errors.

    Raises:
        ApiError: 415, not a form; 413, the file is larger than `max_bytes`; 400, something is missing or malformed.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ApiError(415, f"An upload must be multipart/form-data, got {kind or 'no content type'}.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes + _AROUND):
        raise _too_large(max_bytes, flag)
    parser = MultiPartParser(
        request.headers,
        _bounded(request.stream(), max_bytes, flag),
        max_files=1,
        max_fields=_MAX_FIELDS,
        max_part_size=8192,
    )
    try:
        form = await parser.parse()
    except (MultiPartException, FormParserError) as exc:  # Starlette before 1.7 passes on what its parser raises
        raise ApiError(400, f"The form can't be read: {exc}") from None
    except KeyError:
        raise ApiError(400, "The content type names no boundary; let the HTTP library write it.") from None
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise ApiError(400, "file is required; add it to the form as a file.", param="file")
    size = file.size or 0
    if size > max_bytes:
        file.file.close()
        raise _too_large(max_bytes, flag)
    fields = {name: value for name, value in form.items() if isinstance(value, str)}
    return Upload(file.filename or "upload", file.file, fields)


async def _bounded(stream: AsyncGenerator[bytes, None], max_bytes: int, flag: str) -> AsyncGenerator[bytes, None]:
    size = 0
    async for part in stream:
        size += len(part)
        if size > max_bytes + _AROUND:
            raise _too_large(max_bytes, flag)
        yield part


def _too_large(limit: int, flag: str) -> ApiError:
    return ApiError(
        413,
        f"The file is larger than the {limit:,} bytes that this server takes. "
        f"Upload a smaller one, or start the server with a larger {flag}.",
        param="file",
    )
