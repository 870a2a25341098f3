"""`megastep plan CONFIG --simulate`: what its arguments ask for."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megastep.config import Config, load
from megastep.console import progress
from megastep.errors import ConfigError, RunFailed
from megastep.models.folder import check_readable
from megastep.plan.planning import H100_GIB, Plan, make_plan
from megastep.samples import store
from megastep.simulate.episodes import Distribution, Distributions, Episodes, Recorded
from megastep.simulate.hardware import Hardware
from megastep.simulate.measured import Calibration, Measured, MeasuredRun
from megastep.simulate.roofline import Roofline, Times
from megastep.simulate.simulation import Result, simulate
from megastep.simulate.table import comparison, text

MAX_VALUES = 64


@dataclass
class Request:
    """The arguments of one command."""

    config: str
    overrides: list[str] = field(default_factory=list)
    gpu_gib: float = H100_GIB
    compare: str | None = None
    steps: int | None = None
    rollouts: Path | None = None
    measured: Path | None = None
    assume: list[str] = field(default_factory=list)
    distributions: dict[str, str | None] = field(default_factory=dict)

    def check(self) -> None:
        """ConfigError for arguments that contradict each other."""
        given = [name for name, value in self.distributions.items() if value is not None]
        lengths = [name for name in given if name != "env-seconds"]
        if self.rollouts is not None and lengths:
            raise ConfigError(f"--{lengths[0]}: the lengths come from --rollouts {self.rollouts}")
        if self.measured is not None and self.assume:
            raise ConfigError("--assume: the times come from --measured, not from a roofline")


class Simulator:
    """Times and episodes of a request, for its config and variations of it."""

    def __init__(self, request: Request):
        request.check()
        self.request = request
        self.hardware = Hardware().changed(request.assume)
        self.env_s = request.distributions.get("env-seconds")
        self.run: MeasuredRun | None = None
        self.measured: Measured | None = None
        self.recorded: Episodes | None = None
        if request.rollouts is not None:
            groups = [group for group in store.read(request.rollouts) if group.trajectories]
            if not groups:
                raise ConfigError(f"--rollouts {request.rollouts}: has no trajectories")
            env_s = Distribution.parse(self.env_s or "0.5~2")
            self.recorded = Recorded(groups, str(request.rollouts), env_s, 0)
        if request.measured is not None:
            self.run = MeasuredRun.read(request.measured)
            self.measured = self._calibrate(self.run)

    @property
    def times_from(self) -> str:
        if self.run is not None:
            return f"the run {self.run.folder}"
        return f"a roofline ({', '.join(self.request.assume) or 'defaults of --assume'})"

    def load(self, override: str | None = None) -> Config:
        overrides = [*self.request.overrides, *([override] if override else [])]
        config = load(self.request.config, overrides, has_cuda=True)
        check_readable(config)
        return config

    def simulate(self, config: Config, plan: Plan, on_step: Callable[[int, int], None]) -> Result:
        times: Times = self.measured or Roofline(config, plan, self.hardware)
        return simulate(config, plan, times, self._episodes(config), self.request.steps, on_step)

    def _episodes(self, config: Config) -> Episodes:
        if self.recorded is not None:
            return self.recorded
        if self.run is not None and not self._has_lengths:
            return self.run.episodes(self.env_s or "0")
        return Distributions.of(config, self.request.distributions)

    @property
    def _has_lengths(self) -> bool:
        given = self.request.distributions.items()
        return any(value is not None for name, value in given if name != "env-seconds")

    def _calibrate(self, run: MeasuredRun) -> Measured:
        """Simulates the measured run, with its own config and episodes."""
        if sys.stderr.isatty():
            print(f"fitting the times of {run.folder}", file=sys.stderr, flush=True)
        plan = make_plan(run.config, self.request.gpu_gib)
        episodes = run.episodes(self.env_s or "0")

        def simulated(times: Measured) -> Calibration:
            result = simulate(run.config, plan, times, episodes, len(run.rows))
            return Calibration(result.mean("time/rollout_s"), result.mean("train/tokens_computed"))

        return run.calibrated(simulated)


def run_simulation(request: Request) -> str:
    """What the command prints."""
    simulator = Simulator(request)
    if request.compare is not None:
        return _compare(simulator, request.compare)
    config = simulator.load()
    plan = make_plan(config, request.gpu_gib)
    with_bar = _with_bar("simulate")
    return text(simulator.simulate(config, plan, with_bar), simulator.times_from)


def _compare(simulator: Simulator, argument: str) -> str:
    key, values = parse_compare(argument)
    configs = {value: simulator.load(f"{key}={value}") for value in values}  # errors first
    results: dict[str, Result | str] = {}
    for value, config in configs.items():
        plan = make_plan(config, simulator.request.gpu_gib)
        try:
            results[value] = simulator.simulate(config, plan, _with_bar(f"{key}={value}"))
        except RunFailed as error:
            results[value] = error.summary()
    first = next((r for r in results.values() if isinstance(r, Result)), None)
    heading = f"simulated, not measured; times from {simulator.times_from}"
    if first is not None:
        heading += f"\nepisodes: {first.episodes}"
    return f"{heading}\n\n{comparison(results, key)}"


def parse_compare(argument: str) -> tuple[str, list[str]]:
    """KEY=A,B,C"""
    key, equals, rest = argument.partition("=")
    values = [value for value in re.split(r",(?![^\[]*\])", rest) if value]  # [a,b] is one value
    if not equals or not key or not 0 < len(values) <= MAX_VALUES:
        raise ConfigError(
            f"--compare {argument[:80]}: KEY=A,B,C is needed, with up to {MAX_VALUES} values"
        )
    return key, list(dict.fromkeys(values))


def _with_bar(name: str) -> Callable[[int, int], None]:
    """A progress bar on a terminal; nothing in a file."""
    bars: list = []

    def on_step(done: int, total: int) -> None:
        if not sys.stderr.isatty():
            return
        if not bars:
            bars.append(progress(name, total, "step", file=sys.stderr))
        bars[0].update()
        if done == total:
            bars[0].close()

    return on_step
