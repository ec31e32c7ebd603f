"""`KvTransfer`: the engine half. It has prompts computed elsewhere, offers blocks, and says which can be fetched."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.stats import FeatureMetric
from octavo.features import FeatureContext
from octavo.features.kv_transfer.asking import Asked, PrefillServers
from octavo.features.kv_transfer.offer import NAME, Address, Ask, Fetch, Offer, Option, Send, kept_ranges, option_of
from octavo.features.kv_transfer.settings import KvTransferSettings, TransferConfig, TransferInfo
from octavo.features.kv_transfer.tier import PeerTier
from octavo.schedule.hooks import EngineHook
from octavo.schedule.pages import Pages
from octavo.schedule.request import Request

log = logging.getLogger(__name__)

_NOTHING = {"do_remote_prefill": False, "do_remote_decode": False}
"""The answer if no block of the prompt is kept."""


class KvTransfer(EngineHook):
    """
    Attributes:
        servers: compute prompts for this engine; None for none.
    """

    name = NAME
    opt_in = True
    admits_for_good = True

    def __init__(self, config: TransferConfig, servers: PrefillServers | None, urls: Sequence[str] = ()) -> None:
        self.tier: PeerTier = PeerTier(config.timeout)
        self.info = msgspec.Raw(msgspec.msgpack.encode(TransferInfo(config, tuple(urls))))
        self.servers = servers
        self._config = config
        self._options: dict[Request, Option | None] = {}
        """None after the option was handled."""
        self._alive: Counter[str] = Counter()
        """Id of a request -> how many of its choices have not ended."""
        self._asked: dict[str, Asked] = {}
        """Id of a request -> what a prefill server is asked for."""
        self._ranks: list[Address] | None = None
        self._place: tuple[Future[list[Any]], Future[list[Any]]] | None = None
        self._num_refused = 0

    def attach(self, pages: Pages) -> None:
        self._pages = pages
        self.tier.expects = self._expect

    def _expect(self, pages: Sequence[bytes]) -> None:
        """Tell the worker half now: another server may ask for them as soon as a request has ended."""
        self._drop()
        self._pages.call("expect", {"pages": list(pages)}).add_done_callback(_logged)

    # Requests

    def on_add(self, request: Request) -> None:
        self._options[request] = option_of(request.spec.options)
        self._alive[request.id] += 1

    def waits(self, request: Request) -> bool:
        asked = self._asked.get(request.id)
        return asked is not None and not asked.done

    def admit(self, request: Request, num_tokens: int) -> int:
        match self._options.get(request):
            case Ask() if self.servers is not None:
                return self._ask(self.servers, request, num_tokens)
            case Fetch(offer):
                self._options[request] = None
                self._offered(request, offer)
        return num_tokens

    def _ask(self, servers: PrefillServers, request: Request, num_tokens: int) -> int:
        """Have a prompt computed elsewhere if too little of it is cached here; 0 while it is."""
        asked = self._asked.get(request.id)
        if asked is None:
            rest = request.num_prompt - request.num_computed
            salt = request.spec.namespace
            if rest < self._config.min_tokens or not self._is_plain(request):
                self._options[request] = None
                return num_tokens
            asked = servers.ask(request.tokens[: request.num_prompt], salt, request.spec.priority)
            self._asked[request.id] = asked
        if not asked.done:
            return 0
        self._options[request] = None
        if asked.offer is not None and not self._offered(request, asked.offer):
            servers.refuse(asked)
        return num_tokens

    def _is_plain(self, request: Request) -> bool:
        """Whether its blocks depend on nothing but its token ids and its salt."""
        own = request.spec.keys or request.namespace != request.spec.namespace
        return not own and len(self._pages.names(request)) > 0

    def _offered(self, request: Request, offer: Offer) -> bool:
        """Register blocks that another server offers, so that they are fetched. Return False if they don't match."""
        pages = offer.pages(self._pages.names(request))
        if not pages:
            self._num_refused += 1
            log.log(
                logging.WARNING if self._num_refused == 1 else logging.DEBUG,
                "%s:%d offers KV blocks that can't be used for request %s: another model, other settings (dtype, "
                "block size, ranks), or the request has an adapter; the prompt is computed here",
                offer.remote_host,
                offer.remote_port,
                request.id,
            )
            return False
        self.tier.offer(request, pages)
        told = self._pages.call("sources", {"pages": pages, "ranks": offer.remote_ranks})
        told.add_done_callback(_logged)
        return True

    def waits_for(self, request: Request) -> str:
        asked = self._asked.get(request.id)
        if asked is not None and not asked.done:
            return f"its prompt, which {asked.server or 'a prefill server'} computes"
        return ""

    def result(self, request: Request) -> bytes | None:
        """Return what is kept of the prompt for another server."""
        if not isinstance(self._options.get(request), Send):
            return None
        names = self._pages.names(request)[: request.num_prompt // self._pages.block_size]
        return msgspec.msgpack.encode(self._offer(names) or _NOTHING)

    def _offer(self, names: Sequence[bytes]) -> Offer | None:
        """Return what is kept of blocks with these names; None for nothing."""
        tier, ranks = self.tier, self._ranks
        blocks = list(kept_ranges(names, self._pages.groups, lambda page: page in tier.kept or page in tier.coming))
        count = max((end for ranges in blocks for _, end in ranges), default=0)
        if not ranks or not count:
            return None
        host, port = ranks[0]
        offer = Offer(
            remote_host=host, remote_port=port, remote_ranks=ranks, blocks=blocks, last_block=names[count - 1].hex()
        )
        tier.use([page for page in offer.pages(names) if page in tier.kept])
        return offer

    def on_release(self, request: Request) -> None:
        if request not in self._options:
            return
        del self._options[request]
        gone = self.tier.withdraw(request)
        if gone and self._pages.awake:
            self._pages.call("forget", {"pages": gone}).add_done_callback(_logged)
        self._alive[request.id] -= 1
        if not self._alive[request.id]:
            del self._alive[request.id]
            asked = self._asked.pop(request.id, None)
            if asked is not None and not asked.done:
                asked.give_up()

    # The worker half

    @property
    def awaits(self) -> bool:
        asks = any(not asked.done for asked in self._asked.values())
        return asks or self._starts or bool(self.tier.coming)  # another server waits for what is coming

    @property
    def _starts(self) -> bool:
        """Whether it is not known yet where the ranks send."""
        return self._config.sends and self._ranks is None and self._pages.awake

    def turn(self) -> None:
        if self._starts:
            self._place = self._place or (self._pages.call("address", {}), self._pages.call("places", {}))
            if all(answer.done() for answer in self._place):
                (addresses, places), self._place = self._place, None
                self._ranks = [(host, port) for host, port in addresses.result()]
                self.tier.capacity = min(places.result())
        if self._pages.awake:
            self._drop()

    def _drop(self) -> None:
        if self.tier.unwanted:
            gone, self.tier.unwanted = self.tier.unwanted, []
            self._pages.call("drop", {"pages": gone}).add_done_callback(_logged)

    def on_failure(self) -> None:
        """What was on its way may have been lost with the steps that compute it."""
        self.tier.clear()

    def on_park(self) -> None:
        """The worker half stops sending in a sleep."""
        self._ranks = self._place = None
        self.tier.clear()

    def on_reset(self) -> None:
        self.tier.clear()

    def on_weights(self) -> None:
        self.tier.clear()

    def metrics(self) -> Sequence[FeatureMetric]:
        tier, servers = self.tier, self.servers
        found = [
            _metric("kv_transfer_blocks", "gauge", "KV blocks kept for other servers.", len(tier.kept)),
            _metric("kv_transfer_blocks_dropped", "counter", "KV blocks that were kept too long.", tier.num_dropped),
            _metric("kv_transfer_blocks_lost", "counter", "KV blocks that could not be fetched.", tier.num_lost),
            _metric("kv_transfer_refused", "counter", "Offers of other models' KV blocks.", self._num_refused),
        ]
        if servers is not None:
            found += [
                _metric("prefills_asked", "counter", "Prompts that prefill servers were asked for.", servers.num_asked),
                _metric("prefills_failed", "counter", "Prompts that no prefill server computed.", servers.num_failed),
            ]
        return found


def _logged(answer: Future[list[Any]]) -> None:
    if (error := answer.exception()) is not None:
        log.error("failed to tell a rank of KV blocks of other servers: %s", error)


def _metric(name: str, kind: str, text: str, value: float) -> FeatureMetric:
    return FeatureMetric(name, kind, text, "", {"": value})


def build_engine(context: FeatureContext) -> KvTransfer | None:
    """
    Raises:
        ConfigError: the model can't have its KV blocks sent or fetched.
    """
    settings = context.settings_of(KvTransferSettings)
    config = settings.config()
    if config is None:
        return None
    given = "--kv-transfer-config" if settings.kv_transfer_config else "--prefill-servers"
    if context.whole_prompts or not context.generates:
        raise ConfigError(f"{given} is for models that generate text; {context.model_name} does not. Leave it out.")
    if not context.shares_prefixes:
        raise ConfigError(f"{given} needs prefix caching, by which blocks are found. Leave out one of the two.")
    urls = settings.prefill_servers
    servers = PrefillServers(urls, settings.prefill_api_key, config.timeout) if urls else None
    return KvTransfer(config, servers, urls)
