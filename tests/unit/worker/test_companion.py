from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.core.cache_groups import CacheGroup, GroupKind
from octavo.core.errors import ConfigError
from octavo.worker.companion import Companion


def test_a_companion_with_recurrent_layers_is_refused_with_a_remedy() -> None:
    layers = [
        SimpleNamespace(keeps=lambda size: CacheGroup()),
        SimpleNamespace(keeps=lambda size: CacheGroup(GroupKind.STATE)),
    ]
    companion = cast(Any, SimpleNamespace(files=SimpleNamespace(name="small"), block_size=16))
    assert Companion._groups_of(companion, cast(Any, layers[:1])) == (CacheGroup(layers=(0,)),)
    with pytest.raises(ConfigError, match=r"^small has recurrent layers, .*\. Name a model without them\.$"):
        Companion._groups_of(companion, cast(Any, layers))
