"""The engine half of adapters on the toy device: what waits for what, what steps are told, and what calls answer."""

from __future__ import annotations

import random
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
from lora_toy import LoraDevice, ToyWorker, fake_files, folders, option

from octavo.cache.cache import KVCache
from octavo.core.errors import EngineStateError, InvalidRequestError, ModelFileError, ModelNotFoundError
from octavo.core.output import FinishReason, TokenDelta
from octavo.core.params import SamplingParams
from octavo.core.pausing import PauseMode, SleepTag
from octavo.core.plan import StepPlan
from octavo.core.request import GenerateRequest
from octavo.engine.executor import FixedWorker
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyStep
from octavo.features.lora import names
from octavo.features.lora.engine import LoraEngine
from octavo.features.lora.payload import NAME
from octavo.features.lora.requests import gone
from octavo.features.lora.settings import LoraSettings
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    fake_files(monkeypatch)
    return folders(tmp_path, {"a": 1, "b": 2, "c": 3, "head": 1, "gain": 1})


class Recording(LoraDevice):
    """Keeps the plans."""

    plans: list[StepPlan]

    def forward(self, plan: StepPlan) -> ToyStep:
        self.plans.append(plan)
        return super().forward(plan)


class SleepyWorker(FixedWorker):
    """A worker that can sleep; its executor is always the same."""

    can_sleep = True
    device: Recording
    host: ToyWorker

    def executor(self) -> Any:
        self.host.asleep = False
        return self.device

    def sleep(self, level: int) -> None:
        self.host.asleep = True

    def wake_up(self, part: SleepTag) -> None:
        pass


class House:
    """An engine with adapters, driven by the test."""

    def __init__(self, paths: dict[str, str], num_blocks: int = 40, depth: int = 1, **settings: Any) -> None:
        self.now = 0.0
        self.worker = ToyWorker(random.Random(0))
        modules = tuple(f"{name}={path}" for name, path in paths.items())
        self.hook = LoraEngine(LoraSettings(**{"lora_modules": modules} | settings), lambda: self.now)
        limits = Limits(max_num_seqs=6, max_num_batched_tokens=16, max_model_len=80, max_ahead=depth + 1)
        self.scheduler = Scheduler(KVCache(num_blocks, 4), limits, make_policy("fcfs"), hooks=[self.hook])
        self.device = Recording(num_blocks, 4, mover=self.worker.mover(latency=1.0))
        self.device.plans = []
        self.device.prepare(self.uid_in, self.worker)
        sleepy = SleepyWorker()
        sleepy.device, sleepy.host = self.device, self.worker
        self.loop = EngineLoop(self.scheduler, self.device, depth, worker=sleepy)
        self.scheduler.attach(self.worker.call)
        self.ends: list[str] = []
        self.last: dict[str, TokenDelta] = {}

    def uid_in(self, slot: int) -> tuple[int, int, bool] | None:
        request = next(r for r in self.scheduler._requests.running if r.slot == slot)
        weights = self.hook._of.get(request)
        return weights and (weights.uid, self.hook._starts.get(request, 0), weights.changes_keys)

    def ask(self, name: str, *parts: Any, tokens: int = 4, max_tokens: int = 4) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
        options = option(*parts) if parts else {}
        self.loop.add(GenerateRequest(id=name, tokens=[7] * tokens, params=params, options=options))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += 0.01
            for delta in self.loop.step() if self.loop.busy else self.loop.idle() or []:
                if delta.finish is not None:
                    self.ends.append(delta.id)
                    self.last[delta.id] = delta

    def run(self) -> list[str]:
        """Run until all requests have ended; return their names in the order of their ends."""
        self.ends = []
        while self.loop.busy:
            self.worker.turn()
            self.step()
        return self.ends

    def call(self, method: str, **args: Any) -> Any:
        value = self.loop.call(NAME, method, args)
        wait([job.reading for job in self.hook._names._jobs])  # else running requests may end meanwhile
        if isinstance(value, Future):
            while not value.done():
                self.worker.turn()
                self.step()
            value = value.result()
        return value

    def metric(self, name: str, label: str = "") -> float:
        return next(one.values for one in self.loop.stats().features if one.name == name).get(label, 0)


