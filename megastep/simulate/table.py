"""Results of simulations as text."""

from megastep.plan.planning import gib
from megastep.simulate.simulation import Result


def text(result: Result, times: str) -> str:
    """One simulation. times: where its seconds come from."""
    lines = [
        f"simulated, not measured: {len(result.counted)} training steps on {result.gpus} GPUs, "
        f"times from {times}",
        f"episodes: {result.episodes}",
        "",
        *(f"{name:<34}{value}" for name, value in _facts(result).items()),
    ]
    return "\n".join(lines)


def _facts(result: Result) -> dict[str, str]:
    facts = {
        "tokens/s/GPU": f"{result.tokens_per_gpu_s:.4g}, sampled {result.sampled_per_gpu_s:.4g}",
        "seconds per training step": f"{result.step_s:.4g}: waits for rollout "
        f"{result.mean('time/rollout_s'):.4g}, update {result.mean('time/update_s'):.4g}, "
        f"weight sync {result.mean('time/sync_s'):.4g}",
        "ranks idle": f"{result.ranks_idle:.0%}",
        "engines idle": f"{result.engines_idle:.0%}; {_engine_parts(result)}",
        "GPUs idle": f"{result.gpus_idle:.0%}",
        "prompt tokens from prefix caches": f"{result.cache_hits:.0%}",
        "staleness": _staleness(result),
    }
    if result.store_bytes:
        facts["object store"] = f"{gib(result.store_bytes)} GiB of routing, at most"
    failed = result.mean("rollout/stop_engine_error")
    if failed:
        facts["failed trajectories"] = f"{failed:.1%}: calls over engine.request_timeout_s"
    problems = result.plan.problems()
    if problems:
        facts["does not fit"] = problems[0]
    return facts | {"what binds": result.binds()}


def _engine_parts(result: Result) -> str:
    parts = sorted(result.engine_fractions().items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {fraction:.0%}" for name, fraction in parts if fraction >= 0.005)


def _staleness(result: Result) -> str:
    line = f"mean {result.mean('staleness/mean'):.2f}"
    line += f", at most {max(row.metrics.get('staleness/max', 0) for row in result.counted):g}"
    waited = result.mean("async/waited")
    dropped = result.mean("async/dropped")
    if waited:
        line += f"; {waited:.1f} groups per step waited for"
    if dropped:
        line += f"; {dropped:.1f} groups per step dropped"
    return line


COLUMNS = {
    "tokens/s/GPU": lambda r: f"{r.tokens_per_gpu_s:.4g}",
    "step s": lambda r: f"{r.step_s:.4g}",
    "GPUs": lambda r: f"{r.gpus}",
    "ranks idle": lambda r: f"{r.ranks_idle:.0%}",
    "engines idle": lambda r: f"{r.engines_idle:.0%}",
    "GPUs idle": lambda r: f"{r.gpus_idle:.0%}",
    "staleness": lambda r: f"{r.mean('staleness/mean'):.2f}",
    "store GiB": lambda r: gib(r.store_bytes),
    "what binds": lambda r: r.binds(),
}


def markdown_row(name: str, result: Result) -> str:
    cells = [column(result) for column in COLUMNS.values()]
    return f"| {' | '.join([name, *cells])} |"


def comparison(results: dict[str, Result | str], heading: str) -> str:
    """A row per value; a string instead of a result is why there is none."""
    rows = [[heading, *COLUMNS]]
    for name, result in results.items():
        if isinstance(result, str):
            rows.append([name, result])
        else:
            rows.append([name, *(column(result) for column in COLUMNS.values())])
    widths = [
        max(len(row[i]) for row in rows if len(row) == len(rows[0])) for i in range(len(rows[0]))
    ]
    widths[0] = max(len(row[0]) for row in rows)
    lines = []
    for row in rows:
        first = row[0].ljust(widths[0])
        if len(row) == 2:
            lines.append(f"{first}  {row[1]}")
            continue
        middle = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1])]
        lines.append("  ".join([first, *middle, row[-1]]))
    return "\n".join(lines)
