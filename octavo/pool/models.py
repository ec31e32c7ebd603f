"""`Models`: the names that requests may use, and the models' entries in `/v1/models`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from octavo.pool.pool import Member, Pool
from octavo.server.anthropic import models as anthropic
from octavo.server.errors import ApiError, UnknownModelError

_LATEST = ":latest"


class Models:
    """All names: those of the models, those that their settings add (adapters), and those that a running process has
    added since."""

    def __init__(self, pool: Pool) -> None:
        self.members = list(pool.members.values())
        self._names = {name: one for one in self.members for name in (*one.entry.added, *one.entry.names)}
        self._added: dict[str, Member] = {}
        self._cards: dict[str, list[dict[str, Any]]] = {}
        self._started = int(time.time())

    @property
    def own_names(self) -> list[str]:
        """The models' own names."""
        return [member.name for member in self.members]

    async def find(self, name: str | None) -> Member:
        """Return the model that a request names. Without a name it is the only one.

        Raises:
            ApiError: 400, there are several, and no name.
            UnknownModelError: there is no model of this name.
        """
        if name is None:
            if len(self.members) == 1:
                return self.members[0]
            shown = ", ".join(f"`{one}`" for one in self.own_names[:20])
            text = f"This server serves several models: {shown}. Name one in the field model, or as ?model=NAME."
            raise ApiError(400, text, param="model")
        found = self._names.get(name) or self._added.get(name) or await self._ask_for(name)
        if found is None and name.endswith(_LATEST):  # Ollama's clients add it
            found = self._names.get(name.removesuffix(_LATEST))
        if found is None:
            raise UnknownModelError(name, [*self._names, *self._added])
        return found

    async def cards(self) -> list[dict[str, Any]]:
        """Return an entry for each name, with the state of its model. What a process said last holds after its end."""
        said = await asyncio.gather(*(self._card_list(member) for member in self.members))
        return [
            card | {"state": member.state} for member, cards in zip(self.members, said, strict=True) for card in cards
        ]

    async def card(self, name: str) -> dict[str, Any]:
        """Return the entry of one name.

        Raises:
            UnknownModelError: there is no model of this name.
        """
        member = await self.find(name)
        cards = await self._card_list(member)
        card = next((card for card in cards if card["id"] == name), None)
        return (card or self._plain(member, name, parent=member.name)) | {"state": member.state}

    async def _ask_for(self, name: str) -> Member | None:
        """Ask the running processes for a name that only they may know, such as an adapter's."""
        if "?" in name:  # the link's URLs have no escapes
            return None
        answers = await asyncio.gather(*(member.told(f"/v1/models/{name}") for member in self.members))
        for member, answer in zip(self.members, answers, strict=True):
            if answer is not None:
                self._added[name] = member
                return member
        return None

    async def _card_list(self, member: Member) -> list[dict[str, Any]]:
        answer = await member.told("/v1/models")
        if answer is not None:
            cards: list[dict[str, Any]] = msgspec.json.decode(answer)["data"]
            self._cards[member.name] = cards
            self._added |= {card["id"]: member for card in cards if card["id"] not in self._names}
        return self._cards.get(member.name) or self._unseen(member)

    def _unseen(self, member: Member) -> list[dict[str, Any]]:
        names = [(name, None) for name in member.entry.names] + [(name, member.name) for name in member.entry.added]
        return [self._plain(member, name, parent=parent) for name, parent in names]

    def _plain(self, member: Member, name: str, *, parent: str | None) -> dict[str, Any]:
        """Return an entry with what is known before the model was loaded for the first time."""
        told = {"id": name, "object": "model", "created": self._started, "owned_by": "octavo"}
        return told | {"root": member.entry.engine.model.model, "parent": parent, "max_model_len": None, "tasks": None}


def anthropic_card(entry: dict[str, Any]) -> dict[str, Any]:
    """Return one of its entries in the form of Anthropic's API."""
    return anthropic.card(entry["id"], entry["created"], entry["max_model_len"]) | {"state": entry["state"]}
