"""Logits processors are found by name, as entry points and as objects; whatever is wrong is said before the start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.features import FeatureContext, build_engine_halves, build_worker_halves
from octavo.features.logits_processors import LogitsProcessor, ProcessorContext
from octavo.features.logits_processors.interface import AdapterLogitsProcessor, Row
from octavo.features.logits_processors.load import LoadedProcessor, load
from octavo.features.logits_processors.persistent import PersistentBatch
from octavo.features.logits_processors.settings import LogitsProcessorsSettings

MODULE = """
from octavo.features.logits_processors import LogitsProcessor

class Plain(LogitsProcessor):
    def apply(self, logits, rows):
        return logits + 1

class Curious(Plain):
    def __init__(self, context):
        self.context = context

class Broken(Plain):
    def __init__(self):
        raise RuntimeError("no licence")

class Demanding(Plain):
    def __init__(self, a, b):
        pass

class Abstract(LogitsProcessor):
    pass

class Batch:
    def __init__(self, vllm_config, device, is_pin_memory):
        self.size = vllm_config.model_config.get_vocab_size()
    def is_argmax_invariant(self):
        return True
    def update_state(self, update):
        pass
    def apply(self, logits):
        return logits

def forbid(output_ids, logits):
    logits[0] = float("-inf")

class Inner:
    Nested = Plain

number = 7
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, with the module `their_processors`."""
    (tmp_path / "their_processors.py").write_text(MODULE)
    (tmp_path / "their_fault.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_processors", raising=False)
    return tmp_path


def install(place: Path, group: str, **points: str) -> None:
    info = place / f"{group.split('.')[0]}_plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {group.split('.')[0]}-plugins\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


def context(*given: Any, **more: Any) -> FeatureContext:
    def no_tokenizer() -> Any:
        raise AssertionError("nobody asked for it")

    settings = {"logits_processors": LogitsProcessorsSettings(logits_processors=given)}
    return FeatureContext(
        vocab_size=5, eos_token_ids=(), load_tokenizer=no_tokenizer, model="m", settings=settings, **more
    )


def by_name(*given: Any) -> dict[str, LogitsProcessor]:
    return {one.name: one.processor for one in load(context(*given))}


def test_names_lead_to_classes_and_functions(place: Path) -> None:
    found = by_name("their_processors:Curious", "their_processors:Inner.Nested", "their_processors:forbid")
    curious, nested, forbid = found.values()
    assert next(iter(found)) == "--logits-processors their_processors:Curious"
    assert curious.context.vocab_size == 5  # type: ignore[attr-defined]
    assert curious.context.device == torch.device("cpu")  # type: ignore[attr-defined]
    assert type(nested).__name__ == "Plain"
    row = Row(SamplingParams(), [1], [2])
    logits = torch.zeros(1, 5)
    assert forbid.accepts(row.params)
    assert forbid.alone
    assert forbid.apply(logits, [row]) is None
    assert logits.tolist() == [[float("-inf"), 0, 0, 0, 0]]


def test_the_batch_interface_of_vllm_is_adapted(place: Path) -> None:
    (batch,) = by_name("their_processors:Batch").values()
    assert isinstance(batch, PersistentBatch)
    assert batch.accepts(SamplingParams(temperature=1))
    assert not batch.accepts(SamplingParams(temperature=0)), "it leaves the most likely token alone"


def test_python_objects(place: Path) -> None:
    class Mine(AdapterLogitsProcessor):
        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            return (lambda prompt, output, logits: logits * 2) if params.top_k == 3 else None

    class Theirs:
        """As vLLM's adapter is seen from outside."""

        def update_state(self, update: Any) -> None:
            raise AssertionError("each request has its own function")

        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            return lambda output, logits: logits * 3

    made = Mine()
    mine, theirs, third = by_name(made, Theirs, lambda prompt, output, logits: logits).values()
    assert mine is made
    assert not mine.accepts(SamplingParams())
    assert mine.accepts(SamplingParams(top_k=3))
    row = Row(SamplingParams(), [1], [2])
    assert theirs.apply(torch.ones(1, 5), [row]).tolist() == [[3] * 5]  # type: ignore[union-attr]
    assert third.accepts(SamplingParams())


def test_entry_points_of_both_groups_come_first(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(place, "octavo.logits_processors", b="their_processors:Plain", a="their_processors:forbid")
    install(place, "vllm.logits_processors", v="their_processors:Batch", w="their_fault:Any")
    assert list(by_name("their_processors:Curious")) == ["v", "a", "b", "--logits-processors their_processors:Curious"]
    assert "left out: The logits processor w of the package vllm-plugins" in caplog.text
    ours = context()
    for build in (build_engine_halves, build_worker_halves):
        assert "logits_processors" in [half.name for half in build(ours)]
        encoders = [half.name for half in build(context(whole_prompts=True))]
        assert "logits_processors" not in encoders, "encoders have no logits"
    assert load(ours) is load(ours), "the halves share processors"


def test_a_broken_package_is_named(place: Path) -> None:
    install(place, "octavo.logits_processors", w="their_fault:Any")
    with pytest.raises(ConfigError, match=r"w of the package octavo-plugins.*a_module_that_is_not_there.*uninstall"):
        load(context())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("their_processors", "must have the form module:Class"),
        ("their_processors:", "must have the form module:Class"),
        ("not_a_module:Plain", "the module not_a_module can't be imported: ModuleNotFoundError.*PYTHONPATH"),
        ("their_fault:Plain", "the module their_fault can't be imported.*a_module_that_is_not_there"),
        ("their_processors:plain", r"their_processors has no plain\. Did you mean Plain\?"),
        ("their_processors:number", "is not a logits processor: it must be"),
        ("their_processors:Broken", "can't be created: RuntimeError: no licence"),
        ("their_processors:Demanding", "its constructor must take nothing, a ProcessorContext, or"),
        ("their_processors:Abstract", "can't be created: TypeError"),
    ],
)
def test_errors_name_the_flag_and_the_value(place: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)^--logits-processors '?{name}.*{says}"):
        load(context(name))


def test_without_processors_there_is_no_feature() -> None:
    assert load(context()) == []
    assert LoadedProcessor("x", by_name(lambda output, logits: logits).popitem()[1]).validate is None
    with pytest.raises(TypeError):
        ProcessorContext(vocab_size=1)  # type: ignore[call-arg]
