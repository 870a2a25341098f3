"""report.html: self-contained. No scripts, no links; the page's security policy forbids both."""

import base64
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from megastep.report.curves import Series, series
from megastep.report.meanings import MEANINGS, meaning_of
from megastep.report.tokens import (
    SHADES,
    SHADES_PER_NAT,
    TokenDecoder,
    prompt_html,
    response_html,
    visible,
)
from megastep.samples.metrics import succeeded
from megastep.samples.prefix import shared_prefixes, shared_tokens
from megastep.types import Group, Step, Trajectory

TRAJECTORIES = 12
TOKENS = 40_000  # of all trajectories on the page, which keeps it to a few megabytes
STEP_TOKENS = 2_000  # shown of the beginning, and of the end, of one prompt or response
COMPARED = 32  # earlier turns that a turn may continue
ENV_METRIC_CHARACTERS = 120  # shown of one value that an environment reports
HEADLINES = (
    "reward/success",
    "eval/success",
    "reward/mean",
    "eval/reward_mean",
    "rollout/turns_mean",
    "rollout/response_tokens_mean",
    "train/loss",
    "train/grad_norm",
    "mismatch/kl",
    "routing_replay/conflict_rate",
    "train/sharing_ratio",
    "time/step_s",
)
HIGHER_IS_BETTER = (
    "reward/mean",
    "reward/success",
    "reward/pass_at_",
    "eval/reward_mean",
    "eval/success",
    "eval/pass_at_",
    "routing_replay/agreement",
    "train/sharing_ratio",
    "train/packing_efficiency",
    "train/balance",
)
LOWER_IS_BETTER = ("mismatch/", "routing_replay/conflict_rate", "time/")

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; max-width: 1180px; margin: 2em auto;
       padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2em } img { max-width: 100% }
