"""Held-out evaluation, alongside training where rollouts run ahead of it."""

from collections.abc import Callable
from concurrent.futures import Future, wait

from megastep.rollout.pool import Pool, check_not_all_failed
from megastep.rollout.stream import GroupStream
from megastep.samples.metrics import evaluation_metrics
from megastep.types import Group, Trajectory


class Evaluation:
    """Held-out prompts, sampled as the section `eval` configures, on the stream's event loop."""

    def __init__(self, stream: GroupStream, pool: Pool, prompts: list):
        self.stream = stream
        self.pool = pool
        self.prompts = prompts
        self._step = 0
        self._groups: Future[list[Group]] | None = None

    def begin(
        self, step: int, on_trajectory: Callable[[Trajectory], None] = lambda trajectory: None
    ) -> None:
        self._step = step
        self._groups = self.stream.submit(self.pool.run(self.prompts, on_trajectory))

    @property
    def is_running(self) -> bool:
        """Running, or finished with a result that was not collected yet."""
        return self._groups is not None

    def is_done(self, wait_s: float = 0.0) -> bool:
        return self._groups is not None and bool(wait([self._groups], wait_s).done)

    def result(self) -> dict[str, float]:
        """The metrics, once; waits for them."""
        assert self._groups is not None
        groups = self._groups.result()
        self._groups = None
        check_not_all_failed(groups)
        return evaluation_metrics(groups) | {"eval/step": self._step}
