"""Real ranks for tests: processes that start once per session and run functions.

    pool.run(function, **arguments)    calls `function` on every rank, returns the results by rank

The function must be importable (`tests.cases`) by the rank's process.
"""

import ctypes
import gc
import importlib
import os
import signal
import traceback
from collections.abc import Callable

import torch
import torch.multiprocessing as mp

from megastep.distributed.ports import free_port

TIMEOUT_S = 500  # for a busy machine: a case takes seconds
# In a rank's process: rank, world size and rendezvous address for parallel.start.
current: tuple[int, int, str] | None = None


class RankPool:
    """prepare: called first in each process."""

    def __init__(self, world: int, prepare: Callable[[], None] | None = None):
        context = mp.get_context("spawn")
        self.pipes = []
        self.processes = []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, world, there, prepare))
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function, **arguments) -> list:
        address = f"127.0.0.1:{free_port()}"
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__name__, arguments, address))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT_S):
                self.close()
                raise TimeoutError(
                    f"rank {rank} did not return from {function.__name__} in {TIMEOUT_S} s"
                )
            ok, result = pipe.recv()
            if not ok:
                self.close()
                raise RuntimeError(f"rank {rank} in {function.__name__}:\n{result}")
            results.append(result)
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def serve(rank: int, world: int, pipe, prepare: Callable[[], None] | None) -> None:
    global current
    import warnings

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["LOCAL_RANK"] = str(rank)  # the GPU, where there are any
    warnings.filterwarnings("ignore")
    if prepare is not None:
        prepare()
    from megastep.distributed import cpu

    cpu.import_megatron()
    from megastep.distributed import parallel

    while True:
        try:
            module, name, arguments, address = pipe.recv()
        except EOFError:
            os._exit(0)
        current = (rank, world, address)
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(**arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        let_go_of_models()
        parallel.stop()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # many small models fragment the heap
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # engines of other tests need it


def let_go_of_models() -> None:
    """Drop the references of models to gloo groups, whose threads live as long as the groups.

    Megatron's data parallelism refers to itself through gradient hooks in C++, which Python's
    garbage collector does not see.
    """
    from megatron.core.distributed import DistributedDataParallel

    for thing in gc.get_objects():
        if isinstance(thing, DistributedDataParallel):
            thing.__dict__.clear()