table { border-collapse: collapse }
td, th { padding: .15em .9em .15em 0; text-align: left; white-space: nowrap }
th { color: #667; font-weight: 600 }
td.number { text-align: right; font-variant-numeric: tabular-nums }
tr + tr td { border-top: 1px solid #eceef2 } small, .note { color: #667 }
.bad { color: #b00020; font-weight: 600 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3em 0; padding: .5em .7em;
      border-radius: 5px; font: 13px/1.6 ui-monospace, monospace }
pre.prompt { background: #f3f5f8 } pre.response { border: 1px solid #d5dae2 }
details.trajectory { border: 1px solid #d5dae2; border-radius: 7px; padding: .5em .9em;
                     margin: .7em 0 }
details.trajectory > summary { cursor: pointer } .turn { margin: .8em 0 0 1em }
.success { color: #1a7f37; font-weight: 600 } .failure { color: #b3541e; font-weight: 600 }
.special { color: #6b3fa0; font-weight: 600; margin: 0 .15em }
.untrained { color: #8a93a3; text-decoration: underline dotted }
""" + "".join(
    f".p{i} {{ background: rgba(240, 110, 20, {i * 0.075:.3f}) }}\n" for i in range(SHADES)
)


@dataclass
class SavedRollouts:
    """Groups of a rollout file, and the decoder that shows them."""

    groups: list[Group] = field(default_factory=list)
    source: str = ""
    decoder: TokenDecoder = field(default_factory=TokenDecoder)
    problems: list[str] = field(default_factory=list)  # why something is missing


def render(
    name: str, config: dict, rows: list[dict], curves_png: bytes | None, rollouts: SavedRollouts
) -> str:
    body = [
        f"<h1>{visible(name)}</h1>",
        _facts(config, rows),
        "<h2>Metrics</h2>",
        *_metrics(rows),
        *_curves(curves_png),
        "<h2>Trajectories</h2>",
        *_trajectories(rollouts),
    ]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<title>{visible(name)}</title><style>{STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def _curves(png: bytes | None) -> list[str]:
    if png is None:
        return []
    picture = base64.b64encode(png).decode()
    return ["<h2>Curves</h2>", f'<img alt="curves" src="data:image/png;base64,{picture}">']


def setting(config: dict, section: str, key: str) -> str | int | float | None:
    """A value of a config that was not validated."""
    found = config.get(section)
    value = found.get(key) if isinstance(found, dict) else None
    return value if isinstance(value, (str, int, float)) else None


def _facts(config: dict, rows: list[dict]) -> str:
    last = max((row["step"] for row in rows), default=None)
    planned = setting(config, "train", "steps")
    progress = f"{last} of {planned}" if last and planned else last or None
    facts = {
        "model": setting(config, "model", "path"),
        "environment": setting(config, "env", "name"),
        "agent": setting(config, "agent", "function"),
        "loss": setting(config, "loss", "type"),
        "seed": setting(config, "train", "seed"),
        "training steps": progress,  # an evaluation has none
    }
    given = {name: value for name, value in facts.items() if value is not None}
    return (
        "<p>"
        + " · ".join(f"{name} <b>{visible(str(value))}</b>" for name, value in given.items())
        + "</p>"
    )


# ---------------------------------------------------------------- metrics


def _metrics(rows: list[dict]) -> Iterator[str]:
    """A table of the headline metrics, and a folded one of the others."""
    order = {name: i for i, name in enumerate(MEANINGS)}
    names = sorted(
        {name for row in rows for name in row} - {"step"},
        key=lambda n: (order.get(n, len(order)), n),
    )
    found = {name: points for name in names if (points := series(rows, name))}
    if not found:
        yield '<p class="note">There are no metrics yet.</p>'
        return
    headlines = [name for name in HEADLINES if name in found]
    yield _table({name: found.pop(name) for name in headlines})
    if found:
        yield f"<details><summary>{len(found)} more</summary>{_table(found)}</details>"


def _table(metrics: dict[str, Series]) -> str:
    head = "<tr><th>metric</th><th>first</th><th>last</th><th>best</th><th>from – to</th></tr>"
    body = "".join(_row(name, points) for name, points in metrics.items())
    return f'<table class="metrics">{head}{body}</table>'


def _row(name: str, points: Series) -> str:
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    values = [value for _, value in finite]
    spread = f"{_number(min(values))} – {_number(max(values))}" if values else ""
    missing = len(points) - len(finite)
    spread += f' <span class="bad">{missing} not finite</span>' if missing else ""
    title = visible(meaning_of(name) or "")
    metric = f'<td title="{title}">{visible(name)}</td>'
    first = _cell(*points[0])
    last = _cell(*points[-1])
    return f"<tr>{metric}{first}{last}{_best(name, finite)}<td>{spread}</td></tr>"


def _best(name: str, finite: Series) -> str:
    """Empty for a metric of which neither more nor less is better."""
    if finite and name.startswith(HIGHER_IS_BETTER):
        return _cell(*max(finite, key=lambda point: point[1]))
    if finite and name.startswith(LOWER_IS_BETTER):
        return _cell(*min(finite, key=lambda point: point[1]))
    return "<td></td>"


def _cell(step: int, value: float) -> str:
    return f'<td class="number">{_number(value)} <small>at {step}</small></td>'


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else f'<span class="bad">{value}</span>'


# ---------------------------------------------------------------- trajectories


def _trajectories(rollouts: SavedRollouts) -> Iterator[str]:
    yield from (f'<p class="note">{visible(problem)}</p>' for problem in rollouts.problems)
    if not rollouts.groups:
        yield '<p class="note">No rollouts were saved.</p>'
        return
    total = sum(len(group.trajectories) for group in rollouts.groups)
    shown = list(_chosen(rollouts.groups))
    yield (
        f'<p class="note">{len(shown)} of the {total} trajectories in {visible(rollouts.source)}, '
        "the best and the worst of each prompt.</p>"
    )
    yield _legend()
    yield from (_trajectory(t, rollouts.decoder, is_open=i == 0) for i, t in enumerate(shown))


def _chosen(groups: list[Group]) -> Iterator[Trajectory]:
    """The best and the worst trajectory of each group, up to TRAJECTORIES or TOKENS."""
    count = 0
    tokens = 0
    for group in groups:
        ordered = sorted(group.trajectories, key=lambda t: -t.reward)
        for trajectory in ordered[:1] + ordered[1:][-1:]:
            if count == TRAJECTORIES or (count and tokens > TOKENS):
                return
            yield trajectory
            count += 1
            tokens += sum(min(len(s.response_ids), 2 * STEP_TOKENS) for s in trajectory.steps)


def _legend() -> str:
    shades = "".join(
        f'<span class="p{i}"> {-i / SHADES_PER_NAT:.1f} </span>' for i in range(SHADES)
    )
    return (
        f"<p>Response tokens by the logprob they were sampled with: {shades}. "
        '<span class="untrained">Underlined</span>: not trained on. '
        '<span class="special">Violet</span>: special tokens. ▫: the beginning of a character. '
        "Hover over a token for its id, logprob, weight version and routed experts.</p>"
    )


def _trajectory(trajectory: Trajectory, decoder: TokenDecoder, is_open: bool) -> str:
    outcome = "success" if succeeded(trajectory) else "failure"
    env_metrics = ", ".join(
        f"{name} {value}"[:ENV_METRIC_CHARACTERS]
        for name, value in trajectory.env_metrics.items()
        if name != "roles"
    )
    turns = len(trajectory.steps)
    heading = (
        f"prompt {trajectory.group_id}, sample {trajectory.index}: "
        f'<span class="{outcome}">reward {trajectory.reward:g}</span>, '
        f"{turns} turn{'s' * (turns != 1)}, ended by {visible(trajectory.stop_reason)} "
        f"<small>{visible(env_metrics)}</small>"
    )
    turns_html = [_turn(call, decoder) for call in _calls(trajectory)]
    opened = " open" if is_open else ""
    summary = f"<summary>{heading}</summary>"
    return f'<details class="trajectory"{opened}>{summary}{"".join(turns_html)}</details>'


@dataclass
class _Call:
    """A step of a trajectory, and what it shares with an earlier one."""

    step: Step
    role: str | None
    seen: int  # leading prompt tokens of the earlier step
    origin: int | None  # the earlier step's index, if it is not the previous one
    new_ids: np.ndarray  # the tokens after these


def _calls(trajectory: Trajectory) -> Iterator[_Call]:
    """Each step, as the continuation of the earlier step that it shares the most with: agents may
    run sub-agents in parallel and begin a conversation anew."""
    roles = trajectory.env_metrics.get("roles")
    if not isinstance(roles, list) or len(roles) != len(trajectory.steps):
        roles = [None] * len(trajectory.steps)
    for i, (step, prompt_ids, seen) in enumerate(shared_prefixes(trajectory.steps)):
        origin = None
        for earlier in trajectory.steps[max(0, i - COMPARED) : max(0, i - 1)]:
            shared = shared_tokens(earlier, prompt_ids)
            if shared > seen:
                seen = shared
                origin = earlier.index
        yield _Call(step, roles[i], seen, origin, prompt_ids[seen:])


def _turn(call: _Call, decoder: TokenDecoder) -> str:
    """The prompt from where it differs from an earlier turn's tokens on, and the response."""
    step = call.step
    new_ids = call.new_ids
    before = "the previous turn" if call.origin is None else f"turn {call.origin + 1}"
    known = f"<small>{call.seen} tokens shared with {before}, then</small> " if call.seen else ""
    role = f"<b>{visible(str(call.role))}</b>, " if call.role is not None else ""
    prompt = _both_ends(len(new_ids), lambda part: prompt_html(new_ids[part].tolist(), decoder))
    response = _both_ends(len(step.response_ids), lambda part: response_html(step, decoder, part))
    return (
        f'<div class="turn">turn {step.index + 1}: {role}finish <b>{visible(step.finish)}</b>, '
        f"reward {step.reward:g}, {step.prompt_tokens} prompt tokens, "
        f"{len(step.response_ids)} response tokens"
        f'<pre class="prompt">{known}{prompt}</pre><pre class="response">{response}</pre></div>'
    )


def _both_ends(length: int, write: Callable[[slice], str]) -> str:
    """All tokens, or the beginning and the end of a long sequence."""
    if length <= 2 * STEP_TOKENS:
        return write(slice(0, length))
    left_out = f'<span class="note"> … {length - 2 * STEP_TOKENS} tokens are not shown … </span>'
    return write(slice(0, STEP_TOKENS)) + left_out + write(slice(length - STEP_TOKENS, length))
