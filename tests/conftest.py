import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks and tests share the cores
os.environ["WANDB_MODE"] = "offline"

import pytest

from megastep.distributed.amx import avoid_amx

avoid_amx()

from tests.models import make_model
from tests.ranks import RankPool

# These start Ray, vLLM or Slurm. They run last, after the ranks have freed their memory.
CLUSTERS = (
    "test_ray_job.py",
    "test_slurm.py",
    "test_two_nodes.py",
    "test_train.py",
    "test_distill.py",
    "test_supervised.py",
    "test_train_ends.py",
    "test_cluster.py",
    "test_end_to_end.py",
    "test_sender.py",
    "test_fleet.py",
    "test_workers.py",
    "test_endpoint_vllm.py",
    "test_agents.py",
    "test_pretrained.py",
)
ONE_WORKER = CLUSTERS[:6]  # half of the run time
ALSO_CLUSTERS = ("test_vllm.py", "test_a_signal_while_ray_starts")
# Minutes on several ranks: every model under every parallel layout, and planner against rank;
# also converters, and Triton's interpreter.
SLOW = (
    "test_layouts.py",
    "test_saver.py",
    "test_transformer_engine.py",
    "test_update.py",
    "test_worker.py",
    "test_offline.py",
    "test_get_model.py",
    "test_meta.py",
    "test_random_init.py",
    "test_transports.py",
    "test_triton_attention.py",
    "test_export_loads_in_transformers_with_the_same_logits",
    "test_x8_estimates_match_a_run",
    "test_x4_overlap_changes_neither_updates_nor_what_is_read_after_them",
)
pools: dict[int, RankPool] = {}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With two workers (launch/test.sh): memory allows one set of ranks and few clusters."""
    from xdist.scheduler import LoadScopeScheduling

    is_fast = "not cluster" in config.option.markexpr

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if is_fast:
                return file
            return "one" if file.endswith(ONE_WORKER) else "other"

    return Lanes(config, log)


def pytest_collection_modifyitems(items):
    """Marks for `launch/test.sh --fast`. Tests of `rollouts` are last: its cluster stays up."""
    items.sort(key=lambda item: (item.path.name in CLUSTERS, "rollouts" in item.fixturenames))
    for item in items:
        names = {item.path.name, item.originalname}
        if names & {*CLUSTERS, *ALSO_CLUSTERS}:
            item.add_marker("cluster")
        if names & {*SLOW}:
            item.add_marker("slow")


def pytest_runtest_setup(item):
    if item.path.name in CLUSTERS:
        close_pools()


def close_pools() -> None:
    for pool in pools.values():
        pool.close()
    pools.clear()


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n)`: n real ranks on gloo, started once."""

    def get(world: int) -> RankPool:
        if world not in pools or not pools[world].processes[0].is_alive():
            pools[world] = RankPool(world)
        return pools[world]

    yield get
    close_pools()


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
    """Two real engines and two policy ranks on their own Ray, started once."""
    from megastep.cluster import Cluster
    from tests.engines import Rollouts, small_cluster

    log = tmp_path_factory.mktemp("cluster") / "log.txt"
    with Cluster(small_cluster(models("qwen3_moe")[0]), log=log) as cluster:
        yield Rollouts(cluster)
