"""Traces: what is read of them, what is refused, and the requests that are made of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.load import LoadPattern
from octavo.bench.samples import PromptSource
from octavo.bench.traces import read_trace, samples_of
from octavo.core.errors import ConfigError


def write(folder: Path, *lines: dict[str, Any], end: str = "\n") -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + end)
    return path


def line(at: float = 0, prompt: int = 20, answer: int = 5, **more: Any) -> dict[str, Any]:
    return {"timestamp": at, "input_length": prompt, "output_length": answer, **more}


def test_requests_come_by_arrival_from_the_first_on(tmp_path: Path) -> None:
    path = write(tmp_path, line(3000, 1), line(1000, 2), line(2000, 3))
    assert [(one.at, one.prompt_tokens) for one in read_trace(path)] == [(0, 2), (1, 3), (2, 1)]
    assert [one.at for one in read_trace(path, speed=4, most=2)] == [0, 0.25]


def test_a_published_line_has_blocks_of_512_and_no_max_tokens(tmp_path: Path) -> None:
    (one,) = read_trace(write(tmp_path, line(27482, 6955, 52, hash_ids=[46, 47, 48])))
    assert (one.block_size, one.max_tokens, one.stops, one.n) == (512, None, True, 1)


def test_only_an_answer_of_full_length_does_not_end_by_itself(tmp_path: Path) -> None:
    path = write(tmp_path, *(line(finish=finish, max_tokens=9) for finish in ("stop", "abort", "length")))
    assert [one.stops for one in read_trace(path)] == [True, True, False]


def test_requests_without_an_answer_are_left_out(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path, line(answer=0), line()))) == 1
    with pytest.raises(ConfigError, match="no request with an answer"):
        read_trace(write(tmp_path, line(answer=0)))


def test_a_file_that_is_cut_off_is_valid(tmp_path: Path) -> None:
    whole = json.dumps(line(5)) + "\n"
    for cut in range(1, len(whole)):
        path = write(tmp_path, line(), end="\n" + whole[:cut])
        assert len(read_trace(path)) in (1, 2)


@pytest.mark.parametrize(
    "bad",
    ["{", "[]", '{"timestamp": 0}', json.dumps(line(prompt=0)), json.dumps(line(answer=-1)), json.dumps(line(n=0))],
)
def test_other_lines_are_refused_by_number(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "trace"
    path.write_text("\n".join([json.dumps(line()), bad, json.dumps(line())]))
    with pytest.raises(ConfigError, match="trace:2 is not a line of a trace"):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none can't be read: No such file"):
        read_trace(tmp_path / "none")


def test_prompts_begin_alike_where_the_traces_do(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        line(0, 40, 3, block_size=16, hash_ids=[1, 2, 3]),
        line(1, 35, 4, block_size=16, hash_ids=[1, 9, 8], n=2, priority=7),
        line(2, 5, 4, block_size=16),
    )
    source = PromptSource(random.Random(0), None, as_text=False)
    first, second, third = samples_of(read_trace(path), source)
    assert [one.prompt_tokens for one in (first, second, third)] == [40, 35, 5]
    assert first.prompt[:16] == second.prompt[:16] != third.prompt[:16]
    assert first.prompt[16:32] != second.prompt[16:32]
    assert [one.output_tokens for one in (first, second)] == [3, 4]
    assert (first.fields, second.fields) == ({}, {"n": 2, "temperature": 1.0, "priority": 7})


def test_times_take_the_place_of_a_rate() -> None:
    assert list(LoadPattern(times=[0, 1.5, 2]).delays(3, random.Random(0))) == [0, 1.5, 2]
