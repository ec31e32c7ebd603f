"""`SpeculationEngine`: the engine half. It decides how many drafts a request gets, and counts what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.plan import PlanDraft
from octavo.core.stats import FeatureMetric
from octavo.features import FeatureContext
from octavo.features.speculation.acceptance import Acceptance, Again
from octavo.features.speculation.config import MODEL_METHODS, DraftConfig
from octavo.features.speculation.costs import StepCosts, size_class
from octavo.features.speculation.counters import DraftCounters
from octavo.features.speculation.draft_files import check_vocabulary, draft_files
from octavo.features.speculation.pace import Measured, Pace, PlannedDecode
from octavo.features.speculation.payload import NAME, DraftCounts, DraftInfo, option_of
from octavo.features.speculation.settings import drafting
from octavo.features.speculation.together import TRIAL, Together
from octavo.schedule.hooks import EngineHook
from octavo.schedule.request import Request

_MARGIN = 1.05
"""Drafts must yield this many times what they cost."""
_HOPE = 1.25
"""Drafts pause only if they would not pay even with this many times as many accepted: the share is uncertain."""
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 1024
"""Tokens of a request, or steps of a model that drafts, before drafts are tried again; each failed trial doubles it."""
_TRIAL_ROWS = 2
"""Most rows of a request's trial, each with `TRIAL` drafts."""
_PLAIN = 5
"""Steps without drafts in a row, to measure what drafts save. The first one may overlap with a step before."""
_PERIOD, _VARIED = 48, 2
"""Every `_PERIOD` steps, `_VARIED` steps have one draft per row more or fewer than the estimated best number."""
_MANY = 8
"""Rows from which on requests draft together or not at all: one row with drafts makes the whole step slower."""
_MEASURED = 4
"""Steps without drafts of which one is measured, while they repeat."""
_PATIENCE, _LONGEST_PERIOD = 2, 8
"""Each time that this many searches in a row found nothing, the next ones are twice as many steps apart, up to the
second number: a step that may be followed by drafts is planned anew, which takes longer than to repeat the last one."""


@dataclass(slots=True)
class _Trials:
    """When drafts that don't pay are tried again. Places are lengths of a request's output, or numbers of steps.

    Attributes:
        pause: from one trial to the next.
        resume: place from which drafts are tried again; 0 while they pay.
        tried: rows of the present trial.
    """

    pause: int = _FIRST_PAUSE
    resume: int = 0
    tried: int = 0


@dataclass(slots=True)
class _Drafted:
    """A request's drafts.

    Attributes:
        asked: the last step was to be followed by drafts.
        misses: how often in a row there were none.
        ask_from: number of the step from which drafts are wanted again.
    """

    enabled: bool
    acceptance: Acceptance
    trials: _Trials
    accepted: int = 0
    rejected: int = 0
    asked: bool = False
    misses: int = 0
    ask_from: int = 0