def test_steps_without_adapters_are_told_nothing_and_repeated_ones_next_to_nothing(paths: dict[str, str]) -> None:
    house = House(paths)
    house.ask("plain", max_tokens=8)
    house.run()
    assert all(not plan.payload for plan in house.device.plans)
    house.device.plans.clear()
    house.ask("plain", max_tokens=12)
    house.ask("mine", "b", max_tokens=12)
    house.run()
    told = [(plan.repeats, plan.payload[NAME]) for plan in house.device.plans if plan.payload]
    assert [payload.rows is None for _, payload in told] == [repeats for repeats, _ in told]
    assert sum(repeats for repeats, _ in told) > 5
    assert [len(entry.blocks) for _, payload in told for entry in payload.entries] == [2]
    assert len({id(payload) for repeats, payload in told if repeats}) == 1, "made anew for each step"


def test_only_adapters_with_more_than_low_ranks_make_a_step_general(paths: dict[str, str]) -> None:
    house = House(paths)
    for name in ("a", "gain"):
        house.ask(name, name)
        house.run()
    kinds = [plan.payload[NAME].general for plan in house.device.plans if plan.payload]
    assert set(kinds) == {False, True}


def test_a_cold_adapter_holds_up_nobody_and_says_so(paths: dict[str, str]) -> None:
    house = House(paths)
    house.worker.latency = 0.0
    house.ask("cold", "c")
    house.ask("plain")
    house.step(2)
    house.now += 0.25
    assert house.loop.stats().waits == {"cold": "adapter c (reading, 260 ms)"}
    while "plain" not in house.ends:
        house.step()
    house.worker.latency = 1.0
    assert house.run() == ["cold"]
    assert house.metric("lora_wait_seconds") > 0.25
    assert house.loop.stats().waits == {}
    assert house.metric("lora_tokens", "c") == 4


def test_a_request_waits_for_a_place_but_not_forever(paths: dict[str, str]) -> None:
    """While there is one place, others pass. After a second, those of the adapter that has it don't; the base's do."""
    house = House(paths, max_loras=1)
    house.ask("first", "a", max_tokens=20)
    house.worker.turn()
    house.step(4)
    house.ask("patient", "b")
    for number in range(4):
        house.ask(f"again {number}", "a", max_tokens=20)
    house.worker.turn()
    house.step(3)
    assert len(house.scheduler._requests.running) == 5, "those of the first adapter pass"
    house.now += 5.0
    for number in range(4, 8):
        house.ask(f"again {number}", "a", max_tokens=20)
    house.ask("plain", max_tokens=2)
    house.step()
    assert house.loop.stats().waits.keys() == {"patient", *(f"again {number}" for number in range(4, 8))}
    assert house.loop.stats().waits["again 4"] == "adapter a (leaves for another adapter, 0 ms)"
    house.step(2)
    assert house.ends == ["plain"]
    order = house.run()
    assert order.index("patient") == 5
    assert house.metric("lora_evictions") == 2


def test_nothing_is_held_back_for_a_request_that_is_gone(paths: dict[str, str]) -> None:
    house = House(paths, max_loras=1)
    house.ask("first", "a", max_tokens=40)
    house.worker.turn()
    house.step(4)
    house.ask("patient", "b")
    house.worker.turn()
    house.step(3)
    house.now += 5.0
    house.step(2)
    house.ask("again", "a", max_tokens=2)
    house.step(4)
    assert house.ends == [], "it is held back"
    house.loop.abort("patient")
    house.step(5)
    assert "again" in house.ends
    house.run()


