"""Drafters by name. Each has one frozen dataclass of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quasar_trt.drafters.base import Drafter
from quasar_trt.drafters.eagle import EagleDrafter, EagleOptions
from quasar_trt.drafters.engine import EngineDrafter, EngineOptions
from quasar_trt.drafters.medusa import MedusaDrafter, MedusaOptions
from quasar_trt.drafters.ngram import NgramDrafter, NgramOptions
from quasar_trt.drafters.recycle import RecycleDrafter, RecycleOptions
from quasar_trt.drafters.suffix import SuffixDrafter, SuffixOptions
from quasar_trt.errors import QuasarError, unknown

# name -> (drafter, its options); the drafter's constructor takes an instance of the options, or what it drafts with and the
# options by name
DRAFTERS: dict[str, tuple[type[Drafter], type]] = {
    "suffix": (SuffixDrafter, SuffixOptions),
    "ngram": (NgramDrafter, NgramOptions),
    "recycle": (RecycleDrafter, RecycleOptions),
    "engine": (EngineDrafter, EngineOptions),
    "medusa": (MedusaDrafter, MedusaOptions),
    "eagle": (EagleDrafter, EagleOptions),
}
# name -> what it drafts with, which is given behind the name and a colon
OPERANDS = {"engine": "DIR", "medusa": "DIR", "eagle": "DIR"}


def drafter_names() -> list[str]:
    """What may be asked for."""
    return [f"{name}:{OPERANDS[name]}" if name in OPERANDS else name for name in DRAFTERS]


def check_drafter_name(name: str, besides: Sequence[str] = ()) -> None:
    """Raises QuasarError for a name that is none of `drafter_names`; `besides` are others that would be allowed."""
    kind, colon, operand = name.partition(":")
    if kind not in DRAFTERS or (colon and kind not in OPERANDS):
        raise unknown("drafter", name, (*drafter_names(), *besides))
    if kind in OPERANDS and not operand:
        raise QuasarError(f"drafter is '{name}'; allowed: {kind}:{OPERANDS[kind]}")


def keeps_ids(name: str | None, temperature: float) -> bool:
    """Whether drafting emits the ids of plain decoding; otherwise it keeps their distribution alone. name: of a drafter, or None."""
    return name is None or temperature == 0 or not DRAFTERS[name.partition(":")[0]][0].draws


def make_drafter(name: str | None, options: Mapping[str, object] | None = None) -> Drafter | None:
    """The drafter of that name, as `drafter_names` shows it, with those options; None means none.

    Raises QuasarError for an unknown name or option (naming the nearest), a value that is not allowed, or options without
    a drafter.
    """
    options = dict(options or {})
    if name is None:
        if options:
            raise QuasarError(
                f"drafter options {sorted(options)} without a drafter; choose one of: {', '.join(drafter_names())}"
            )
        return None
    check_drafter_name(name)
    kind, _, operand = name.partition(":")
    drafter, options_class = DRAFTERS[kind]
    return drafter(operand, **options) if operand else drafter(options_class(**options))
