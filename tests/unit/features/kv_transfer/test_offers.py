from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cache.tier import BlockNames, page_name
from octavo.features.kv_transfer.offer import Offer, Send, is_sent, kept_ranges, option_of, ranges_of

NAMES = BlockNames("realm", "", 2).upto(list(range(12)), 6)


def offer(*groups: list[tuple[int, int]], last: bytes = NAMES[3]) -> Offer:
    return Offer(
        remote_host="a",
        remote_port=1,
        remote_ranks=[("a", 1)],
        blocks=[list(one) for one in groups],
        last_block=last.hex(),
    )


@given(st.sets(st.integers(0, 40)))
def test_ranges_have_the_indices(indices: set[int]) -> None:
    found = ranges_of(sorted(indices))
    assert [index for first, end in found for index in range(first, end)] == sorted(indices)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))


def test_pages_of_each_group() -> None:
    found = offer([(0, 4)], [(1, 2), (3, 4)]).pages(NAMES)
    assert found == [*(page_name(NAMES[i], 0) for i in range(4)), page_name(NAMES[1], 1), page_name(NAMES[3], 1)]
    kept = set(found)
    assert list(kept_ranges(NAMES, 2, kept.__contains__)) == [[(0, 4)], [(1, 2), (3, 4)]]


@pytest.mark.parametrize(
    "other",
    [
        offer([(0, 4)], last=NAMES[2]),
        offer([(0, 3)]),
        offer([(0, 9)]),
        offer(),
        offer([]),
        offer([(0, 4)], last=BlockNames("other realm", "", 2).upto(list(range(12)), 6)[3]),
    ],
)
def test_blocks_of_another_prompt_or_model_have_no_pages(other: Offer) -> None:
    assert other.pages(NAMES) == []
    assert other.pages([]) == []


def test_routers_pass_it_on_as_json() -> None:
    given = offer([(0, 4)], [(1, 2)])
    passed = msgspec.json.decode(msgspec.json.encode(given))
    assert passed["do_remote_prefill"] is True
    assert msgspec.convert(passed | {"added_by_a_router": 1}, Offer) == given


def test_options() -> None:
    def options(option: object) -> dict[str, msgspec.Raw]:
        return {"kv_transfer": msgspec.Raw(msgspec.msgpack.encode(option))}

    assert is_sent(options(Send()))
    assert option_of(options(Send())) == Send()
    assert not is_sent({"kv_transfer": msgspec.Raw(msgspec.msgpack.encode({"type": "ask"}))})
    assert not is_sent({})
    assert option_of({}) is None