def test_the_least_recently_used_adapter_leaves_first_and_a_pinned_one_last(paths: dict[str, str]) -> None:
    house = House(paths, max_loras=2)
    house.ask("1", "a")
    house.run()
    house.call("pin", name="a")
    for name in ("b", "c"):
        house.ask(name, name)
        house.run()
    states = {one["name"]: one["state"] for one in house.call("list")["adapters"]}
    assert states == {"a": "device", "b": "host", "c": "device", "head": "disk", "gain": "disk"}


def test_the_worker_half_knows_a_pinned_adapter_that_no_step_has_used(paths: dict[str, str]) -> None:
    house = House(paths, max_loras=2, max_cpu_loras=1)
    house.call("pin", name="a")
    for name in ("b", "c", "b", "head"):
        house.ask(name, name)
        house.run()
    uids = {one.label: one.uid for one in house.hook._residency.everything}
    assert set(uids) == {"a", "head"}
    assert house.worker.known == set(uids.values())
    house.ask("late", "a")
    assert house.run() == ["late"]


def test_quiet_adapters_make_room_before_anybody_is_preempted(paths: dict[str, str]) -> None:
    house = House(paths, num_blocks=14)
    for name in ("a", "b", "c"):
        house.ask(name, name)
    house.run()
    assert house.metric("lora_blocks") == 6
    house.ask("long", tokens=20, max_tokens=34)
    house.run()
    assert house.scheduler.stats().num_preemptions == 0
    assert house.metric("lora_blocks") == 0


def test_prefixes_are_shared_under_an_adapter_and_with_the_base_if_keys_do_not_change(paths: dict[str, str]) -> None:
    house = House(paths)
    cached = []
    for number, parts in enumerate([("a",), ("a",), (("a", 0.5),), (), ("head",)]):
        house.ask(str(number), *parts, tokens=13)
        house.run()
        cached.append(house.last[str(number)].num_cached)
    assert cached == [0, 12, 0, 0, 12]


def test_a_replaced_adapter_serves_its_requests_to_their_end(paths: dict[str, str]) -> None:
    house = House(paths)
    house.ask("old", "a", max_tokens=70)
    house.worker.turn()
    house.step(4)
    house.call("load", name="a", path=paths["b"], in_place=True)
    house.ask("new", "a", max_tokens=2)
    assert house.run() == ["new", "old"]
    assert house.worker.reads == [["a-1"], ["b-2"]]
    assert len(house.worker.host) == 1
    assert house.metric("lora_changes") == 6


def test_an_unload_waits_for_its_requests(paths: dict[str, str]) -> None:
    house = House(paths)
    house.ask("last", "a", max_tokens=10)
    house.ask("sum", "a", ("b", 2.0), max_tokens=20)
    house.worker.turn()
    house.step(3)
    answer = house.loop.call(NAME, "unload", {"name": "a"})
    with pytest.raises(InvalidRequestError) as refused:
        house.ask("late", "a")
    assert refused.value.message == gone("a").message
    while "sum" not in house.ends:
        assert not answer.done()
        house.step()
    assert answer.result(0) == {}
    assert house.worker.host == set()
    with pytest.raises(ModelNotFoundError):
        house.call("unload", name="a")


@pytest.mark.parametrize(
    ("method", "args", "changed"),
    [
        ("list", {}, False),
        ("find", {"name": "a"}, False),
        ("find", {"name": "nobody"}, False),
        ("unload", {"name": "a"}, True),
        ("pin", {"name": "a"}, True),
    ],
)
def test_calls_that_only_read_change_nothing(
    paths: dict[str, str], method: str, args: dict[str, Any], changed: bool
) -> None:
    house = House(paths)
    house.call(method, **args)
    assert house.loop.stats().feature_changed == (NAME if changed else "")


def test_of_two_loads_of_a_name_the_first_to_arrive_counts(paths: dict[str, str]) -> None:
    house = House(paths)
    calls = [
        house.loop.call(NAME, "load", {"name": "new", "path": paths[path], "in_place": in_place, "again": again})
        for path, in_place, again in [("a", False, False), ("b", False, False), ("a", False, True), ("c", True, False)]
    ]
    while not all(call.done() for call in calls):
        house.step()
    assert calls[0].result()["adapter"]["path"] == paths["a"]
    with pytest.raises(InvalidRequestError, match="already been loaded"):
        calls[1].result()
    assert calls[2].result()["adapter"]["path"] == paths["a"]
    assert calls[3].result()["adapter"]["path"] == paths["c"]


