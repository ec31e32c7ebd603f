"""What is not a prompt is told in a sentence, before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.config.scheduler import SchedulerConfig
from octavo.python_api.inputs import as_list
from octavo.python_api.llm import LLM


@pytest.mark.parametrize("odd", [5, 5.0, None, object(), (text for text in ("a", "b"))])
def test_what_can_not_be_a_prompt(odd: Any) -> None:
    with pytest.raises(TypeError, match=f"prompts must be a text, token ids, .* got {type(odd).__name__}"):
        as_list(odd)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], "b"], [[1, 2], "b"]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        ([], []),
    ],
)
def test_one_prompt_or_several(given: Any, prompts: list[Any]) -> None:
    assert as_list(given) == prompts


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, "longest-first"),
        ({"scheduling_policy": None}, "longest-first"),
        ({"scheduling_policy": "fcfs"}, "fcfs"),
        ({"policy": "priority"}, "priority"),
    ],
    ids=str,
)
def test_longest_answers_go_first_unless_told_otherwise(given: dict[str, Any], policy: str, monkeypatch: Any) -> None:
    assert scheduler_of(given, monkeypatch).policy == policy


@pytest.mark.parametrize(
    ("given", "mode"), [({}, "throughput"), ({"performance_mode": "balanced"}, "balanced")], ids=str
)
def test_only_throughput_counts_unless_told_otherwise(given: dict[str, Any], mode: str, monkeypatch: Any) -> None:
    assert scheduler_of(given, monkeypatch).performance_mode == mode


def scheduler_of(given: dict[str, Any], monkeypatch: Any) -> SchedulerConfig:
    """Return the settings with which `LLM` would start its engine."""
    found = []

    class LoadedError(Exception):
        pass

    def engine(model: str | None, **settings: Any) -> None:
        settings = {name: value for name, value in settings.items() if name not in ("chat_template", "progress")}
        found.append(EngineConfig.of(**settings).scheduler)
        raise LoadedError

    monkeypatch.setattr("octavo.python_api.llm.LocalEngine", engine)
    with pytest.raises(LoadedError):
        LLM(**given)
    return found[0]
