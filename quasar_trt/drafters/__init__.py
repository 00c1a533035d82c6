"""Drafters by name. Each has one frozen dataclass of options."""

from __future__ import annotations

from collections.abc import Mapping

from quasar_trt.drafters.base import Drafter
from quasar_trt.drafters.ngram import NgramDrafter, NgramOptions
from quasar_trt.drafters.recycle import RecycleDrafter, RecycleOptions
from quasar_trt.drafters.suffix import SuffixDrafter, SuffixOptions
from quasar_trt.errors import QuasarError, unknown

# name -> (drafter, its options); the drafter's constructor takes an instance of the options
DRAFTERS: dict[str, tuple[type[Drafter], type]] = {
    "suffix": (SuffixDrafter, SuffixOptions),
    "ngram": (NgramDrafter, NgramOptions),
    "recycle": (RecycleDrafter, RecycleOptions),
}


def make_drafter(name: str | None, options: Mapping[str, object] | None = None) -> Drafter | None:
    """The drafter of that name with those options; None means none.

    Raises QuasarError for an unknown name or option (naming the nearest), a value that is not allowed, or options without
    a drafter.
    """
    options = dict(options or {})
    if name is None:
        if options:
            raise QuasarError(
                f"drafter options {sorted(options)} without a drafter; choose one of: {', '.join(DRAFTERS)}"
            )
        return None
    if name not in DRAFTERS:
        raise unknown("drafter", name, DRAFTERS)
    drafter, options_class = DRAFTERS[name]
    return drafter(options_class(**options))
