"""A rank's fetch of recorded routing: its own layers, of its own micro-batches.

    update          mini-batch 0    mini-batch 1    mini-batch 2
    fetch      0    1               2                               one mini-batch ahead of use

The driver sends micro-batches with row numbers, and references to the objects of the rank's
pipeline stage (samples/routing.py). What was fetched is released after its mini-batch.
"""

import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from megastep.samples.routing import fetch, release, routing_of_batches, tables_of
from megastep.types import MicroBatch


class RoutingFetch:
    def __init__(
        self,
        mini_batches: list[list[MicroBatch]],
        references: list,
        stage: int,
        layers: Container[int],
        get: Callable[[list], list],
    ):
        """references: of this stage, one per table, in the order in which the mini-batches mention
        the tables. layers: those whose routing is replayed. `get` resolves references."""
        routing = [rows for batch in mini_batches for rows in routing_of_batches(batch)]
        self._tables = tables_of(routing)
        for table, reference in zip(self._tables, references, strict=True):
            table.references = {stage: reference}
        self._layers = layers
        self._get = get
        self.fetched_bytes = 0
        self.waited_s = 0.0

    def one_ahead(self, mini_batches: list[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """Each mini-batch, once its routing is in this process."""
        if not self._tables:
            yield from mini_batches
            return
        with ThreadPoolExecutor(1, "routing") as thread:
            coming: Future | None = None
            for i, micro_batches in enumerate(mini_batches):
                if coming is None:
                    coming = thread.submit(self._fetch, micro_batches)
                self._wait(coming)
                following = mini_batches[i + 1 : i + 2]
                coming = thread.submit(self._fetch, following[0]) if following else None
                yield micro_batches
                release(routing_of_batches(micro_batches))

    def _fetch(self, micro_batches: list[MicroBatch]) -> None:
        self.fetched_bytes += fetch(routing_of_batches(micro_batches), self._layers, self._get)

    def _wait(self, coming: Future) -> None:
        begun = time.perf_counter()
        coming.result()
        self.waited_s += time.perf_counter() - begun
