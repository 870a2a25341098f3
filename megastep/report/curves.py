"""curves.png: the headline metrics of a run over its training steps.

Panels without values are left out; with fewer than two training steps there is no picture. A value
that is not finite, or too large to draw, leaves a gap and a red line.
"""

import math
from dataclasses import dataclass
from io import BytesIO

COLUMNS = 4
DRAWABLE = 1e100  # matplotlib squares the length of an axis
FEW_POINTS = 40  # up to this many, each point has a marker
COLOURS = ("#1f5fa8", "#d9730d", "#2f8f4e", "#8a4fb0", "#b03a48", "#6b7280")

Series = list[tuple[int, float]]  # step, value


@dataclass(frozen=True)
class Panel:
    title: str
    lines: dict[str, str]  # metric → label
    fraction: bool = False  # values are between 0 and 1
    from_zero: bool = False


PANELS = (
    Panel("success", {"reward/success": "training", "eval/success": "held out"}, fraction=True),
    Panel("reward", {"reward/mean": "training", "eval/reward_mean": "held out"}),
    Panel(
        "response tokens per trajectory",
        {"rollout/response_tokens_mean": "training", "eval/response_tokens_mean": "held out"},
    ),
    Panel("loss", {"train/loss": "loss"}),
    Panel("gradient norm", {"train/grad_norm": "gradient norm"}),
    Panel("KL between engine and trainer", {"mismatch/kl": "KL"}),
    Panel(
        "routing replay",
        {"routing_replay/conflict_rate": "conflicts", "routing_replay/free_fraction": "free"},
    ),
)


def series(rows: list[dict], name: str) -> Series:
    """The values of a metric, without those that are not numbers, such as null."""
    found = [(row["step"], row.get(name)) for row in rows]
    return [(step, _float(value)) for step, value in found if isinstance(value, (bool, int, float))]


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # JSON integers are unbounded
        return math.inf if value > 0 else -math.inf


def draw(rows: list[dict]) -> bytes | None:
    """A PNG; None with fewer than two steps."""
    if len(rows) < 2:
        return None
    # Imported late, for it is slow; without pyplot, for no window is wanted.
    from matplotlib.figure import Figure

    panels = [
        (panel, lines) for panel in (*PANELS, _time_panel(rows)) if (lines := _lines(panel, rows))
    ]
    columns = min(COLUMNS, max(len(panels), 1))
    height = max(math.ceil(len(panels) / columns), 1)
    figure = Figure(figsize=(4 * columns, 2.9 * height), dpi=110, layout="constrained")
    for i, (panel, lines) in enumerate(panels):
        _draw_panel(figure.add_subplot(height, columns, i + 1), panel, lines)
    if not panels:
        figure.text(0.5, 0.5, "no metrics yet", ha="center", va="center", color="#6b7280")
    picture = BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _time_panel(rows: list[dict]) -> Panel:
    names = sorted(
        {name for row in rows for name in row if name.startswith("time/")} - {"time/run_s"}
    )
    return Panel(
        "seconds per training step",
        {name: name.removeprefix("time/").removesuffix("_s") for name in names},
        from_zero=True,
    )


def _lines(panel: Panel, rows: list[dict]) -> dict[str, Series]:
    return {label: found for name, label in panel.lines.items() if (found := series(rows, name))}


def _draw_panel(axes, panel: Panel, lines: dict[str, Series]) -> None:
    from matplotlib.ticker import MaxNLocator

    for i, (label, points) in enumerate(lines.items()):
        steps = [step for step, _ in points]
        values = [value if abs(value) <= DRAWABLE else math.nan for _, value in points]
        marker = "o" if len(points) <= FEW_POINTS else None
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(
            steps, values, label=label, color=colour, linewidth=1.4, marker=marker, markersize=3
        )
        for step in (step for step, value in zip(steps, values) if math.isnan(value)):
            axes.axvline(step, color="#d03030", alpha=0.35, linewidth=1)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel("training step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if panel.fraction:
        axes.set_ylim(-0.03, 1.03)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    if len(lines) > 1:
        axes.legend(fontsize=8, framealpha=0.7, edgecolor="none")
