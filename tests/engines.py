"""A cluster for tests, one per session: two engines, two policy ranks with a parallel layout per
test."""

import asyncio

import numpy as np
import ray

from megastep.cluster import Cluster
from megastep.config import Config, ParallelConfig
from megastep.distributed.ports import free_port
from megastep.rollout.generation import Generation, Sampling, Session

GREEDY = Sampling(max_tokens=12, temperature=0.0)


class Rollouts:
    """The cluster and calls of its engines and ranks."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.fleet = cluster.engines

    def ask(
        self, prompts, sampling: Sampling = GREEDY, sessions=None, **routing
    ) -> list[Generation]:
        """One call per prompt, all at once."""
        names = sessions or [f"{id(prompts)}-{i}" for i in range(len(prompts))]
        sessions = [Session(name, 0) for name in names]

        async def all_of_them():
            return await asyncio.gather(
                *(
                    self.fleet.generate(np.asarray(p, np.int32), sampling, session=s, **routing)
                    for p, s in zip(prompts, sessions, strict=True)
                )
            )

        return asyncio.run(all_of_them())

    def lay(self, folder, layout: dict) -> None:
        """Rebuild the policy with the weights of `folder` under this parallel layout."""
        config = small_cluster(folder)
        config.policy.parallel = ParallelConfig(**layout)
        address = f"127.0.0.1:{free_port()}"
        ray.get(
            [
                rank.__ray_call__.remote(build, config, index, address)
                for index, rank in enumerate(self.cluster.policy.ranks)
            ]
        )

    def on_ranks(self, function, *arguments) -> list:
        """`function(actor, ...)` in every rank's process."""
        return ray.get(
            [rank.__ray_call__.remote(function, *arguments) for rank in self.cluster.policy.ranks]
        )


def small_cluster(folder) -> Config:
    config = Config()
    config.model.path = str(folder)
    config.policy.ranks = 2
    config.loss.type = "nll"
    config.optimizer.lr = 1e-2
    config.engine.num_engines = 2
    config.engine.max_sequences = 32
    config.engine.health_every_s = 1.0
    config.sync.verify = True
    config.sync.bucket_mb = 1  # several buckets, with borders inside layers
    return config


# ---------------------------------------------------------------- in a rank's process


def build(rank, config: Config, index: int, address: str) -> None:
    from megastep.distributed import parallel
    from tests.ranks import let_go_of_models

    rank.worker = rank.sender = None
    let_go_of_models()
    parallel.stop()
    rank.config = config
    rank.start(index, address, "shm")


def shake(rank, seed: int) -> None:
    """Multiply every parameter by a random factor near 1, equal on ranks that share it."""
    import torch

    from megastep.weights.megatron import mapped_params

    with torch.no_grad():
        for mapping, param in mapped_params(rank.worker.chunks, rank.worker.arch):
            generator = torch.Generator().manual_seed(seed + sum(map(ord, mapping.megatron)))
            param.mul_(1 + 0.5 * torch.rand((), generator=generator))
    rank.worker.step += 1


def export(rank, folder) -> None:
    rank.worker.export(folder)


def abandon_a_sync(rank, handles) -> None:
    """Send the first bucket of a weight sync, then end it."""
    import torch.distributed as dist

    from megastep.distributed import parallel
    from megastep.sync.engines import Engines
    from megastep.sync.shm_transport import _describe

    transport = rank.sender._transport
    engines = Engines(handles, rank.worker.step, rank.config.engine, rank.config.sync.timeout_s)
    bucket = transport.buckets[0]
    assert len(transport.buckets) > 1
    transport._fill(bucket, 0, {})
    dist.barrier()
    if parallel.place().rank == 0:
        engines.start_weight_update()
        engines.call("update_weights", _describe(bucket, 0))
        engines.call("abandon_weight_update")
    dist.barrier()


def send_incomplete(rank, handles, forgotten: str) -> list[str]:
    """Send all weights except those whose name contains `forgotten`; returns, on rank 0, the error
    of each engine."""
    import torch.distributed as dist

    from megastep.distributed import parallel
    from megastep.sync.engines import Engines
    from megastep.sync.shm_transport import _describe

    transport = rank.sender._transport
    engines = Engines(handles, rank.worker.step, rank.config.engine, rank.config.sync.timeout_s)
    is_first = parallel.place().rank == 0
    if is_first:
        engines.start_weight_update()
    for bucket in transport.buckets:
        transport._fill(bucket, 0, {})
        dist.barrier()
        if is_first:
            described = _describe(bucket, 0)
            kept = [i for i, name in enumerate(described["names"]) if forgotten not in name]
            columns = {key: [column[i] for i in kept] for key, column in described.items()}
            engines.update_weights(columns)
        dist.barrier()
    return [error_of_finish(handle, rank.worker.step) for handle in handles] if is_first else []


def error_of_finish(handle, version: int) -> str:
    try:
        ray.get(handle.finish_weight_update.remote(version))
    except ray.exceptions.RayTaskError as error:
        return str(error)
    return ""


def corrupt_next_sync(rank) -> None:
    """Rank 0 writes one wrong number, after it has taken the checksum."""
    from megastep.distributed import parallel

    transport = rank.sender._transport
    fill = transport._fill

    def fill_badly(bucket, start, sums):
        fill(bucket, start, sums)
        if parallel.place().rank == 0:
            transport.memory[start + 1000] += 1

    transport._fill = fill_badly
    rank.restore = lambda: setattr(transport, "_fill", fill)
