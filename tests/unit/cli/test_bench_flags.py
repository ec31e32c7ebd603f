"""`octavo bench serve`: what its flags mean, and which values are refused."""

from __future__ import annotations

import pytest

from octavo.cli.bench.results import ReportedFigures, parse_result_flags
from octavo.cli.bench.serve import make_parser, parse_headers, request_body
from octavo.core.errors import ConfigError


def test_what_is_told_by_default() -> None:
    assert parse_result_flags(make_parser().parse_args([])) == ReportedFigures(["ttft", "tpot", "itl"], [99.0], {})


def test_percentiles_and_goals() -> None:
    argv = ["--percentile-metrics", "e2el", "--metric-percentiles", "50,90.5", "--goodput", "ttft:200", "tpot:0.5"]
    wanted = parse_result_flags(make_parser().parse_args(argv))
    assert wanted == ReportedFigures(["e2el"], [50.0, 90.5], {"ttft": 200.0, "tpot": 0.5})


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--percentile-metrics", "ttft,speed"], "not speed"),
        (["--metric-percentiles", "99,most"], "numbers such as 50,99"),
        (["--metric-percentiles", "101"], r"lie in \[0, 100\]"),
        (["--goodput", "ttft:200", "itl:5"], "'itl:5' must be"),
        (["--goodput", "ttft"], "'ttft' must be"),
        (["--goodput", "ttft:soon"], "'ttft:soon' must be"),
    ],
)
def test_a_result_that_can_not_be(argv: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_result_flags(make_parser().parse_args(argv))


def test_what_goes_with_every_request() -> None:
    argv = ["--header", "X-A=b=c", "--api-key", "k", "--top-p", "0.9", "--ignore-eos", "--extra-body", '{"top_p": 1}']
    args = make_parser().parse_args(argv)
    assert parse_headers(args) == {"X-A": "b=c", "Authorization": "Bearer k"}
    assert request_body(args) == {"temperature": 0.0, "top_p": 1, "ignore_eos": True}
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        parse_headers(make_parser().parse_args(["--header", "X-A"]))
    with pytest.raises(ConfigError, match="JSON object"):
        request_body(make_parser().parse_args(["--extra-body", "[1]"]))