def test_what_can_not_be_loaded_says_why(paths: dict[str, str], tmp_path: Path) -> None:
    house = House(paths, num_blocks=12)
    with pytest.raises(ModelNotFoundError, match=r"There is no adapter at /nowhere .*Correct the path"):
        house.call("load", name="x", path="/nowhere")
    big = folders(tmp_path, {"big": 13})["big"]
    with pytest.raises(ModelFileError, match="takes 13 blocks of the KV cache, which has 12"):
        house.call("load", name="x", path=big)
    with pytest.raises(InvalidRequestError, match="need 10 KV blocks and 3 for what its features load"):
        house.ask("x", "c", tokens=20, max_tokens=20)
    with pytest.raises(InvalidRequestError, match=r"'gain' has DoRA magnitudes, .* can't be weighted or"):
        house.ask("x", "a", "gain")
    house.call("load", name="called", path=folders(tmp_path, {"called": 1})["called"])
    with pytest.raises(InvalidRequestError, match=r"'called' has .* invocation tokens, so it can't be weighted or"):
        house.ask("x", ("called", 0.5))
    with pytest.raises(InvalidRequestError, match="'lora' has no method 'sing'"):
        house.call("sing")
    with pytest.raises(InvalidRequestError, match="name must be a text"):
        house.call("find", name=3)


def test_a_read_that_fails_ends_who_waits_and_later_ones_try_again(paths: dict[str, str]) -> None:
    house = House(paths)
    house.worker.failures = 1.0
    house.ask("1", "a")
    house.ask("plain")
    assert sorted(house.run()) == ["1", "plain"]
    assert house.last["1"].finish is FinishReason.ERROR
    assert house.last["1"].error == "the file is gone"
    house.worker.failures = 0.0
    house.ask("2", "a")
    house.run()
    assert house.last["2"].finish is FinishReason.LENGTH


def test_loads_that_keep_failing_end_who_waits(paths: dict[str, str]) -> None:
    house = House(paths)
    house.device._mover.failures = 1.0  # type: ignore[union-attr]
    house.ask("1", "a")
    house.run()
    assert house.last["1"].error == "The adapter a could not be loaded onto the device."
    assert house.scheduler.cache.num_free == 40


def test_an_adapter_that_was_found_is_read_before_its_request_arrives(tmp_path: Path, paths: dict[str, str]) -> None:
    house = House({}, lora_dir=str(tmp_path))
    house.call("find", name="b-2")
    assert house.worker.reads == [], "the answer comes first"
    house.scheduler.turn()
    assert house.worker.reads == [["b-2"]]
    house.now += 0.5
    house.worker.turn()
    house.step()
    assert house.metric("lora_reads") == 1
    assert house.metric("lora_read_seconds") > 0.5
    house.device._mover.latency = 0.0
    house.ask("late", "b-2")
    house.step(4)
    house.device._mover.latency = 1.0
    assert house.run() == ["late"]
    assert house.worker.reads == [["b-2"]]
    assert 0.02 < house.metric("lora_load_seconds") < 0.1


def test_an_adapter_that_was_found_is_loaded_before_its_request_arrives(tmp_path: Path, paths: dict[str, str]) -> None:
    house = House({}, lora_dir=str(tmp_path))
    house.call("find", name="b-2")
    assert not house.loop.awaits
    house.scheduler.turn()
    assert house.loop.awaits, "an idle engine looks at it often"
    house.worker.turn()
    while house.loop.busy or house.loop.awaits:
        house.step()
    assert house.metric("lora_adapters", "device") == 1
    house.ask("late", "b-2")
    house.run()
    assert house.metric("lora_wait_seconds") == 0


