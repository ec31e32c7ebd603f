"""Single rules of the scheduler, each on the toy device where its effect can be counted."""

from __future__ import annotations

import pytest

from octavo.cache.cache import KVCache
from octavo.core.errors import InvalidRequestError
from octavo.core.output import FinishReason, StepOutput
from octavo.core.params import SamplingParams
from octavo.core.request import BACKGROUND, GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyDevice, toy_generate
from octavo.schedule.hooks import EngineHook
from octavo.schedule.policy import POLICIES, make_policy
from octavo.schedule.scheduler import Limits, Scheduler

BLOCK = 4


class Engine:
    def __init__(
        self,
        num_blocks=64,
        budget=64,
        depth=0,
        policy="fcfs",
        seqs=64,
        fail_at=(),
        poison=None,
        watermark=0.0,
        paced_tokens=0,
    ):
        self.cache = KVCache(num_blocks, BLOCK)
        limits = Limits(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=num_blocks * BLOCK,
            max_ahead=depth + 1,
            watermark=watermark,
            paced_tokens=paced_tokens,
        )
        self.scheduler = Scheduler(self.cache, limits, make_policy(policy))
        self.device = ToyDevice(num_blocks, BLOCK, fail_at=fail_at, poison=poison)
        self.loop = EngineLoop(self.scheduler, self.device, depth)
        self.deltas = []

    def ask(self, name, prompt, max_tokens=4, priority=0, **params):
        params = SamplingParams(max_tokens=max_tokens, seed=0, **params)
        self.loop.add(GenerateRequest(id=name, tokens=list(prompt), params=params, priority=priority))

    def run(self):
        while self.loop.busy:
            self.deltas += self.loop.step()
        return self

    def output(self, name, index=0):
        return [t for d in self.deltas if (d.id, d.index) == (name, index) for t in d.tokens]

    def order_of_first_tokens(self):
        seen = []
        for delta in self.deltas:
            if delta.tokens and delta.id not in seen:
                seen.append(delta.id)
        return seen


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prefix_shared_by_arrivals_is_computed_once_even_in_flight(depth):
    engine = Engine(num_blocks=200, budget=256, depth=depth)
    prefix = list(range(1, 41))
    for i in range(32):
        engine.ask(f"r{i}", [*prefix, 41 + i % 9, i], max_tokens=1)
    engine.run()
    assert engine.device.cells_computed == len(prefix) + 32 * 2
    assert engine.scheduler.stats().prefix_cache_hits == 31 * len(prefix)


def test_choices_share_the_prompt_and_copy_only_its_last_partial_block():
    engine = Engine()
    prompt = list(range(1, 15))
    engine.ask("r", prompt, max_tokens=3, n=4, ignore_eos=True)
    engine.run()
    assert [engine.output("r", i) for i in range(4)] == [toy_generate(prompt, 3, stop_ids=(), seed=i) for i in range(4)]
    assert engine.scheduler.stats().blocks_copied == 3
    assert engine.device.cells_computed == len(prefix := prompt) + 3 * 1 + 4 * 2, prefix


def test_a_choice_waits_until_its_copy_of_the_shared_block_has_room():
    engine = Engine(num_blocks=9, depth=1)
    engine.ask("r", range(1, 26), max_tokens=11, n=2, ignore_eos=True)
    engine.run()
    assert [engine.output("r", i) for i in range(2)] == [
        toy_generate(range(1, 26), 11, stop_ids=(), seed=i) for i in range(2)
    ]


@pytest.mark.parametrize(
    ("lacks", "limits"),
    [
        ("seats", {"seqs": 2}),
        ("step_tokens", {"budget": 13}),
        ("kv_blocks", {"num_blocks": 10}),
        ("", {}),
    ],
)
def test_it_is_told_what_those_who_wait_lack(lacks, limits):
    """Prompts of 10 tokens, which take 3 blocks of 4 and a little for growth."""
    engine = Engine(**limits)
    for name in range(4):
        engine.ask(str(name), [name, *range(1, 10)])
    engine.deltas += engine.loop.step()
    assert engine.scheduler.stats().waits_for == lacks
    assert bool(engine.scheduler.stats().num_waiting) == bool(lacks)
    assert engine.run().scheduler.stats().waits_for == ""


