from __future__ import annotations

from typing import Any, cast

import pytest

from octavo.core.errors import UnsupportedError
from octavo.engine.multiproc import RankWorker


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda worker: worker.call(print), "can't call functions of this one. Run it on one device without that flag"),
        (lambda worker: worker.take_weights([]), "can't use tensors of this one: send "),
    ],
)
def test_what_needs_the_caller_s_process_is_refused_with_a_remedy(call: Any, remedy: str) -> None:
    worker = RankWorker(cast(Any, None), cast(Any, None), can_sleep=False)
    with pytest.raises(UnsupportedError) as raised:
        call(worker)
    assert str(raised.value).startswith("The model is in separate processes (several devices, or --distributed-")
    assert remedy in str(raised.value)