class SpeculationEngine(EngineHook):
    """Drafts are worth their cost if the tokens that they save would take longer; see docs/speculative.md."""

    name = NAME
    opt_in = True
    admits_for_good = True

    def __init__(self, config: DraftConfig, clock: Callable[[], float] = perf_counter) -> None:
        self.max_drafts, tree = config.most_drafts, config.tree
        self.max_chain = self.max_drafts if tree is None else tree.chain
        facts = DraftInfo(config.method, config.most_drafts, config.adaptive, config.reads_predictions)
        self.info = msgspec.Raw(msgspec.msgpack.encode(facts))
        self.writes_ahead = config.method in MODEL_METHODS and config.method != "medusa"
        self._adaptive = config.adaptive
        self._trials = _Trials() if config.method in MODEL_METHODS else None
        """Those of all requests, in steps: a model or a head is as often right for one as for another."""
        self._clock = clock
        self._costs = StepCosts()
        self._drafted: dict[Request, _Drafted] = {}
        self._counters = DraftCounters(self.max_chain)
        self._overall = Acceptance()
        self._again = Again()
        self._steps = 0
        self._pace = Pace()
        self._last: PlannedDecode | None = None
        """The last step; None if it did not only decode."""
        self._plain = 0
        """Steps without drafts that are left for measuring."""
        self._rows = 0
        """Rows of the last step that only decoded."""
        self._together: dict[int, Together] = {}
        """By about the number of rows."""
        self._verified = self._accepted = 0
        """Drafts since steps with drafts were last measured, and how many of them were accepted."""
        self._most: int | None = 0 if config.adaptive else None
        """Most drafts of any row in the next step; None if each row decides."""
        self._searching = False
        """The last step was to be followed by drafts."""
        self._prices: tuple[float, float, float] | None = None
        """Seconds that an accepted draft saves, and that a row with drafts and each of them cost; None if unknown."""

    def on_plan(self, draft: PlanDraft, rows: Sequence[Request]) -> None:
        """Measure the steps before."""
        now, last = self._clock(), self._last
        self._steps += 1
        if last is not None and self._is_usual(last, draft, rows):
            self._counters.step(now - last.began, last.rows, self._costs.plain(last.rows))
            self._last = last._replace(began=now)
            return
        if last is None:
            self._pace.interrupt()
        else:
            self._plain = max(0, self._plain - 1)
            self._measure(last, now)
        drafts = again = 0
        if not draft.repeats:
            drafts = sum(draft.num_drafts)
            again = sum(draft.num_tokens) - len(rows) - drafts
        alone = all(draft.samples) and not draft.new and (not again or all(one.num_output for one in rows))
        if alone and again:  # after rejected drafts, recurrent layers compute the accepted ones again
            self._again.add(again)
            self._verified += again
        self._last = PlannedDecode(now, len(rows), drafts + again, rows[0].inflight - 1) if alone else None
        if self._adaptive:
            self._rows = len(rows)
            self._most = self._limit(len(rows))
            if not draft.repeats or draft.proposals or self._searching:
                self._note_misses(draft, rows)
                self._searching = bool(draft.proposals)

    def _is_usual(self, last: PlannedDecode, draft: PlanDraft, rows: Sequence[Request]) -> bool:
        """Whether a step and the one before neither have nor search drafts, and need not be measured."""
        if not draft.repeats or draft.proposals or self._searching or self._plain or not self._steps % _MEASURED:
            return False
        return last.rows == len(rows) < _MANY and not (last.drafts or last.ahead or rows[0].inflight > 1)

    def _measure(self, step: PlannedDecode, now: float) -> None:
        plain = self._costs.plain(step.rows)
        for found in self._pace.ended(step, now, plain):
            self._costs.add(found.rows, found.drafts, found.seconds)
            if found.drafts:
                self._judge_all(found)
        if self._adaptive and not self._plain and self._costs.needs_plain(step.rows):
            self._plain = _PLAIN
        self._counters.step(now - step.began, step.rows, plain)
        self._prices = self._priced(step.rows)

    def _judge_all(self, found: Measured) -> None:
        plain = self._costs.plain(found.rows)
        if plain and found.rows >= _MANY and self._verified:
            accepted = found.drafts * self._accepted / self._verified  # a mean: those of the last steps are not here
            saved = found.steps * (1 + accepted / found.rows)
            took = found.seconds * found.steps / plain
            self._together_of(found.rows).measured(self._steps, found.steps, saved, took)
        self._verified = self._accepted = 0

    def _limit(self, rows: int) -> int | None:
        """Return the most drafts of any row after the next step of this many rows; None if each row decides."""
        if self._plain:
            return 0
        if rows < _MANY:
            return None
        return self._together_of(rows).limit(self._steps) if self._costs.plain(rows) else 0

    def _together_of(self, rows: int) -> Together:
        size = size_class(rows)
        if size not in self._together:
            larger = min((other for other in self._together if other > size), default=0)
            paid = self._together[larger].paying if larger else 0  # with fewer rows, drafts gain more
            self._together[size] = Together(self.max_chain, paid)
        return self._together[size]

    def _note_misses(self, draft: PlanDraft, rows: Sequence[Request]) -> None:
        """Ask less often for the drafts of requests that had none. On a GPU the host does not know."""
        for row, request in enumerate(rows):
            one = self._drafted.get(request)
            if one is None:
                continue
            if one.asked and draft.num_drafts[row]:
                one.misses = 0
            elif one.asked:
                one.misses += 1
                period = min(1 << min(one.misses // _PATIENCE, 8), _LONGEST_PERIOD)
                one.ask_from = (self._steps // period + 1) * period  # so that requests ask in the same steps
            one.asked = row in draft.proposals

    def drafts(self, request: Request) -> int | None:
        most = self._most
        if most == 0 and request.spec.options:  # without options, `on_plan` is not called for each step
            return 0
        one = self._of(request)
        if not one.enabled:
            return 0
        if not self._adaptive:
            return None
        place, trials = self._place(request), one.trials
        if self._steps < one.ask_from or place < trials.resume:
            return 0
        if one.asked and one.misses >= _PATIENCE:  # the search before has probably found nothing, too
            return 0
        if trials.resume:
            return self.max_drafts if self._whole else min(TRIAL, self.max_chain)
        best = self._varied(self._best(one.acceptance))
        if not best and self._best(one.acceptance, _HOPE):
            best = self.max_drafts if self._whole else 1
        if not best:
            trials.resume = place + trials.pause
        return best if most is None else min(best, most)

    def _varied(self, best: int) -> int:
        """Return another number now and then, since what a draft costs is seen only where numbers differ."""
        turn, step = divmod(self._steps, _PERIOD)
        if step >= _VARIED or not best or self.max_drafts == 1 or self._rows >= _MANY or self._whole:
            return best
        return best + 1 if best == 1 or (turn % 2 and best < self.max_drafts) else best - 1

    def on_verify(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self._counters.verified(num_drafts, num_accepted)
        self._overall.add(min(num_drafts, self.max_chain), num_accepted)
        self._again.drafted(num_drafts)
        self._verified += num_drafts
        self._accepted += num_accepted
        one = self._of(request)
        one.accepted += num_accepted
        one.rejected += num_drafts - num_accepted
        if self._adaptive and one.trials.resume and not one.trials.tried:
            one.acceptance.fade()
        one.acceptance.add(min(num_drafts, self.max_chain), num_accepted)
        if self._adaptive:
            self._judge(one.acceptance, one.trials, self._place(request))

    @property
    def _whole(self) -> bool:
        """Whether a row has a whole tree or no drafts. Many rows have chains."""
        return self.max_chain < self.max_drafts and self._rows < _MANY

    def _place(self, request: Request) -> int:
        """Return where the request's trials are counted from."""
        return self._steps if self._trials is not None else request.num_output + request.pending

    def _judge(self, acceptance: Acceptance, trials: _Trials, place: int) -> None:
        """Begin or end a pause after drafts of a request that are accepted this often were verified."""
        if place < trials.resume:  # they were drafted before the pause
            return
        if self._best(acceptance, _HOPE):
            trials.tried = trials.resume = 0
            if self._best(acceptance):
                trials.pause = max(_FIRST_PAUSE, trials.pause // 2)
            return
        trials.tried += 1
        if not trials.resume or trials.tried >= _TRIAL_ROWS:
            trials.tried, trials.resume = 0, place + trials.pause
            trials.pause = min(2 * trials.pause, _LONGEST_PAUSE)

    def _best(self, acceptance: Acceptance, hope: float = 1.0) -> int:
        """Return the number of drafts that saves the most time in a step like the last; 0 if none saves any.

        Args:
            acceptance: of the request's drafts.
            hope: how many times as many are accepted.

        A draft that is accepted saves a token's share of a step without drafts. Of a tree, one draft of each depth can
        be, so chances are those of depths, and the whole tree or nothing is drafted.
        """
        if self._rows >= _MANY:
            return self._best_of_many(acceptance, hope)
        if self._prices is None:
            return self.max_drafts
        value, overhead, cost = self._prices
        chances = acceptance.chances(self.max_chain, hope)
        if self._whole:
            return self.max_drafts if value * sum(chances) > _MARGIN * (overhead + cost * self.max_drafts) else 0
        best, most, gain = 0, 0.0, 0.0
        for count, chance in enumerate(chances, 1):
            gain += chance * value
            left = gain - _MARGIN * (overhead + cost * count)
            if left > most:
                best, most = count, left
        return best

    def _best_of_many(self, acceptance: Acceptance, hope: float) -> int:
        """Return how many drafts are at least half as likely accepted as the last one of a usual row. What they cost,
        `Together` weighs."""
        most = self._most or TRIAL
        least, share = self._overall.share**most / 2, min(1.0, hope * acceptance.share)
        return sum(share**count >= least for count in range(1, most + 1))

    def _priced(self, rows: int) -> tuple[float, float, float] | None:
        plain = self._costs.plain(rows)
        base, cost = self._costs.step(rows, 1)
        return (plain / rows, max(0.0, base - plain) / rows, cost * (1 + self._again.share)) if plain else None

    def _of(self, request: Request) -> _Drafted:
        """Return the state of a request that has not ended."""
        one = self._drafted.get(request)
        if one is None:
            option = option_of(request.spec.options.get(NAME))
            trials = self._trials or _Trials()
            one = self._drafted[request] = _Drafted(option.enabled, Acceptance(self._overall), trials)
        return one

    def result(self, request: Request) -> bytes | None:
        one = self._drafted.get(request)
        return None if one is None else msgspec.msgpack.encode(DraftCounts(one.accepted, one.rejected))

    def on_release(self, request: Request) -> None:
        self._drafted.pop(request, None)
        self._last = None  # the time until the next step may be idle

    def metrics(self) -> Sequence[FeatureMetric]:
        return self._counters.metrics()


def build_engine(context: FeatureContext) -> SpeculationEngine | None:
    """Return the engine half; None if nothing is drafted.

    Raises:
        ConfigError: the device lacks what the settings ask for, or the drafting model has other tokens.
        ModelNotFoundError, ModelFileError: there is no drafting model of this name.
    """
    config = drafting(context)
    if config is None:
        return None
    if config.method == "suffix" and context.device != "cpu":
        raise ConfigError(
            "speculative_config: method=suffix searches in the host's memory, which would make a GPU wait; "
            "set method=ngram."
        )
    if config.method == "draft_model":
        check_vocabulary(draft_files(config, context), context)
    if config.method == "medusa":
        config = config.at_most(draft_files(config, context).config.get("medusa_num_heads"))
    return SpeculationEngine(config)
