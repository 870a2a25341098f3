import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks and tests share the cores
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # see megastep/policy/cpu.py; torch reads it once
os.environ["WANDB_MODE"] = "offline"

import pytest

from tests.models import make_model
from tests.ranks import RankPool


# Those that start Ray or Slurm, one after the other: two at once would not fit into the memory of a laptop.
CLUSTERS = (
    "test_train.py", "test_train_ends.py", "test_cluster.py", "test_transfer.py", "test_fleet.py", "test_end_to_end.py",
    "test_slurm.py", "test_ray_job.py", "test_two_nodes.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With two workers (launch/test.sh), one has the clusters and the other all the rest."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "clusters" if nodeid.partition("::")[0].endswith(CLUSTERS) else "rest"

    return Lanes(config, log)


def pytest_collection_modifyitems(items):
    """`rollouts`, once it is up, stays up to the end; so what uses it comes last."""
    items.sort(key=lambda item: "rollouts" in item.fixturenames)


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n)`: n real ranks on gloo, started once."""
    pools: dict[int, RankPool] = {}

    def get(world: int) -> RankPool:
        if world not in pools or not pools[world].processes[0].is_alive():
            pools[world] = RankPool(world)
        return pools[world]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """`models(name)`: folder and transformers model of a tiny random model, made once."""
    made = {}

    def get(name: str, **overrides):
        key = (name, *sorted(overrides.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            made[key] = (folder, make_model(folder, name, **overrides))
        return made[key]

    return get


@pytest.fixture(scope="session")
def rollouts(models, tmp_path_factory):
    """Two real engines and two policy ranks on a Ray of their own, started once."""
    from megastep.cluster import Cluster
    from tests.engines import Rollouts, small_cluster

    log = tmp_path_factory.mktemp("cluster") / "log.txt"
    with Cluster(small_cluster(models("qwen3_moe")[0]), log=log) as cluster:
        yield Rollouts(cluster)
