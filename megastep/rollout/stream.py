"""Groups for training out of episodes that go on while training does: how far ahead is the only setting.

    take(step)     the next batch of complete groups; waits for them
    outstanding    prompts that were drawn and not taken: at most ahead × batch while training works, and one batch
                   more while it waits

With ahead = 0 prompts begin when they are asked for and nothing is under way during an update: synchronous training.

Staleness. A group that began before `step` updates were made holds tokens of that policy; it must be taken at the
latest `ceil(ahead)` steps later. Groups are taken as they become complete, the oldest first, so that slow ones are not
starved; what would otherwise come too late is dealt with as `on_stale` says:

    wait    `take` waits, for what is due now, and for as many others as a later batch would have no place for
    drop    it is given up when it is too old, whether it is complete or not, and another prompt takes its place

Invariants, held by the tests: a prompt is in one batch, or was dropped and counted; no group is taken too late; what
`state` tells is enough to go on in another process without losing or repeating a prompt.

The episodes run in a thread with an event loop of its own. Cancelling closes their environments.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from megastep.errors import RolloutFailed
from megastep.rollout.data import Prompt, PromptStream
from megastep.rollout.pool import Pool, all_failed
from megastep.types import Group, Trajectory

MEANWHILE_S = 5.0


@dataclass(eq=False)
class Entry:
    """An outstanding prompt."""

    prompt: Prompt
    begun: int | None = (
        None  # training steps before its first episode; None: all of them wait for a place
    )
    group: Group | None = None  # once it is complete
    task: asyncio.Task | None = None


@dataclass
class StreamState:
    """What must be known to go on: where the prompts stand, and the outstanding ones."""

    position: dict[str, int] = field(default_factory=dict)  # empty: at the beginning
    unfinished: list[int] = field(default_factory=list)  # prompts to be played again
    ready: list[Group] = field(default_factory=list)
    ready_begun: list[int] = field(default_factory=list)


@dataclass
class Taken:
    groups: list[Group]
    waited: int = 0  # groups without which the batch could have been there earlier
    dropped: int = 0  # groups that were given up


class Interrupted(Exception):
    """Of a `take` that would have had to wait; nothing was taken for this step, nor given up."""


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
        """Batches for `steps` training steps; nothing begins that none of them would take."""
        self.pool, self.prompts, self.batch, self.steps, self.ahead = (
            pool,
            prompts,
            batch,
            steps,
            ahead,
        )
        self.max_staleness_versions = math.ceil(ahead)
        self.drops = on_stale == "drop"
        self.step = 0
        self._entries: dict[int, Entry] = {}  # outstanding, the oldest first
        self._gone: list[Entry] = []  # taken, or given up, for the step that is being collected
        self._wanted = 0  # groups that `take` waits for
        self._speed = Speed()
        self._roots: set[asyncio.Task] = (
            set()
        )  # to be cancelled at the end, each once; they cancel what they began

    def __enter__(self) -> "GroupStream":
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._places = asyncio.Semaphore(self.pool.concurrency)
        self._error: BaseException | None = None
        self._interrupted = False
        self._thread = threading.Thread(target=self._run, name="episodes", daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        """Until the loop is stopped. SystemExit comes out of it, of a task that an environment began, say."""
        while True:
            try:
                return self._loop.run_forever()
            except BaseException as error:
                self._error = RolloutFailed(f"an episode raised {error!r} in a task of its own")
                self._changed.set()

    def __exit__(self, *_) -> None:
        asyncio.run_coroutine_threadsafe(self._drop_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _drop_tasks(self) -> None:
        tasks = set(self._roots)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ for the trainer's thread

    def take(
        self, step: int, count: int | None = None, meanwhile: Callable[[], None] = lambda: None
    ) -> Taken:
        """A batch for the training step after `step` others, in the order of the prompts; or `count` groups more for
        the same step. `meanwhile` is called every few seconds of waiting."""
        taken = self.submit(self._take(step, count))
        while not wait([taken], MEANWHILE_S).done:
            meanwhile()
        return taken.result()

    def interrupt(self) -> None:
        """A `take` that waits, or would, raises Interrupted; what was taken or given up for the same step is
        outstanding again. May be called by a signal handler."""

        def tell() -> None:
            self._interrupted = True
            self._changed.set()

        self._loop.call_soon_threadsafe(tell)

    def submit(self, coroutine: Coroutine) -> Future:
        """Run something else, such as an evaluation, beside the episodes."""

        async def root():
            task = asyncio.current_task()
            self._roots.add(task)
            try:
                return await coroutine
            finally:
                self._roots.discard(task)

        return asyncio.run_coroutine_threadsafe(root(), self._loop)

    def state(self) -> StreamState:
        return self.submit(self._state()).result()

    def restore(self, step: int, state: StreamState) -> None:
        """Before the first `take`, after `step` training steps."""
        self.step = step
        self.submit(self._restore(state)).result()

    def tokens_per_s(self) -> float:
        """Sampled tokens of the groups that became complete since the last call, per second that episodes ran."""

        async def read() -> float:
            return self._speed.read()

        return self.submit(read()).result()

    # ------------------------------------------------------------ in the loop

    async def _take(self, step: int, more: int | None) -> Taken:
        count = self.batch if more is None else more
        self.step, self._wanted = step, count
        if more is None:
            self._gone = []  # what was taken before has been trained on
        waited, given_up = 0, self._drop_stale()
        self._gone += given_up
        while True:
            if self._error is not None:
                raise self._error
            self._begin()
            ready = [entry for entry in self._entries.values() if entry.group is not None]
            chosen = ready[:count]  # the oldest
            missing = self._missing(chosen)
            if len(chosen) == count and missing == 0:
                break
            if len(chosen) == count:
                waited = max(waited, missing)
            if self._interrupted:
                self._wanted = 0
                self._entries = {
                    entry.prompt.id: entry for entry in [*self._gone, *self._entries.values()]
                }
                self._gone = []
                raise Interrupted
            self._changed.clear()
            await self._changed.wait()
        self._wanted = 0
        for entry in chosen:
            del self._entries[entry.prompt.id]
        self._gone += chosen
        self._begin()
        return Taken(
            [e.group for e in sorted(chosen, key=lambda e: e.prompt.id)], waited, len(given_up)
        )

    def _missing(self, chosen: list[Entry]) -> int:
        """How many groups that are not complete this batch has to wait for, so that every later one has a place for
        each that is due by then."""
        if self.drops:
            return 0

        def count(entries, steps: int) -> int:
            return sum(
                e.begun is not None and e.begun + self.max_staleness_versions <= self.step + steps
                for e in entries
            )

        outstanding = self._entries.values()
        short = max(
            count(outstanding, k) - k * self.batch - count(chosen, k)
            for k in range(self.max_staleness_versions + 1)
        )
        return min(
            short, sum(entry.begun is not None and entry.group is None for entry in outstanding)
        )

    def _drop_stale(self) -> list[Entry]:
        """Where training waits for groups there are none, unless a run goes on with less patience than it began."""
        old = [
            e
            for e in self._entries.values()
            if e.begun is not None and e.begun + self.max_staleness_versions < self.step
        ]
        for entry in old:
            if entry.task is not None:
                entry.task.cancel()
            del self._entries[entry.prompt.id]
        return old

    def _begin(self) -> None:
        """Prompts as far ahead as is allowed."""
        after_this = min(int(self.ahead * self.batch), (self.steps - self.step - 1) * self.batch)
        for prompt in self.prompts.take(max(after_this + self._wanted - len(self._entries), 0)):
            self._play(Entry(prompt))

    def _play(self, entry: Entry) -> None:
        self._entries[entry.prompt.id] = entry
        self._speed.starts()
        entry.task = asyncio.ensure_future(self._group(entry))
        self._roots.add(entry.task)
        entry.task.add_done_callback(self._roots.discard)

    async def _group(self, entry: Entry) -> None:
        """Episodes find their places in the order in which they were asked for."""

        async def episode(index: int) -> Trajectory:
            async with self._places:
                entry.begun = self.step if entry.begun is None else entry.begun
                return await self.pool.play(entry.prompt, index)

        tokens = 0
        try:
            async with asyncio.TaskGroup() as tasks:  # ends when all have closed their environments
                episodes = [tasks.create_task(episode(index)) for index in range(self.pool.samples)]
            entry.group = Group(entry.prompt.id, [task.result() for task in episodes])
            tokens = sampled_tokens([entry.group])
        except ExceptionGroup as errors:
            self._error = errors.exceptions[0]  # for whoever takes next
        except asyncio.CancelledError:
            if not asyncio.current_task().cancelling():  # by nobody here
                self._error = RolloutFailed(
                    f"an episode of prompt {entry.prompt.id} cancelled itself"
                )
            raise
        finally:
            self._speed.ends(tokens)
            self._changed.set()

    async def _state(self) -> StreamState:
        """Groups of which every episode failed are played again: a run that such groups have ended could not go on
        with them."""
        entries = self._entries.values()
        ready = [
            entry for entry in entries if entry.group is not None and not all_failed([entry.group])
        ]
        return StreamState(
            self.prompts.position(),
            [entry.prompt.id for entry in entries if entry not in ready],
            [entry.group for entry in ready],
            [entry.begun for entry in ready],
        )

    async def _restore(self, state: StreamState) -> None:
        for group, begun in zip(state.ready, state.ready_begun, strict=True):
            self._entries[group.id] = Entry(
                self.prompts.prompt(group.id), begun, group
            )  # its tokens are that old
        for id in state.unfinished:
            self._play(Entry(self.prompts.prompt(id)))
        if state.position:
            self.prompts.seek(state.position)


class Speed:
    """Tokens per second of the time in which anything was under way."""

    def __init__(self):
        self._running, self._since, self._seconds, self._tokens = 0, 0.0, 0.0, 0

    def starts(self) -> None:
        if self._running == 0:
            self._since = time.perf_counter()
        self._running += 1

    def ends(self, tokens: int) -> None:
        self._running -= 1
        self._tokens += tokens
        if self._running == 0:
            self._seconds += time.perf_counter() - self._since

    def read(self) -> float:
        now = time.perf_counter()
        seconds = self._seconds + (now - self._since if self._running else 0.0)
        tokens, self._tokens, self._seconds, self._since = self._tokens, 0, 0.0, now
        return tokens / seconds if seconds else 0.0


def sampled_tokens(groups: list[Group]) -> int:
    return sum(
        int(step.loss_mask.sum()) for g in groups for t in g.trajectories for step in t.steps
    )
