"""Output for people: progress bars and counters on a terminal, plain lines in a log file."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from tqdm import tqdm

LOG_EVERY_S = 5.0
WAIT_LOG_EVERY_S = 30.0
LOG_FORMAT = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def progress(name: str, total: int, unit: str, done: int = 0, file: TextIO | None = None) -> tqdm:
    """A tqdm bar on a terminal, a line per update in a log; stdout unless `file` is given."""
    file = file or sys.stdout
    bar = {"total": total, "initial": done, "desc": name, "unit": unit}
    if not file.isatty():
        log = _Lines(file)
        return tqdm(**bar, file=log, bar_format=LOG_FORMAT, mininterval=LOG_EVERY_S)
    if _has_no_size(file):  # tqdm would hide the bar
        return tqdm(**bar, file=file, ncols=100, nrows=20, mininterval=0.5)
    return tqdm(**bar, file=file, dynamic_ncols=True, mininterval=0.5)


def _has_no_size(file: TextIO) -> bool:
    """Whether the file is a pseudo-terminal whose size was never set."""
    try:
        return os.get_terminal_size(file.fileno()).lines == 0
    except OSError:
        return False


class _Lines:
    """Turns tqdm's carriage returns and padding into lines."""

    def __init__(self, file: TextIO):
        self.file = file
        self.last = ""

    def write(self, text: str) -> None:
        position = text.partition(" [")[0].strip()
        if position not in ("", self.last):  # tqdm repeats the last state on close
            self.file.write(text.strip() + "\n")
            self.last = position

    def flush(self) -> None:
        self.file.flush()


@contextmanager
def waiting(what: str, file: TextIO | None = None) -> Iterator[None]:
    """Print what is awaited and for how many seconds."""
    file = file or sys.stdout
    on_terminal = file.isatty()
    begun = time.monotonic()
    ended = threading.Event()

    def show(suffix: str) -> None:
        seconds = f"{what}: {time.monotonic() - begun:.0f} s"
        file.write(f"\r{seconds}{suffix}" if on_terminal else f"{seconds}{suffix}\n")
        file.flush()

    def count() -> None:
        while not ended.wait(1.0 if on_terminal else WAIT_LOG_EVERY_S):
            show("" if on_terminal else ", still waiting")

    counter = threading.Thread(target=count, name="waiting", daemon=True)
    counter.start()
    try:
        yield
    finally:
        ended.set()
        counter.join()
        show("\n" if on_terminal else "")


class Clock:
    """Seconds of the parts of a training step, by metric name, and of the whole."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._created = now()
        self.restart()

    def restart(self) -> None:
        self._begun = self._now()
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        begun = self._now()
        yield
        self._parts[part] = self._parts.get(part, 0.0) + self._now() - begun

    def seconds(self) -> dict[str, float]:
        now = self._now()
        return self._parts | {"time/step_s": now - self._begun, "time/run_s": now - self._created}


@contextmanager
def supervised_progress(name: str, steps: int) -> Iterator[Callable[[dict[str, float]], None]]:
    """The bar of a supervised stage; yields the function to call with each step's metrics."""
    with progress(name, steps, "step") as bar:

        def on_step(metrics: dict[str, float]) -> None:
            if "train/loss" in metrics:  # absent if no token is trained
                bar.set_postfix_str(f"loss {metrics['train/loss']:.3f}", refresh=False)
            bar.update()

        yield on_step


class LiveLine:
    """The progress bar of training."""

    def __init__(self, steps: int, done: int):
        self.steps = steps
        self.done = done
        self.bar: tqdm | None = None

    def __enter__(self) -> "LiveLine":
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.close()

    def show(self, metrics: dict[str, float]) -> None:
        # Created after the first training step, so that the rate excludes the start.
        if self.bar is None:
            self.bar = progress("train", self.steps, "step", self.done)
        held_out = f", held-out {metrics['eval/success']:.2f}" if "eval/success" in metrics else ""
        self.bar.set_postfix_str(
            f"reward {metrics['reward/mean']:.2f}, success {metrics['reward/success']:.2f}"
            f"{held_out}, {metrics['rollout/tokens_per_s']:.0f} tokens/s",
            refresh=False,
        )
        self.bar.update()

    def print(self, text: str) -> None:
        """A line above the bar."""
        tqdm.write(text)


@dataclass
class RolloutProgress:
    """The progress bar of a rollout: trajectories, tokens per second, success rate."""

    total: int
    name: str = "rollout"
    file: TextIO | None = None
    tokens: int = 0
    ended: int = 0
    successes: int = 0
    begun: float = field(default_factory=time.monotonic)

    def __enter__(self) -> "RolloutProgress":
        self.bar = progress(self.name, self.total, "traj", file=self.file)
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()

    def add(self, tokens: int, success: bool) -> None:
        """One trajectory has ended."""
        self.ended += 1
        self.tokens += tokens
        self.successes += success
        self.bar.set_postfix_str(
            f"{self.tokens_per_s:.0f} tokens/s, success {self.successes / self.ended:.2f}",
            refresh=False,
        )
        self.bar.update()

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(time.monotonic() - self.begun, 1e-9)


_SUMMARY = {
    "held-out success": "eval/success",
    "reward": "reward/mean",
    "turns": "rollout/turns_mean",
    "response tokens": "rollout/response_tokens_mean",
    "mismatch, at most": "mismatch/max_abs",
    "tokens/s": "rollout/tokens_per_s",
    "seconds per step": "time/step_s",
}


def run_summary(rows: list[dict]) -> str:
    """First and last value of the main metrics of a run."""
    lines = [f"{'':<18}{'first':>11}{'last':>11}"]
    for title, name in _SUMMARY.items():
        values = [row[name] for row in rows if name in row]
        if values:
            lines.append(f"{title:<18}{values[0]:>11.3g}{values[-1]:>11.3g}")
    return "\n".join(lines)


def rollout_summary(metrics: dict[str, float], tokens_per_s: float) -> str:
    def with_prefix(prefix: str) -> list[tuple[str, float]]:
        return [
            (name.removeprefix(prefix), value)
            for name, value in metrics.items()
            if name.startswith(prefix)
        ]

    passes = with_prefix("reward/pass_at_")
    stops = sorted(with_prefix("rollout/stop_"), key=lambda stop: -stop[1])
    lines = {
        "trajectories": f"{metrics['rollout/trajectories']} of {metrics['rollout/prompts']} "
        f"prompts, {tokens_per_s:.0f} tokens/s",
        "success": f"{metrics['reward/success']:.3f}",
        "pass@k": ", ".join(f"{k}: {value:.3f}" for k, value in passes),
        "reward": f"{metrics['reward/mean']:.3f} ± {metrics['reward/std']:.3f}",
        "turns": f"{metrics['rollout/turns_mean']:.2f}, at most {metrics['rollout/turns_max']}",
        "response tokens": f"{metrics['rollout/response_tokens_mean']:.1f} per trajectory",
        "ended by": ", ".join(f"{reason} {fraction:.1%}" for reason, fraction in stops),
    }
    return "\n".join(f"{name:<16}{text}" for name, text in lines.items())
