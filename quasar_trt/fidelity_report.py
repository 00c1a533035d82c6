"""What is printed of fidelity.json: after a build, by `info` and by `eval fidelity`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from rich.console import Console

from quasar_trt.checkpoint import below_layer
from quasar_trt.errors import QuasarError
from quasar_trt.tables import facts_table

FIGURES = (
    "kl",
    "kl_standard_error",
    "kl_p99",
    "top1_agreement",
    "top1_standard_error",
    "top5_agreement",
    "source_perplexity",
    "engine_perplexity",
)
_WORST = 5


def read_fidelity(path: Path) -> dict:
    """fidelity.json, or nothing where it does not exist. It has all figures, or none where only `groups` were recorded.

    Raises QuasarError for a file that a build cannot have written.
    """
    if not path.exists():
        return {}
    try:
        measured = json.loads(path.read_text())
    except OSError as error:
        raise QuasarError(f"cannot read {path}: {error.strerror}; build the engine again") from None
    except ValueError:
        raise _damaged(path, "not JSON") from None
    if not isinstance(measured, dict):
        raise _damaged(path, "not a JSON object")
    if "kl" in measured:
        for name in FIGURES:
            if not isinstance(measured.get(name), float | int):
                raise _damaged(path, f"{name} is {measured.get(name)!r}")
        errors = measured.get("layer_errors")
        if not (isinstance(errors, list) and errors and all(isinstance(error, float | int) for error in errors)):
            raise _damaged(path, "layer_errors are no list of numbers")
        if not isinstance(measured.get("text"), str):
            raise _damaged(path, f"text is {measured.get('text')!r}")
    groups = measured.get("groups", {})
    if not isinstance(groups, dict) or not all(map(_is_group, groups.values())):
        raise _damaged(path, "a group without its alpha, statistic or error")
    return measured


def _damaged(path: Path, why: str) -> QuasarError:
    return QuasarError(f"{path} is damaged: {why}; build the engine again")


def _is_group(group: object) -> bool:
    """A group has an error; where it is smoothed, an exponent and a statistic."""
    return (
        isinstance(group, dict)
        and isinstance(group.get("error"), float | int)
        and isinstance(group.get("alpha"), float | int | None)
        and isinstance(group.get("statistic"), str | None)
        and (group.get("alpha") is None) == (group.get("statistic") is None)
    )


def show(measured: Mapping, console: Console, calibration: Mapping | None = None) -> None:
    """Prints the main figures, the five worst layers and, where they are recorded, the smoothing of each kind of group.

    measured: a whole fidelity.json, or {}. calibration: the manifest's, for the number of clamped channels.
    """
    facts = (
        _figures(measured)
        if "kl" in measured
        else {"not measured": "quasar-trt eval fidelity ENGINE_DIR does, for engines of one rank"}
    )
    facts |= _smoothing(measured.get("groups", {}))
    if calibration and "clamped_channels" in calibration:
        facts["clamped channels"] = calibration["clamped_channels"]
    console.print(facts_table("fidelity to the source model", facts))


def _figures(measured: Mapping) -> dict[str, object]:
    errors = measured["layer_errors"]
    worst = sorted(range(len(errors)), key=lambda i: -errors[i])[:_WORST]
    return {
        "KL(source, engine)": f"{measured['kl']:.3g} +- {measured['kl_standard_error']:.2g} nats, "
        f"99th percentile {measured['kl_p99']:.3g}",
        "top-1 agreement": f"{measured['top1_agreement']:.2%} +- {measured['top1_standard_error']:.2%}",
        "top-5 agreement": f"{measured['top5_agreement']:.2%}",
        "perplexity": f"source {measured['source_perplexity']:.5g}, engine {measured['engine_perplexity']:.5g}",
        "worst layers": ", ".join(f"{i} ({errors[i]:.2%})" for i in worst),
        "text": measured["text"],
    }


def _smoothing(groups: Mapping[str, Mapping]) -> dict[str, str]:
    """Name of a kind of group below its layer -> the exponents and statistics chosen over the layers."""
    kinds: dict[str, list[Mapping]] = {}
    for name, group in groups.items():
        kinds.setdefault(below_layer(name), []).append(group)
    facts = {}
    for kind, members in kinds.items():
        smoothed = [group for group in members if group["alpha"] is not None]
        if not smoothed:
            facts[kind] = "rotated, not smoothed"
            continue
        alphas = [group["alpha"] for group in smoothed]
        statistics = Counter(group["statistic"] for group in smoothed).most_common()
        chosen = ", ".join(f"{statistic} {count}" for statistic, count in statistics)
        facts[kind] = f"alpha {median(alphas):g} ({min(alphas):g} to {max(alphas):g}), {chosen}"
    return facts
