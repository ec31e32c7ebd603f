"""`Accounts`: what each tenant has had of the engine, for its fair share of what follows.

Start-time fair queueing (Goyal, Vin, Chen 1996) over tokens, as virtual token counters (Sheng et al. 2024, "Fairness in
Serving Large Language Models"). An answer's length is not known, so a request is charged the tenant's mean, and the
charge is corrected as tokens come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from octavo.core.request import BACKGROUND
from octavo.schedule.request import Request

COST_PROMPT, COST_OUTPUT = 1, 2
"""Cost of a computed token. On a GPU, a token of an answer takes about twice the time of one of a prompt."""
_SCALE = 1 << 20
"""Virtual time that a token of cost 1 takes a tenant of weight 1."""
_FIRST_GUESS = 128
"""Tokens of the first answer of all."""
_MEMORY = 8
"""Answers over which the mean length is taken."""
_NONE = 1e-6
"""Less than any weight: sums of weights are not exact."""
MOST_ACCOUNTS = 1024
"""Beyond this number of tenants who wait, run or are ahead of others, further names share an account."""

Key = tuple[str | None, bool]


@dataclass(slots=True, eq=False)
class _Clock:
    """The virtual time of all foreground work, or of all background work.

    Attributes:
        time: where new accounts begin: the highest value with which a request has begun, moved on when a tenant leaves
            with more than its share.
        highest: no account has ever had a higher value.
        weight: sum over the accounts with requests.
    """

    time: int = 0
    highest: int = 0
    weight: float = 0.0

    def left(self, account: Account) -> None:
        """Take in that an account has no requests any more.

        What it has had beyond its share, the others have had less: newcomers begin later by as much. So an endless
        stream of new tenants can't keep one waiting that is ahead of them.
        """
        self.weight -= account.weight
        if self.weight < _NONE:
            self.weight, self.time = 0.0, max(self.time, self.highest)
        elif account.value > self.time:
            self.time += int((account.value - self.time) * account.weight / (account.weight + self.weight))


@dataclass(slots=True, eq=False)
class Account:
    """A tenant's account; its background work has another one.

    Attributes:
        value: virtual time: the cost of what it has had, divided by its weight.
        floor: the virtual time when it last came to wait; a refund below it would be credit from an idle time.
        mean: expected length of an answer, in tokens.
        alive: its requests that have not ended.
        waits: it has requests in the queue.
        slots: its running requests, as of the last `measure` and what has begun since.
    """

    clock: _Clock
    weight: float
    value: int
    floor: int
    mean: float
    alive: int = 0
    waits: bool = False
    slots: int = 0

    def expected(self, request: Request) -> int:
        """Return what a request will cost, as far as known before it begins."""
        return COST_PROMPT * request.num_prompt + COST_OUTPUT * self.answer(request)

    def answer(self, request: Request) -> int:
        """Return the expected tokens of its answer."""
        return min(request.max_tokens, max(1, round(self.mean)))

    def of_cost(self, cost: float) -> int:
        """Return the virtual time for a cost."""
        return round(cost * _SCALE / self.weight)


@dataclass(slots=True)
class _Charge:
    """What a request was charged: tokens of its prompt from position `start` on, and of its answer."""

    account: Account
    begun: bool = False
    start: int = 0
    prompt: int = 0
    output: int = 0


class Accounts:
    """All accounts, and the virtual time. Memory is bounded: accounts that are not ahead are the same as new ones.

    Args:
        weights: tenant -> its weight; others have 1.

    Attributes:
        on_change: called after the value of an account that waits has changed.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.on_change: Callable[[Account], None] = lambda account: None
        self._weights = weights
        self._accounts: dict[Key, Account] = {}
        self._charges: dict[Request, _Charge] = {}
        self._mean = float(_FIRST_GUESS)
        self._clocks = {False: _Clock(), True: _Clock()}
        """For background work (True) and the rest."""
        self._seated: list[Account] = []
        """The account of each slot in use."""

    def __len__(self) -> int:
        return len(self._accounts)

    def arrive(self, request: Request) -> None:
        """Give a request its account, until `end`."""
        key: Key = (request.spec.tenant, request.spec.priority >= BACKGROUND)
        account = self._accounts.get(key) or self._new(key)
        if not account.alive:
            account.clock.weight += account.weight
        account.alive += 1
        self._charges[request] = _Charge(account)

    def of(self, request: Request) -> Account:
        """Return the account of a request that is alive."""
        return self._charges[request].account

    def join(self, account: Account) -> None:
        """Take in a tenant that comes to wait: what it left unused before is lost."""
        account.floor = account.clock.time
        account.value = max(account.value, account.floor)
        account.waits = True

    def begin(self, request: Request) -> int:
        """Charge a request that takes a slot, unless it was charged before; return its account's value until then."""
        charge = self._charges[request]
        account, value = charge.account, charge.account.value
        account.slots += 1
        self._seated.append(account)
        account.clock.time = max(account.clock.time, value)
        if not charge.begun:
            charge.begun, charge.start = True, request.num_computed
            charge.prompt = max(0, request.num_prompt - request.num_computed)
            charge.output = account.answer(request)
            self._add(account, COST_PROMPT * charge.prompt + COST_OUTPUT * charge.output)
        return value

    def measure(self, running: Sequence[Request]) -> None:
        """Count slots, and charge what the running requests have generated beyond what was expected."""
        for account in self._seated:
            account.slots = 0
        self._seated.clear()
        for request in running:
            charge = self._charges[request]
            charge.account.slots += 1
            self._seated.append(charge.account)
            if (more := request.num_output - charge.output) > 0:
                charge.output += more
                self._add(charge.account, COST_OUTPUT * more)

    def end(self, request: Request) -> None:
        """Correct a request's charge to what it has had."""
        charge = self._charges.pop(request, None)
        if charge is None:
            return
        if charge.begun:
            self._settle(request, charge)
        account = charge.account
        account.alive -= 1
        if not account.alive:
            account.clock.left(account)

    def _settle(self, request: Request, charge: _Charge) -> None:
        account, output = charge.account, request.num_output
        computed = max(request.num_computed, request.num_lost) - charge.start
        prompt = min(charge.prompt, max(0, computed))
        if request.max_tokens:
            account.mean += (output - account.mean) / _MEMORY
            self._mean += (output - self._mean) / _MEMORY
        self._add(account, COST_PROMPT * (prompt - charge.prompt) + COST_OUTPUT * (output - charge.output))

    def _add(self, account: Account, cost: float) -> None:
        if not cost:
            return
        changed = account.value + account.of_cost(cost)
        account.value = changed if cost > 0 else max(changed, min(account.value, account.floor))
        account.clock.highest = max(account.clock.highest, account.value)
        if account.waits:
            self.on_change(account)

    def _new(self, key: Key) -> Account:
        tenant, background = key
        named = tenant in self._weights
        if len(self._accounts) >= MOST_ACCOUNTS and not named:
            self._forget()
            if len(self._accounts) >= MOST_ACCOUNTS:
                key = (None, background)
                if (shared := self._accounts.get(key)) is not None:
                    return shared
        weight = self._weights[tenant] if tenant is not None and named else 1.0
        clock = self._clocks[background]
        account = self._accounts[key] = Account(clock, weight, clock.time, clock.time, self._mean)
        return account

    def _forget(self) -> None:
        """Forget the accounts that a new one would equal."""
        self._accounts = {key: one for key, one in self._accounts.items() if one.alive or one.value > one.clock.time}