@pytest.mark.parametrize("budget", [7, 64])
def test_prompt_tokens_are_counted_as_they_are_computed(budget):
    engine = Engine(budget=budget)
    engine.ask("r", range(1, 31))
    engine.deltas += engine.loop.step()
    assert engine.scheduler.stats().step_prompt_tokens == min(budget, 30)
    stats = engine.run().scheduler.stats()
    assert (stats.step_prompt_tokens, stats.step_tokens) == (30, 33)
    assert stats.handled_tokens == 30 + 4  # the step that ended the prompt sampled a token besides
    assert stats.steps_by_tokens[0] == 3
    assert sum(stats.steps_by_tokens) == stats.num_steps


def test_a_long_prompt_never_holds_up_a_decode():
    engine = Engine(budget=8)
    engine.ask("short", [1, 2, 3], max_tokens=12, ignore_eos=True)
    engine.deltas += engine.loop.step()
    engine.ask("long", range(1, 41), max_tokens=1)
    for _ in range(5):
        before = len(engine.output("short"))
        engine.deltas += engine.loop.step()
        assert len(engine.output("short")) == before + 1
    engine.run()
    assert engine.output("long") == toy_generate(list(range(1, 41)), 1)


@pytest.mark.parametrize(("watermark", "preemptions"), [(0.0, 1), (0.3, 0)])
def test_a_reserve_lets_running_requests_grow_instead_of_being_preempted(watermark, preemptions):
    engine = Engine(num_blocks=10, watermark=watermark)
    for name, token in (("first", 1), ("second", 2)):
        engine.ask(name, [token] * 16, max_tokens=12, ignore_eos=True)
    engine.run()
    assert sum(d.num_preemptions for d in engine.deltas if d.finish) == preemptions
    assert engine.output("second") == toy_generate([2] * 16, 12, stop_ids=())


def test_no_reserve_is_held_against_a_request_that_runs_alone():
    engine = Engine(num_blocks=10, watermark=1.0)
    engine.ask("whole", range(1, 37), max_tokens=4, ignore_eos=True)
    engine.run()
    assert len(engine.output("whole")) == 4


def test_priority_runs_the_urgent_first_and_preempts_the_rest():
    engine = Engine(num_blocks=8, budget=64, policy="priority", seqs=2)
    engine.ask("later", [1] * 9, max_tokens=16, priority=5, ignore_eos=True)
    engine.deltas += engine.loop.step()
    engine.ask("urgent", [2] * 9, max_tokens=16, priority=0, ignore_eos=True)
    engine.ask("late", [3] * 2, max_tokens=1, priority=9)
    engine.run()
    ends = [d.id for d in engine.deltas if d.finish]
    assert ends.index("urgent") < ends.index("later")
    assert next(d for d in engine.deltas if d.id == "later" and d.finish).num_preemptions > 0
    assert next(d for d in engine.deltas if d.id == "urgent" and d.finish).num_preemptions == 0
    assert engine.output("later") == toy_generate([1] * 9, 16, stop_ids=())


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_urgent_arrival_takes_the_slot_of_the_least_urgent(depth):
    engine = Engine(depth=depth, policy="priority", seqs=2)
    engine.ask("low", [1] * 5, max_tokens=20, priority=2, ignore_eos=True)
    engine.ask("middle", [2] * 5, max_tokens=20, priority=1, ignore_eos=True)
    for _ in range(5):
        engine.deltas += engine.loop.step()
    engine.ask("urgent", [3] * 5, max_tokens=4, priority=0, ignore_eos=True)
    engine.run()
    ends = {d.id: d.num_preemptions for d in engine.deltas if d.finish}
    assert ends == {"urgent": 0, "middle": 0, "low": 1}
    assert list(ends) == ["urgent", "middle", "low"]
    assert engine.output("low") == toy_generate([1] * 5, 20, stop_ids=())


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_urgent_arrival_takes_no_more_blocks_than_it_needs(depth):
    engine = Engine(num_blocks=16, depth=depth, policy="priority")
    for name in ("costly", "cheap"):
        engine.ask(name, [ord(name[1])] * (15 if name == "costly" else 7), max_tokens=16, priority=1, ignore_eos=True)
    for _ in range(4):
        engine.deltas += engine.loop.step()
    engine.ask("urgent", [3] * 38, max_tokens=2, priority=0, ignore_eos=True)
    engine.run()
    ends = {d.id: d.num_preemptions for d in engine.deltas if d.finish}
    assert ends == {"urgent": 0, "costly": 0, "cheap": 1}


