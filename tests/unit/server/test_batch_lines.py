"""Files of requests as various programs write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.server.batch.lines import Input, scan


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n  \n"])
@pytest.mark.parametrize("last", [True, False])
def test_lines_are_found_however_they_are_ended(tmp_path: Path, mark: bytes, end: bytes, last: bool) -> None:
    requests = [{"custom_id": f"Größe {i}", "url": "/v1/x", "body": {"i": i}} for i in range(3)]
    lines = [json.dumps(request, ensure_ascii=False).encode() for request in requests]
    path = tmp_path / "input.jsonl"
    path.write_bytes(mark + end.join(lines) + (end if last else b""))
    found = scan(path, ["/v1/x"], max_lines=3, max_line_bytes=1000)
    assert isinstance(found, Input)
    read = [found.read(number) for number in range(len(found))]
    assert [line.custom_id for line in read] == [request["custom_id"] for request in requests]
    assert [json.loads(bytes(line.body)) for line in read] == [request["body"] for request in requests]


def test_a_byte_order_mark_within_a_file_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(b'{"custom_id": "a", "url": "/v1/x", "body": {}}\n\xef\xbb\xbf{}')
    problems = scan(path, ["/v1/x"], max_lines=3, max_line_bytes=1000)
    assert isinstance(problems, list)
    assert [(problem.line, problem.code) for problem in problems] == [(2, "invalid_json_line")]
