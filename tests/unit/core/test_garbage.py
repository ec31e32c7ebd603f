from __future__ import annotations

import gc

from octavo.core.garbage import seldom_collecting


def test_what_exists_is_set_aside_for_the_time_of_the_block_only() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with seldom_collecting():
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen + 1000
        assert gc.get_threshold()[0] > 10 * before[0]
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