def test_nobody_yields_in_vain():
    engine = Engine(num_blocks=16, policy="priority")
    engine.ask("equal", [1] * 30, max_tokens=4, priority=0, ignore_eos=True)
    engine.ask("low", [2] * 3, max_tokens=8, priority=1, ignore_eos=True)
    engine.deltas += engine.loop.step()
    engine.ask("urgent", [3] * 40, max_tokens=2, priority=0, ignore_eos=True)
    engine.deltas += engine.loop.step()
    assert engine.scheduler.stats().num_preemptions == 0, "with the blocks of both, urgent still lacks some"
    engine.run()
    assert [d.id for d in engine.deltas if d.finish] == ["equal", "urgent", "low"]


def test_equals_and_first_comers_do_not_displace_each_other():
    for policy, priority in (("priority", 1), ("fcfs", 0)):
        engine = Engine(policy=policy, seqs=1)
        engine.ask("first", [1] * 5, max_tokens=6, priority=1, ignore_eos=True)
        engine.deltas += engine.loop.step()
        engine.ask("second", [2] * 5, max_tokens=6, priority=priority, ignore_eos=True)
        engine.run()
        assert [d.id for d in engine.deltas if d.finish] == ["first", "second"]
        assert engine.scheduler.stats().num_preemptions == 0


def test_the_shortest_of_those_that_wait_begins_next():
    engine = Engine(policy="shortest-first", seqs=1)
    engine.ask("running", [1] * 5, max_tokens=6, ignore_eos=True)
    engine.deltas += engine.loop.step()
    engine.ask("long prompt", [2] * 30, max_tokens=2, ignore_eos=True)
    engine.ask("long answer", [3] * 2, max_tokens=20, ignore_eos=True)
    engine.ask("short", [4] * 4, max_tokens=6, ignore_eos=True)
    engine.run()
    assert [d.id for d in engine.deltas if d.finish] == ["running", "short", "long answer", "long prompt"]
    assert engine.scheduler.stats().num_preemptions == 0


def test_a_long_request_is_overtaken_by_no_more_tokens_than_it_has():
    engine = Engine(policy="shortest-first", seqs=1)
    engine.ask("first", [1] * 2, max_tokens=2, ignore_eos=True)
    engine.deltas += engine.loop.step()
    engine.ask("long", [2] * 40, max_tokens=2, ignore_eos=True)
    number = 0
    while not any(d.id == "long" and d.finish for d in engine.deltas):
        while engine.scheduler.stats().num_waiting < 3:
            engine.ask(f"short {number}", [3] * 4, max_tokens=2, ignore_eos=True)
            number += 1
        engine.deltas += engine.loop.step()
    ends = [d.id for d in engine.deltas if d.finish]
    assert 42 // 6 - 2 <= len(ends) - 2 <= 42 // 6


