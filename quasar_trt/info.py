"""What `quasar-trt info` prints: this machine, or one engine directory."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from quasar_trt.checkpoint import Checkpoint
from quasar_trt.fidelity_report import read_fidelity
from quasar_trt.fidelity_report import show as show_fidelity
from quasar_trt.generation_config import GenerationConfig, sampling_text
from quasar_trt.machine import describe_machine
from quasar_trt.manifest import Manifest
from quasar_trt.plan import Plan
from quasar_trt.recipe import RESCORED, Recipe
from quasar_trt.tables import facts_table

_WORST_GROUPS = 5
_HEADS = {
    "bf16": "BF16 head",
    "int8": "INT8 head with 16-bit activations",
    "rescored": f"INT8 head with 16-bit activations, best {RESCORED} rescored in BF16",
}
_LOWERINGS = {
    "plugin": "activations quantized by plugins",
    "qdq": "explicit Q/DQ of activations",
    "weight_only": "BF16 activations",
    "stock": "its own modules",
    "quasar": "our model class",
}


def show_machine(console: Console) -> None:
    console.print(facts_table("this machine", describe_machine()))


def show_engine(directory: Path, manifest: Manifest, console: Console) -> None:
    """Manifest, model, sizes and fidelity. Raises QuasarError for a directory that is no sound engine."""
    console.print(facts_table(str(directory), _manifest_facts(manifest, GenerationConfig.read(directory).sampling)), "")
    if (directory / "checkpoint").is_dir():
        model = Checkpoint.open(directory / "checkpoint").config
        console.print(facts_table("model", _model_facts(model)), "")
    console.print(_files_table(manifest), "")
    measured = read_fidelity(directory / "fidelity.json")
    show_fidelity(measured, console)
    if groups := measured.get("groups"):
        console.print("", _groups_table(groups))


def verify_engine(directory: Path, manifest: Manifest, console: Console, progress_console: Console) -> None:
    """Hashes every weight file, with a bar on `progress_console`. Raises QuasarError naming the first that differs."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    shown = progress_console.is_terminal
    with Progress(*columns, console=progress_console, transient=True, disable=not shown) as progress:
        bar = progress.add_task("hashing", total=manifest.size)
        manifest.verify(directory, lambda size: progress.advance(bar, size))
    console.print(f"every weight file has the sha256 of the manifest ({len(manifest.files)} files)")


def size_text(count: int | float) -> str:
    """Bytes for people, decimal units as memory bandwidth is quoted: 269060544 -> "269.1 MB"."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count:.0f} B"


def _manifest_facts(manifest: Manifest, sampling: dict[str, object]) -> dict[str, object]:
    limits, calibration = manifest.limits, manifest.calibration
    facts = {
        "format version": manifest.format_version,
        "built by": ", ".join(f"{name} {version}" for name, version in manifest.producer.items()),
        "source": f"{manifest.source['path']} ({manifest.source['kind']})",
        "target": f"{manifest.target}, {manifest.tp_size} rank{'s' if manifest.tp_size > 1 else ''}",
        **({"plans": _plan_text(manifest.plan)} if manifest.plan else {}),
        "limits": f"batch {limits.max_batch_size}, sequence {limits.max_seq_len} tokens, draft {limits.max_draft_len} tokens",
        "recipe": _recipe_text(manifest.recipe),
        "calibration": _calibration_text(calibration) if calibration else "none",
    }
    notices = manifest.source.get("notices")
    if sampling:
        facts["sampling defaults"] = sampling_text(sampling)
    return facts | ({"notices": "\n".join(map(str, notices))} if isinstance(notices, list) and notices else {})


def _plan_text(plan: Plan) -> str:
    return f"SM {', '.join(map(str, plan.sms))}, by {plan.stack} {plan.version}, {_LOWERINGS[plan.lowering]}"


def _recipe_text(recipe: Recipe) -> str:
    if not recipe.quantized:
        return "BF16 weights, float activations"
    parts = [
        f"INT8 weights per output channel, rounding {recipe.rounding}",
        f"{recipe.activations}-bit activations {'of static scales' if recipe.static_activations else 'per token'}",
        f"smoothing {'searched' if recipe.smoothquant is None else f'alpha {recipe.smoothquant:g}'}",
        "rotated" if recipe.rotate else "not rotated",
        _HEADS[recipe.lm_head],
    ]
    if recipe.exclude:
        parts.append(f"BF16 where {' or '.join(recipe.exclude)}")
    if recipe.weight_only:
        parts.append(f"weight-only in {len(recipe.weight_only)} linears")
    return ", ".join(parts)


def _calibration_text(calibration: dict) -> str:
    """Numbers and names; a table, such as the outliers per linear, by its number of entries."""
    parts = {key: len(value) if isinstance(value, dict) else value for key, value in calibration.items()}
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in parts.items())


def _model_facts(model) -> dict[str, object]:
    return {
        "architecture": model.architecture,
        "layers": model.num_hidden_layers,
        "hidden / intermediate": f"{model.hidden_size} / {model.intermediate_size}",
        "heads / KV heads": f"{model.num_attention_heads} / {model.num_key_value_heads} of {model.head_size}",
        "vocabulary": f"{model.vocab_size}, head {'tied' if model.tie_word_embeddings else 'not tied'}",
    }


def _files_table(manifest: Manifest) -> Table:
    table = Table(
        title="weight files", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1)
    )
    table.add_column("file")
    table.add_column("size", justify="right")
    table.add_column("sha256")
    for name, record in manifest.files.items():
        table.add_row(name, size_text(record.size), f"{record.sha256[:16]}...")
    return table


def _groups_table(groups: dict) -> Table:
    worst = sorted(groups, key=lambda name: -groups[name]["error"])[:_WORST_GROUPS]
    return facts_table(
        "largest relative errors of quantized outputs",
        {name.removeprefix("transformer."): _group_text(groups[name]) for name in worst},
    )


def _group_text(group: dict) -> str:
    if group["alpha"] is None:
        return f"{group['error']:.4f} (not smoothed)"
    return f"{group['error']:.4f} (alpha {group['alpha']}, statistic {group['statistic']})"