def test_adapters_of_requests_behind_others_are_loaded_meanwhile(paths: dict[str, str]) -> None:
    house = House(paths)
    for number in range(6):
        house.ask(f"base {number}", max_tokens=20)
    house.ask("first", "a")
    house.worker.turn()
    house.step(6)
    assert house.metric("lora_adapters", "device") == 1
    assert "first" not in house.run()[:6], "all slots are taken"
    assert house.metric("lora_wait_seconds") == 0


def test_a_load_ahead_takes_no_blocks_and_no_place_from_others(paths: dict[str, str]) -> None:
    house = House(paths, max_loras=1)
    house.ask("first", "a", max_tokens=20)
    house.worker.turn()
    house.step(4)
    house.ask("second", "b")
    house.worker.turn()
    house.step(4)
    assert house.metric("lora_evictions") == 0
    assert house.run() == ["first", "second"]
    small = House(paths, num_blocks=8)
    small.ask("base", tokens=16, max_tokens=12)
    small.step(2)
    small.ask("large", "c", tokens=12)
    small.worker.turn()
    assert sorted(small.run()) == ["base", "large"]
    assert small.loop.stats().num_preemptions == 0, "what was loaded ahead makes room for what runs"


def test_adapters_are_found_in_a_folder_and_by_resolvers(
    paths: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House({}, lora_dir=str(tmp_path))
    assert house.call("find", name="b-2")["adapter"]["rank"] == 2
    for odd in ("../b-2", ".", "absent", str(tmp_path / "b-2")):
        assert house.call("find", name=odd) == {"adapter": None}

    class Entry:
        def load(self) -> Any:
            return lambda name: paths["c"] if name == "from elsewhere" else None

    monkeypatch.setattr(names, "entry_points", lambda group: [Entry()] if group == "octavo.lora_resolvers" else [])
    assert house.call("find", name="from elsewhere")["adapter"]["path"] == paths["c"]
    assert house.call("find", name="unknown") == {"adapter": None}


def test_names_can_be_loaded_in_a_sleep_and_adapters_come_back_after_it(paths: dict[str, str]) -> None:
    house = House({"a": paths["a"]})
    house.ask("1", "a")
    house.run()
    house.loop.pause(PauseMode.KEEP)
    house.loop.sleep(1)
    assert house.scheduler.cache.num_free == 40
    assert house.call("load", name="b", path=paths["b"])["adapter"]["rank"] == 2
    pinned = house.loop.call(NAME, "pin", {"name": "a"})
    house.step(5)
    assert not pinned.done()
    assert not house.loop.busy
    house.loop.wake_up(list(SleepTag))
    house.ask("2", "b")
    house.run()
    while not pinned.done():
        house.step()
    assert pinned.result() == {}
    assert house.last["2"].finish is FinishReason.LENGTH


def test_a_pin_in_a_sleep_ends_no_frozen_request_of_the_adapter(paths: dict[str, str]) -> None:
    house = House(paths, max_cpu_loras=1, max_loras=2)
    house.ask("frozen", "a", max_tokens=20)
    while not house.scheduler.stats().generation_tokens:
        house.worker.turn()
        house.step()
    house.ask("other", "b")
    while "other" not in house.ends:
        house.worker.turn()
        house.step()
    house.loop.pause(PauseMode.KEEP)
    while not house.loop.settled:
        house.step()
    house.loop.sleep(1)
    pinned = house.loop.call(NAME, "pin", {"name": "a"})
    house.step(3)
    house.loop.wake_up(list(SleepTag))
    house.run()
    assert house.last["frozen"].finish is FinishReason.LENGTH
    assert pinned.result() == {}


def test_adapters_that_a_sleep_replaces_are_forgotten_after_it(paths: dict[str, str]) -> None:
    house = House({"a": paths["a"]})
    house.ask("1", "a")
    house.run()
    assert len(house.worker.host) == 1
    house.loop.pause(PauseMode.KEEP)
    house.loop.sleep(1)
    house.call("load", name="a", path=paths["a"], in_place=True)
    house.loop.wake_up(list(SleepTag))
    house.step()
    assert house.worker.host == house.worker.known == set()
    house.ask("2", "a")
    assert house.run() == ["2"]


def test_other_weights_outdate_adapters_that_depend_on_them(paths: dict[str, str]) -> None:
    house = House(paths)
    for name in ("a", "gain"):
        house.ask(name, name)
    house.run()
    house.loop.pause(PauseMode.KEEP)
    house.scheduler.weights_replaced()
    states = {one["name"]: one["state"] for one in house.call("list")["adapters"]}
    assert (states["a"], states["gain"]) == ("device", "disk")


def test_an_unpinned_error_is_of_the_engine(paths: dict[str, str]) -> None:
    house = House(paths)
    house.worker.latency = 0.0
    pinned = house.loop.call(NAME, "pin", {"name": "a"})
    house.step()
    house.loop.call(NAME, "unload", {"name": "a"})
    with pytest.raises(EngineStateError, match="The adapter 'a' was unloaded"):
        pinned.result(0)


def suspects_without_their_adapter(paths: dict[str, str]) -> House:
    """Return an engine with room for one adapter, where a step of two requests of "a" has failed, so that they are to
    be computed one by one, "a" is on disk, request "3" has "c" on the host, and request "4" waits for room for "b"."""
    house = House(paths, max_loras=1, max_cpu_loras=1)
    for name in ("1", "2"):
        house.ask(name, "a", max_tokens=12)
    while not house.device.plans or len(house.device.plans[-1].slots) < 2:
        house.worker.turn()
        house.step()
    house.ask("3", "c")
    house.ask("4", "b")
    house.worker.turn()
    house.step()
    house.device._fail_at = frozenset([house.device.plans[-1].id + 1])
    house.step()
    house.scheduler.park()
    states = {one["name"]: one["state"] for one in house.call("list")["adapters"]}
    assert [states[name] for name in ("a", "b", "c")] == ["disk", "disk", "host"]
    return house


def test_copies_for_requests_behind_a_failure_make_room_for_suspects(paths: dict[str, str]) -> None:
    house = suspects_without_their_adapter(paths)
    assert sorted(run_at_most(house, 200)) == ["1", "2", "3", "4"]


def test_requests_that_wait_for_room_behind_a_failure_do_not_go_before_suspects(paths: dict[str, str]) -> None:
    house = suspects_without_their_adapter(paths)
    house.loop.abort("3")
    assert sorted(run_at_most(house, 200)) == ["1", "2", "4"]


def run_at_most(house: House, steps: int) -> list[str]:
    house.ends = []
    for _ in range(steps):
        house.worker.turn()
        house.step()
    return house.ends


def test_files_that_changed_between_the_reads_of_two_ranks_are_refused(paths: dict[str, str]) -> None:
    """Ranks of two machines read two copies, whose versions are never the same."""
    house = House(paths)
    house.worker.ranks = [("one", "1"), ("one", "2"), ("other", "3")]
    house.ask("mixed", "a")
    house.run()
    assert house.last["mixed"].finish is FinishReason.ERROR
    assert "The files of the adapter a changed while they were read" in (house.last["mixed"].error or "")
    assert house.worker.host == set()
    house.worker.ranks = [("one", "2"), ("one", "2"), ("other", "3")]
    house.ask("same", "a")
    house.run()
    assert house.last["same"].finish is FinishReason.LENGTH


def test_only_changed_files_lose_their_prefixes(paths: dict[str, str]) -> None:
    house = House(paths, max_loras=1, max_cpu_loras=1)
    cached = {"a": [], "head": []}  # type: dict[str, list[int]]
    for version in ("1", "1", "2", "2", "1"):
        house.worker.ranks = [("", version)]
        for name, found in cached.items():
            house.ask("asked", name, tokens=13)
            house.run()
            found.append(house.last["asked"].num_cached)
    assert cached == {"a": [0, 12, 0, 12, 12], "head": [0, 12, 12, 12, 12]}