def test_an_urgent_arrival_does_not_wait_for_the_prompt_of_another():
    engine = Engine(budget=8, policy="priority")
    engine.ask("long", [1] * 100, max_tokens=1, priority=1)
    engine.deltas += engine.loop.step()
    engine.ask("urgent", [2] * 5, max_tokens=1, priority=0)
    engine.deltas += engine.loop.step()
    assert [d.id for d in engine.deltas] == ["urgent"]
    assert engine.run().output("long") == toy_generate([1] * 100, 1)


def test_the_victim_is_the_cheapest_to_recompute():
    engine = Engine(num_blocks=12, budget=64)
    engine.ask("first", [1] * 12, max_tokens=20, ignore_eos=True)
    engine.ask("costly", [2] * 14, max_tokens=8, ignore_eos=True)
    engine.ask("cheap", [3] * 3, max_tokens=20, ignore_eos=True)
    engine.run()
    preemptions = {d.id: d.num_preemptions for d in engine.deltas if d.finish}
    assert preemptions["first"] == 0
    assert preemptions["cheap"] > 0
    assert preemptions["costly"] == 0


def test_what_can_never_fit_is_refused_with_the_numbers():
    engine = Engine(num_blocks=4)
    engine.scheduler.limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=1000)
    with pytest.raises(InvalidRequestError, match=r"need 6 KV blocks, but the whole cache has 4 \(16 tokens\)"):
        engine.ask("r", range(10), max_tokens=14)
    with pytest.raises(InvalidRequestError, match=r"maximum context length is 1000 tokens.*1010 tokens \(10 in"):
        engine.ask("r", range(10), max_tokens=1000)
    engine.ask("r", range(10), max_tokens=6)
    engine.run()
    assert engine.output("r")


def test_an_id_in_use_is_refused():
    engine = Engine()
    engine.ask("r", [1])
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.ask("r", [2])
    engine.run()
    engine.ask("r", [1])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_fault_that_passes_costs_nobody_his_request(depth):
    engine = Engine(depth=depth, fail_at=[2], seqs=2)
    for name in ("a", "b", "c"):
        engine.ask(name, [1, 2, 3, ord(name)], max_tokens=6, ignore_eos=True)
    engine.run()
    for name in ("a", "b", "c"):
        assert engine.output(name) == toy_generate([1, 2, 3, ord(name)], 6, stop_ids=())
    assert [d.finish for d in engine.deltas if d.finish] == [FinishReason.LENGTH] * 3
    engine.scheduler.check_idle()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_of_a_failed_step_only_the_guilty_ends(depth):
    engine = Engine(depth=depth, poison=99, budget=8)
    prompts = {"a": [1] * 5, "guilty": [2] * 20 + [99], "b": [3] * 30}
    for name, prompt in prompts.items():
        engine.ask(name, prompt, max_tokens=12, ignore_eos=True)
    engine.run()
    ends = {d.id: d for d in engine.deltas if d.finish}
    assert ends["guilty"].finish is FinishReason.ERROR
    assert "can't compute token 99" in ends["guilty"].error
    assert engine.output("guilty") == []
    for name in ("a", "b"):
        assert ends[name].finish is FinishReason.LENGTH
        assert engine.output(name) == toy_generate(prompts[name], 12, stop_ids=())
    engine.scheduler.check_idle()


def test_what_fails_alone_is_not_tried_again():
    engine = Engine(poison=99)
    engine.ask("guilty", [1, 99])
    (delta,) = engine.loop.step()
    assert delta.finish is FinishReason.ERROR
    assert not engine.loop.busy
    engine.scheduler.check_idle()


