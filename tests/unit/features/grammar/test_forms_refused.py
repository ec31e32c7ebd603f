"""Forms of output that an engine without the feature refuses, and settings of forms that there are not."""

from __future__ import annotations

from typing import Any

import pytest
from server_kit import HELLO, ask_now, make_house, saying

from octavo.config import EngineConfig
from octavo.core.errors import ConfigError

CASES: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
    ({"guided_json": {}}, "guided_json"),
    ({"guided_regex": "a+"}, "guided_regex"),
    ({"guided_choice": ["a"]}, "guided_choice"),
    ({"guided_grammar": "x"}, "guided_grammar"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), CASES, ids=lambda case: str(case)[:60])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", HELLO), ("/v1/completions", {"prompt": "a"})])
def test_the_field_is_named(path: str, body: dict[str, Any], fields: dict[str, Any], param: str, stream: bool) -> None:
    answer = ask_now(make_house(saying("x")).app, path, body | fields | {"stream": stream})
    assert answer.status == 400, answer.body
    assert answer.error()["param"] == param


def test_tools_need_it() -> None:
    body = HELLO | {"tools": [{"type": "function", "function": {"name": "f"}}]}
    answer = ask_now(make_house(saying("x")).app, "/v1/chat/completions", body)
    assert (answer.status, answer.error()["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"backend": "regexes"}, "backend: 'regexes' is not supported; it may be 'auto'"),
        ({"disable_any_whitespace": 1}, "disable_any_whitespace: 1 must be true or false"),
        ({"bakend": "auto"}, "bakend: there is no such field; those are"),
    ],
)
def test_a_setting_that_can_not_be_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig.of(structured_outputs_config=config)
