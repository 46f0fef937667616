"""How runs were set up: their starts, and their configs with origins."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from titan.observability.run_folder import Run
from titan.pages.page import Markup, folded, section, table, tag


def starts_section(runs: Sequence[Run]) -> Markup:
    """When and on what each run was started."""
    rows = []
    commands = []
    for run in runs:
        for number_, start in enumerate(run.starts):
            versions = start.get("versions") or {}
            layout = start.get("layout") or {}
            degrees = " × ".join(f"{name} {degree}" for name, degree in layout.items() if degree != 1) or "1 rank"
            commit = (start.get("git_commit") or "unknown")[:10] + (", changed" if start.get("git_dirty") else "")
            torch, device = versions.get("torch", "?"), versions.get("device", "?")
            again = len({row["step"] for row in start.get("dropped", ())})
            cells = [
                run.name,
                str(number_),
                moment(start["time"]),
                f"{start['step']:,}",
                str(start.get("world_size", "?")),
            ]
            rows.append((*cells, degrees, str(torch), str(device), commit, str(start.get("host", "?")), f"{again}"))
            commands.append(f"{run.name}, start {number_}\n  {start.get('command', '?')}")
    if not rows:
        return section("starts", "Starts", tag("p", "No starts.jsonl: an older titan wrote this folder."))
    heads = (
        "Run",
        "Start",
        "When",
        "After step",
        "Ranks",
        "Layout",
        "torch",
        "Device",
        "Commit",
        "Host",
        "Lines dropped",
    )
    listing = table(heads, rows, texts=10)
    return section("starts", "Starts", [listing, folded("commands", tag("pre", "\n".join(commands)))])


def config_section(runs: Sequence[Run]) -> Markup:
    """What isn't a default, and where it comes from; of several runs, where they differ."""
    known = [run for run in runs if run.settings]
    if not known:
        return section("config", "Config", tag("p", "No config.toml."))
    whole = [folded(f"the whole config of {run.name}", _listing(run)) for run in known]
    if len(known) == 1:
        own = known[0].settings
        rows = [(key, tag("code", each.value), each.origin) for key, each in own.items() if each.origin]
        given = table(("Setting", "Value", "From"), rows, texts=3)
        return section("config", "Config", [given, *whole], "What isn't a default, and where it comes from.")
    keys = dict.fromkeys(key for run in known for key in run.settings)
    rows_ = []
    for key in keys:
        values = [run.settings[key].value if key in run.settings else "unset" for run in known]
        if len(set(values)) > 1:
            rows_.append((key, *(tag("code", value) for value in values)))
    listing = table(("Setting", *(run.name for run in known)), rows_, texts=1 + len(known))
    content = listing if rows_ else tag("p", "All settings are the same.")
    return section("config", "Config", [content, *whole], "Where the runs differ.")


def _listing(run: Run) -> Markup:
    lines: list[str | Markup] = []
    before = ""
    for key, each in run.settings.items():
        part, _, name = key.rpartition(".")
        if part != before:
            lines.append(tag("b", f"\n[{part}]\n" if before else f"[{part}]\n"))
            before = part
        lines.append(f"{name} = {each.value}")
        lines.append(tag("span", f"  # {each.origin}\n") if each.origin else "\n")
    return tag("pre", lines)


def moment(when: float) -> str:
    """Unix seconds as a time of day."""
    return datetime.fromtimestamp(when, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
