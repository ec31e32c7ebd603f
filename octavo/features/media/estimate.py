"""What a tower takes, before it is loaded. It needs torch only when it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.features import FeatureContext

if TYPE_CHECKING:
    from octavo.worker.planned import Needs, Planned

FLAGS = frozenset({"limit-mm-per-prompt", "mm-processor-kwargs", "mm-encoder-cache-gb"})


def estimate(context: FeatureContext, planned: Planned, limits: tuple[int, int]) -> Needs | None:
    from octavo.features.media.preprocessing import most_of_videos, own_fields, processor_config, refusals
    from octavo.features.media.settings import MediaSettings
    from octavo.features.media.towers.tower import planned_tower
    from octavo.features.media.worker import memory_of
    from octavo.nn.build import Build
    from octavo.nn.quant.base import everywhere
    from octavo.nn.quant.none import Unquantized
    from octavo.worker.planned import NOWHERE, Needs

    if all(refusals(context).values()):
        return None
    settings, files = context.settings_of(MediaSettings), planned.files
    build = Build(planned.dtype, NOWHERE, None, everywhere(Unquantized, planned.dtype, NOWHERE))
    processor = processor_config(files) | own_fields(files.config, settings.mm_processor_kwargs)
    tower = planned_tower(files.config, processor, build)
    of_videos = most_of_videos(context)
    _, reserved = memory_of(tower, settings, planned.spec.max_position, limits, of_videos)
    return Needs("tower", reserved)
