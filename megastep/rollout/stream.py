"""Groups for training from episodes that run while the trainer works; `ahead` limits how many.

    take(step)     the next batch of complete groups; blocks until there is one
    outstanding    prompts drawn and not taken: at most ahead × batch while the trainer works, and
                   one batch more while it waits

With ahead = 0 episodes start when a batch is taken and none runs during an update: synchronous
training.

Staleness. A group that started before training step `s` holds tokens of that policy and is due at
step s + ceil(ahead). `take` prefers the oldest complete groups, so that slow ones are not starved.
`on_stale` decides about a group that is still incomplete when it is due:

    wait    `take` waits for it, and for groups that would not fit into the batches they are due in
    drop    a stale group is dropped, complete or not, and another prompt replaces it

The routing of outstanding groups is in Ray's object stores. While it exceeds a share of them
(`Pool.routing_limit_bytes`), no prompt starts beyond those that `take` waits for.

Invariants, held by the tests: every prompt is in one batch, or was dropped and counted; no stale
group is taken; `state` suffices to resume in another process without losing or repeating a prompt.

Episodes run in a thread with its own event loop. Cancelling them closes their environments.
"""

import asyncio
import math
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from megastep.errors import MegastepError, RolloutFailed
from megastep.rollout.data import Prompt, PromptStream
from megastep.rollout.pool import Pool, all_failed
from megastep.samples.routing import routing_of_groups, tables_of
from megastep.types import Group, Trajectory

MEANWHILE_S = 5.0


@dataclass(eq=False)
class Entry:
    """An outstanding prompt."""

    prompt: Prompt
    started: int | None = None  # training step of its first episode; None: all episodes are queued
    group: Group | None = None  # when complete
    routing_bytes: int = 0  # of its stored routing
    task: asyncio.Task | None = None


@dataclass
class StreamState:
    """Everything needed to resume: the position in the prompts and the outstanding ones."""

    position: dict[str, int] = field(default_factory=dict)  # empty: at the beginning
    unfinished: list[int] = field(default_factory=list)  # prompts whose episodes start over
    ready: list[Group] = field(default_factory=list)
    ready_begun: list[int] = field(default_factory=list)  # Entry.started of each


@dataclass
class Taken:
    groups: list[Group]
    waited: int = 0  # groups that a full batch had to wait for
    dropped: int = 0  # stale groups


class Interrupted(Exception):
    """`take` would have blocked; nothing was taken or dropped for its step."""