def test_a_failure_does_not_swallow_the_news_before_it():
    class Masked(EngineHook):
        name = "masked"

        def on_plan(self, draft, rows):
            draft.needs_feedback = True

    class FailsToSample(ToyDevice):
        def sample(self, step, payload):
            if step.plan.id == 3:
                raise RuntimeError("this once")
            super().sample(step, payload)

    cache = KVCache(64, BLOCK)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, max_ahead=2)
    engine = Engine()
    engine.scheduler = Scheduler(cache, limits, make_policy("fcfs"), hooks=[Masked()])
    engine.loop = EngineLoop(engine.scheduler, FailsToSample(64, BLOCK), 1)
    for name in ("a", "b"):
        engine.ask(name, [ord(name)] * 5, max_tokens=8, ignore_eos=True)
    engine.run()
    for name in ("a", "b"):
        assert engine.output(name) == toy_generate([ord(name)] * 5, 8, stop_ids=())


@pytest.mark.parametrize("depth", [0, 1])
def test_what_fails_only_together_ends_after_some_tries(depth):
    class Crowded(ToyDevice):
        def forward(self, plan):
            if len(plan.slots) > 1:
                raise MemoryError("no room for two")
            return super().forward(plan)

    engine = Engine(depth=depth)
    engine.loop = EngineLoop(engine.scheduler, Crowded(64, BLOCK), depth)
    for name in ("a", "b"):
        engine.ask(name, [ord(name)] * 5, max_tokens=30, ignore_eos=True)
    engine.run()
    ends = {d.id: d for d in engine.deltas if d.finish}
    assert ends["a"].finish is ends["b"].finish is FinishReason.ERROR
    for name in ("a", "b"):
        assert engine.output(name) == toy_generate([ord(name)] * 5, 30, stop_ids=())[: len(engine.output(name))]
    engine.ask("later", [5] * 5, max_tokens=3, ignore_eos=True)
    assert len(engine.run().output("later")) == 3
    engine.scheduler.check_idle()


def test_a_suspect_may_be_aborted_and_arrivals_wait_for_the_verdict():
    engine = Engine(poison=99)
    for name, prompt in (("a", [1] * 5), ("guilty", [2, 99]), ("b", [3] * 5)):
        engine.ask(name, prompt, max_tokens=3, ignore_eos=True)
    engine.deltas += engine.loop.step()
    engine.ask("new", [4] * 5, max_tokens=3, ignore_eos=True)
    engine.deltas += engine.loop.abort("a")
    engine.run()
    ends = {d.id: d.finish for d in engine.deltas if d.finish}
    assert ends == {
        "a": FinishReason.ABORT,
        "guilty": FinishReason.ERROR,
        "b": FinishReason.LENGTH,
        "new": FinishReason.LENGTH,
    }
    engine.scheduler.check_idle()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_abort_frees_the_request_as_soon_as_nothing_in_flight_holds_it(depth):
    engine = Engine(depth=depth)
    engine.ask("r", [1, 2, 3, 4, 5], max_tokens=50, ignore_eos=True)
    for _ in range(4):
        engine.deltas += engine.loop.step()
    (delta,) = engine.loop.abort("r")
    assert delta.finish is FinishReason.ABORT
    assert engine.loop.abort("r") == []
    for _ in range(depth):
        engine.loop.step()
    assert not engine.loop.busy
    assert engine.cache.num_free == 64


def test_stop_token_and_eos_are_told_apart():
    prompt = [7, 8, 9]
    first = toy_generate(prompt, 1, stop_ids=())[0]
    engine = Engine()
    engine.ask("r", prompt, max_tokens=9, stop_token_ids=[first])
    engine.run()
    (delta,) = engine.deltas
    assert (delta.tokens, delta.finish, delta.stop_reason) == ([first], FinishReason.STOP, first)


def test_waste_is_counted():
    engine = Engine()
    engine.ask("r", [1] * 5, max_tokens=1)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.mean_waste == pytest.approx(3 / 8)
    assert stats.kv_slots_allocated == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("depth", [0, 1])
