"""Profiles of an engine loop on the toy device: what is noted, when they end, and that nothing of them stays behind."""

from __future__ import annotations

import gzip
import json
import logging

import pytest

from octavo.cache.cache import KVCache
from octavo.core.errors import ConfigError, EngineStateError, InvalidRequestError
from octavo.core.params import SamplingParams
from octavo.core.profiling import from_environment, profile_settings
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.engine.profile import Profiler
from octavo.engine.toy import ToyDevice
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler


class EmptyTrace:
    """A `Tracer` that sees one thing."""

    def start(self):
        self.runs = True

    def stop(self, path):
        self.runs = False
        path.write_text('{"baseTimeNanoseconds": 1000, "traceEvents": [{"ph": "X", "name": "seen", "ts": 1}]}')


def make_loop(folder, *, depth=0, **settings):
    given = {"torch_profiler_dir": str(folder), **settings}
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=120, max_ahead=depth + 1)
    scheduler = Scheduler(KVCache(64, 4), limits, make_policy("fcfs"))
    profiler = Profiler(profile_settings(given), EmptyTrace())
    return EngineLoop(scheduler, ToyDevice(64, 4), depth, profiler=profiler)


def run(loop, *names, length=6):
    for name in names:
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        loop.add(GenerateRequest(id=name, tokens=[ord(name[0])] * 5, params=params))
    while loop.busy:
        loop.step()


def events(path):
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        return json.load(file)["traceEvents"]


@pytest.mark.parametrize("depth", [0, 1])
def test_the_trace_tells_what_each_step_did(tmp_path, depth):
    loop = make_loop(tmp_path / "deep" / "er", depth=depth)
    run(loop, "earlier")
    loop.start_profile("mine")
    run(loop, "a", "b")
    path = loop.stop_profile()
    run(loop, "later")

    assert path.startswith(str(tmp_path / "deep" / "er" / "mine-"))
    assert path.endswith(".pt.trace.json.gz")
    found = events(path)
    assert [one for one in found if one["name"] == "seen"]
    spans = [one for one in found if one.get("cat") == "octavo"]
    assert {one["name"] for one in spans} == {"step", "plan", "execute", "payload", "sample", "retire", "update"}
    executed = [one["args"] for one in spans if one["name"] == "execute"]
    assert executed == [
        {"requests": 2, "tokens": 10, "new_requests": 2},
        *[{"requests": 2, "tokens": 2, "new_requests": 0}] * 5,
    ]
    steps = [one for one in spans if one["name"] == "step"]
    assert [one["args"]["step"] for one in steps] == list(range(1, len(steps) + 1))
    assert steps[0]["args"]["tokens"] == 10
    for one in spans:
        assert any(s["ts"] <= one["ts"] and one["ts"] + one["dur"] <= s["ts"] + s["dur"] + 1e-3 for s in steps)
    assert [entry.name for entry in (tmp_path / "deep" / "er").iterdir()] == [path.rpartition("/")[2]]


def test_nothing_stays_behind(tmp_path):
    loop = make_loop(tmp_path)
    watched = (loop, loop._scheduler, loop._executor)
    before = [dict(vars(one)) for one in watched]
    loop.start_profile()
    assert "step" in vars(loop)
    loop.stop_profile()
    assert [set(vars(one)) for one in watched] == [set(one) for one in before]
    assert loop.stop_profile() == ""


def test_a_forgotten_profile_ends_itself(tmp_path, caplog):
    loop = make_loop(tmp_path, max_iterations=3, torch_profiler_use_gzip=False)
    loop.start_profile()
    with caplog.at_level(logging.WARNING):
        run(loop, "a", length=9)
    assert "the profile ends after 3 steps" in caplog.text
    (path,) = tmp_path.iterdir()
    assert len([one for one in events(str(path)) if one["name"] == "step"]) == 3
    assert loop.stop_profile() == ""


def test_its_time_is_bounded_while_nothing_runs(tmp_path, monkeypatch):
    loop = make_loop(tmp_path, max_seconds=5)
    loop.start_profile()
    loop.idle()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("octavo.engine.profile.time.monotonic", lambda began=loop._profiler._began: began + 5)
    loop.idle()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_trace_that_can_not_be_written_harms_no_request(tmp_path, caplog):
    loop = make_loop(tmp_path, max_iterations=2)
    loop.start_profile()
    tmp_path.rmdir()
    run(loop, "a")
    assert "failed to write the profile" in caplog.text
    assert "step" not in vars(loop)


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(EmptyTrace, "stop", lambda trace, path: None)  # as torch, which leaves its file out
    loop = make_loop(tmp_path)
    loop.start_profile()
    with pytest.raises(EngineStateError, match=f"can't be written to {tmp_path} .* make room"):
        loop.stop_profile()
    assert loop.stop_profile() == ""
    assert not list(tmp_path.iterdir())


def test_what_is_refused(tmp_path):
    loop = make_loop(tmp_path)
    for prefix in ("../x", "a b", "x" * 101):
        with pytest.raises(InvalidRequestError, match="profile_prefix"):
            loop.start_profile(prefix)
    loop.start_profile()
    with pytest.raises(EngineStateError, match="already"):
        loop.start_profile()
    loop.close()
    assert len(list(tmp_path.iterdir())) == 1

    limits = Limits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=120)
    plain = EngineLoop(Scheduler(KVCache(64, 4), limits, make_policy("fcfs")), ToyDevice(64, 4))
    with pytest.raises(EngineStateError, match="--profiler-config"):
        plain.start_profile()
    assert plain.stop_profile() == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"profiler": "torch"}, "torch_profiler_dir"),
        ({"profiler": "cuda", "torch_profiler_dir": "x"}, "profiler must be"),
        ({"torch_profiler_dir": "x", "max_iterations": 0}, "max_iterations must be a whole number"),
        ({"torch_profiler_dir": "x", "torch_profiler_with_stack": "yes"}, "true or false"),
        ({"torch_profiler_dir": "x", "max_steps": 3}, "no key 'max_steps'"),
    ],
)
def test_settings_that_can_not_be(given, message):
    with pytest.raises(ConfigError, match=message):
        profile_settings(given)


def test_settings_from_the_environment():
    assert profile_settings(from_environment({})) is None
    found = profile_settings(from_environment({"VLLM_TORCH_PROFILER_DIR": "/traces"}))
    assert str(found.folder) == "/traces"


def test_a_folder_that_can_not_be_written_to_is_told_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--profiler-config: the folder .*file/x can't be used .*torch_profiler_dir"):
        make_loop(tmp_path / "file" / "x")