class GroupStream:
    def __init__(
        self,
        pool: Pool,
        prompts: PromptStream,
        batch: int,
        steps: int,
        ahead: float = 0,
        on_stale="wait",
    ):
        """Batches for `steps` training steps; no episode starts that none of them would take."""
        self.pool = pool
        self.prompts = prompts
        self.batch = batch
        self.steps = steps
        self.ahead = ahead
        self.staleness_limit = math.ceil(ahead)  # training steps between start and take
        self.drops = on_stale == "drop"
        self.step = 0
        self._entries: dict[int, Entry] = {}  # outstanding, the oldest first
        self._removed: list[Entry] = []  # taken or dropped for the current step
        self._wanted = 0  # groups that `take` waits for
        self._speed = Speed()
        self._closed_groups = 0
        self._closed_bytes = 0  # of their stored routing
        self._held_back = 0  # prompts, the most since the last `metrics`
        # Tasks to cancel at the end; each cancels the tasks it started.
        self._roots: set[asyncio.Task] = set()

    def __enter__(self) -> "GroupStream":
        self._loop = self.make_loop()
        self._changed = asyncio.Event()
        self._places = asyncio.Semaphore(self.pool.concurrency)
        self._error: BaseException | None = None
        self._interrupted = False
        self._thread = threading.Thread(target=self._run, name="episodes", daemon=True)
        self._thread.start()
        return self

    def make_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    def _run(self) -> None:
        """Run the loop until it is stopped. SystemExit, raised for example in a task that an
        environment started, leaves run_forever."""
        while True:
            try:
                return self._loop.run_forever()
            except BaseException as error:
                self._error = RolloutFailed(f"a task of an episode raised {error!r}")
                self._changed.set()

    def __exit__(self, *_) -> None:
        asyncio.run_coroutine_threadsafe(self._cancel_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_tasks(self) -> None:
        tasks = set(self._roots)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ called by the trainer's thread

    def take(
        self, step: int, count: int | None = None, meanwhile: Callable[[], None] = lambda: None
    ) -> Taken:
        """The batch of training step `step` (from 0), ordered by prompt; with `count`, as many more
        groups for the same step. Calls `meanwhile` every MEANWHILE_S while it waits."""
        taken = self.submit(self._take(step, count))
        while not wait([taken], MEANWHILE_S).done:
            meanwhile()
        return taken.result()

    def interrupt(self) -> None:
        """Make a `take` that blocks raise Interrupted; groups taken or dropped for its step become
        outstanding again. Safe in a signal handler."""

        def set_interrupted() -> None:
            self._interrupted = True
            self._changed.set()

        self._loop.call_soon_threadsafe(set_interrupted)

    def submit(self, coroutine: Coroutine) -> Future:
        """Run another coroutine, such as an evaluation, in the loop of the episodes."""

        async def root():
            task = asyncio.current_task()
            assert task is not None
            self._roots.add(task)
            try:
                return await coroutine
            finally:
                self._roots.discard(task)

        return asyncio.run_coroutine_threadsafe(root(), self._loop)

    def state(self) -> StreamState:
        return self.submit(self._state()).result()

    def restore(self, step: int, state: StreamState) -> None:
        """Call before the first `take`, which is that of training step `step`."""
        self.step = step
        self.submit(self._restore(state)).result()

    def metrics(self) -> dict[str, float]:
        """Since the last call."""

        async def read() -> dict[str, float]:
            metrics = {"rollout/tokens_per_s": self._speed.read()}
            if math.isfinite(self.pool.routing_limit_bytes):
                metrics["worker/routing_gb"] = self._routing_bytes() / 1e9
                metrics["worker/prompts_held_back"] = self._held_back
            self._held_back = 0
            return metrics

        return self.submit(read()).result()

    # ------------------------------------------------------------ in the event loop

    async def _take(self, step: int, more: int | None) -> Taken:
        count = self.batch if more is None else more
        self.step = step
        self._wanted = count
        if more is None:
            self._removed = []  # the previous batch has been trained on
        stale = self._drop_stale()
        self._removed += stale
        waited = 0
        while True:
            if self._error is not None:
                raise self._error
            self._start_prompts()
            chosen = self._oldest_complete(count)
            if len(chosen) == count:
                missing = self._missing(chosen)
                if missing == 0:
                    break
                waited = max(waited, missing)
            if self._interrupted:
                self._undo_step()
                raise Interrupted
            self._changed.clear()
            await self._changed.wait()
        self._wanted = 0
        for entry in chosen:
            del self._entries[entry.prompt.id]
        self._removed += chosen
        self._start_prompts()
        groups = [entry.group for entry in chosen if entry.group is not None]
        return Taken(sorted(groups, key=lambda group: group.id), waited, len(stale))

    def _oldest_complete(self, count: int) -> list[Entry]:
        complete = [entry for entry in self._entries.values() if entry.group is not None]
        return complete[:count]

    def _undo_step(self) -> None:
        """Make everything taken or dropped for this step outstanding again."""
        self._wanted = 0
        entries = [*self._removed, *self._entries.values()]
        self._entries = {entry.prompt.id: entry for entry in entries}
        self._removed = []

    def _missing(self, chosen: list[Entry]) -> int:
        """Incomplete groups to wait for before `chosen` may be taken; 0 with `on_stale: drop`.

        A group started at step s is due at step s + staleness_limit. After `chosen` is taken, the
        groups due up to step + k must fit into the k batches of the steps after this one:

            due(outstanding, k) − due(chosen, k) ≤ k · batch        for k = 0 ... staleness_limit

        The largest excess is the answer, at most the number of incomplete groups. Example with
        batch = 2, staleness_limit = 2, step = 4; only 24 and 25 are complete, so they are chosen:

            prompt         20  21  22  23  24  25
            started         2   3   3   3   4   4
            due at step     4   5   5   5   6   6

            k   due(outstanding, k)   due(chosen, k)   k · batch   excess
            0            1                  0              0          1    20 is due now
            1            4                  0              2          2    step 5 takes 2 of 4
            2            6                  2              4          0

        Two of 20 to 23 must complete first. If 20 and 21 do, they are chosen and no excess remains.
        """
        if self.drops:
            return 0
        outstanding = self._entries.values()
        excess = max(
            self._due(outstanding, k) - self._due(chosen, k) - k * self.batch
            for k in range(self.staleness_limit + 1)
        )
        incomplete = sum(entry.started is not None and entry.group is None for entry in outstanding)
        return min(excess, incomplete)

    def _due(self, entries: Iterable[Entry], k: int) -> int:
        """Number of groups that are due at step + k or before."""
        last_start = self.step + k - self.staleness_limit
        return sum(entry.started is not None and entry.started <= last_start for entry in entries)

    def _drop_stale(self) -> list[Entry]:
        """With `on_stale: wait`, empty unless resumed with a smaller max_staleness."""
        first_start = self.step - self.staleness_limit
        stale = [
            entry
            for entry in self._entries.values()
            if entry.started is not None and entry.started < first_start
        ]
        for entry in stale:
            if entry.task is not None:
                entry.task.cancel()
            del self._entries[entry.prompt.id]
        return stale

    def _start_prompts(self) -> None:
        """Start as many prompts as `ahead` and the remaining steps allow."""
        remaining = (self.steps - self.step - 1) * self.batch
        after_this = min(int(self.ahead * self.batch), remaining)
        count = max(after_this + self._wanted - len(self._entries), 0)
        needed = max(self._wanted - len(self._entries), 0)  # `take` waits for them
        starting = max(min(count, self._room()), needed)
        self._held_back = max(self._held_back, count - starting)
        for prompt in self.prompts.take(starting):
            self._start(Entry(prompt))

    def _room(self) -> int:
        """Prompts whose routing the object stores have room for."""
        free = self.pool.routing_limit_bytes - self._routing_bytes()
        if not self._closed_bytes or math.isinf(free):
            return sys.maxsize
        running = sum(entry.group is None for entry in self._entries.values())
        return max(int(free * self._closed_groups / self._closed_bytes) - running, 0)

    def _routing_bytes(self) -> int:
        """Of complete groups that are outstanding or being trained on."""
        return sum(entry.routing_bytes for entry in [*self._entries.values(), *self._removed])

    def _start(self, entry: Entry) -> None:
        self._entries[entry.prompt.id] = entry
        self._speed.start()
        entry.task = asyncio.ensure_future(self._run_group(entry))
        self._roots.add(entry.task)
        entry.task.add_done_callback(self._roots.discard)

    async def _run_group(self, entry: Entry) -> None:
        """Episodes get their places in the order in which they were created."""

        async def episode(index: int) -> Trajectory:
            async with self._places:
                if entry.started is None:
                    entry.started = self.step
                return await self.pool.run_episode(entry.prompt, index)

        tokens = 0
        indices = range(self.pool.samples_per_prompt)
        try:
            async with asyncio.TaskGroup() as tasks:  # ends when all environments are closed
                episodes = [tasks.create_task(episode(index)) for index in indices]
            trajectories = [task.result() for task in episodes]
            entry.group = await self.pool.close_group(entry.prompt, trajectories)
            entry.routing_bytes = stored_bytes(entry.group)
            self._closed_groups += 1
            self._closed_bytes += entry.routing_bytes
            tokens = sampled_tokens([entry.group])
        except ExceptionGroup as errors:
            self._error = errors.exceptions[0]  # raised by the next take
        except MegastepError as error:  # of close_group
            self._error = error
        except asyncio.CancelledError:
            self.pool.forget_group(entry.prompt)
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # raised inside the episode
                self._error = RolloutFailed(
                    f"an episode of prompt {entry.prompt.id} cancelled itself"
                )
            raise
        finally:
            self._speed.stop(tokens)
            self._changed.set()

    async def _state(self) -> StreamState:
        """A group in which every episode failed starts over: it would end a resumed run again."""
        state = StreamState(self.prompts.position())
        for entry in self._entries.values():
            if entry.group is None or all_failed([entry.group]):
                state.unfinished.append(entry.prompt.id)
            else:
                assert entry.started is not None
                state.ready.append(entry.group)
                state.ready_begun.append(entry.started)
        return state

    async def _restore(self, state: StreamState) -> None:
        for group, started in zip(state.ready, state.ready_begun, strict=True):
            self._entries[group.id] = Entry(self.prompts.prompt(group.id), started, group)
        for id in state.unfinished:
            self._start(Entry(self.prompts.prompt(id)))
        if state.position:
            self.prompts.seek(state.position)


class Speed:
    """Tokens per second of the time in which any group was running."""

    def __init__(self):
        self._running = 0
        self._since_s = 0.0
        self._seconds = 0.0
        self._tokens = 0

    def start(self) -> None:
        if self._running == 0:
            self._since_s = self._now_s()
        self._running += 1

    def stop(self, tokens: int) -> None:
        self._running -= 1
        self._tokens += tokens
        if self._running == 0:
            self._seconds += self._now_s() - self._since_s

    def read(self) -> float:
        """Since the last call."""
        now_s = self._now_s()
        seconds = self._seconds + (now_s - self._since_s if self._running else 0.0)
        tokens = self._tokens
        self._tokens = 0
        self._seconds = 0.0
        self._since_s = now_s
        return tokens / seconds if seconds else 0.0

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def stored_bytes(group: Group) -> int:
    """Of the group's routing in Ray's object stores."""
    return sum(table.nbytes for table in tables_of(routing_of_groups([group])))


def sampled_tokens(groups: list[Group]) -> int:
    trajectories = [t for group in groups for t in group.trajectories]
    return sum(int(step.loss_mask.sum()) for t in trajectories for step in t.steps)
