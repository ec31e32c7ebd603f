"""Features whose threads work while nothing else happens: an idle engine turns often, and makes no gauges meanwhile."""

from __future__ import annotations

from core_kit import client_of, run, until

from octavo.schedule.hooks import EngineHook


class Working(EngineHook):
    """Its thread works until the test says otherwise."""

    name = "working"

    def __init__(self) -> None:
        self.works = False
        self.turns = self.measured = 0

    @property
    def awaits(self) -> bool:
        return self.works

    def turn(self) -> None:
        self.turns += 1

    def call(self, method: str, args: object) -> object:
        self.works = True
        return {}

    def metrics(self) -> tuple[()]:
        self.measured += 1
        return ()


def test_an_idle_engine_turns_often_while_a_thread_works(short_path, monkeypatch):
    monkeypatch.setattr("octavo.engine.core_server._STATS_S", 600.0)
    monkeypatch.setattr("octavo.engine.core_server._IDLE_POLL_MS", 600_000)

    async def main():
        hook = Working()
        async with client_of(short_path, hooks=[hook]) as (client, _):
            await client.call("working", "begin", {})
            before = hook.measured
            await until(lambda: hook.turns > 20)
            assert hook.measured - before < 5

    run(main())