def test_background_work_makes_way_under_every_policy(policy, depth):
    engine = Engine(depth=depth, policy=policy, seqs=2)
    for name, prompt in (("back1", 1), ("back2", 2), ("back3", 3)):
        engine.ask(name, [prompt] * 5, max_tokens=12, priority=BACKGROUND, ignore_eos=True)
    for _ in range(4):
        engine.deltas += engine.loop.step()
    engine.ask("first", [4] * 5, max_tokens=12, ignore_eos=True)
    engine.ask("second", [5] * 5, max_tokens=12, ignore_eos=True)
    engine.run()
    ends = {d.id: d.num_preemptions for d in engine.deltas if d.finish}
    assert list(ends) == ["first", "second", "back1", "back2", "back3"]
    assert ends == {"first": 0, "second": 0, "back1": 1, "back2": 1, "back3": 0}
    assert engine.output("back1") == toy_generate([1] * 5, 12, stop_ids=())


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_alone_may_fill_the_context_and_the_cache(depth):
    """Nothing is sampled, so no room is kept for it; chunk by chunk the prompt is computed once."""
    engine = Engine(num_blocks=4, budget=6, depth=depth)
    engine.loop.add(GenerateRequest(id="a", tokens=list(range(1, 17)), params=SamplingParams(), prompt_only=True))
    engine.run()
    assert [d.finish for d in engine.deltas] == [FinishReason.STOP]
    assert engine.output("a") == []
    assert engine.device.cells_computed == 16
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (16, 0)
    with pytest.raises(InvalidRequestError, match="maximum context length is 16 tokens"):
        engine.loop.add(GenerateRequest(id="b", tokens=[1] * 17, params=SamplingParams(), prompt_only=True))


def test_a_request_that_does_not_read_the_cache_fills_it_for_others():
    engine = Engine()
    for name, reads in (("a", True), ("b", False), ("c", True)):
        params = SamplingParams()
        tokens = list(range(1, 10))
        engine.loop.add(GenerateRequest(id=name, tokens=tokens, params=params, prompt_only=True, reads_cache=reads))
        engine.run()
    assert [d.num_cached for d in engine.deltas] == [0, 0, 8]
    assert engine.scheduler.stats().prefix_cache_queries == 18


class WholeDevice:
    """An executor that notes which prompts it was given in each step."""

    def __init__(self):
        self.steps = []

    def forward(self, plan):
        self.steps.append(list(plan.num_tokens))
        assert len(plan.new) == len(plan.slots)
        assert not plan.block_writes
        assert not any(plan.samples)
        return WholeStep(plan)

    def sample(self, step, payload):
        pass

    def close(self):
        pass


class WholeStep:
    def __init__(self, plan):
        self.plan = plan

    def result(self):
        return StepOutput(
            [[] for _ in self.plan.slots], found={row: {"x": b"1"} for row in range(len(self.plan.slots))}
        )


@pytest.mark.parametrize("depth", [0, 1])
def test_prompts_that_can_not_be_cut_go_whole_and_in_order(depth):
    """The step's budget fills with whole prompts; one that does not fit waits, and is not overtaken."""
    limits = Limits(
        max_num_seqs=8, max_num_batched_tokens=10, max_model_len=10, max_ahead=depth + 1, whole_prompts=True
    )
    scheduler = Scheduler(KVCache(0, 1, groups=()), limits, make_policy("fcfs"))
    device = WholeDevice()
    loop = EngineLoop(scheduler, device, depth)
    for number, size in enumerate([4, 5, 3, 10, 1, 1, 1, 1]):
        loop.add(GenerateRequest(id=str(number), tokens=[1] * size, params=SamplingParams(), prompt_only=True))
    deltas = []
    while loop.busy:
        deltas += loop.step()
        assert scheduler.stats().num_waiting_deferred == 0
    assert device.steps == [[4, 5], [3], [10], [1, 1, 1, 1]]
    assert [d.id for d in deltas] == list("01234567")
    assert all(d.found == {"x": b"1"} for d in deltas)
    loop.check_idle()
    stats = scheduler.stats()
    assert (stats.kv_usage, stats.kv_slots_filled, stats.kv_slots_allocated) == (0, 0, 0)
