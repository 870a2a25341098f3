"""D3, D5: one job over two Ray nodes, and the loss of one of them."""

import json
import subprocess
import sys

import pytest

from megastep.checkpoint.manifest import latest, read_manifest
from megastep.report.metrics_log import read_metrics
from tests.launch.ray_cluster import HEAD, WORKER, two_nodes
from tests.processes import alive, wait_for

# A bundle has two CPUs, for a rank and an engine, and so has a node: the ranks are on two nodes.
CPUS = (2, 2)
SMALL = (
    "run.wandb=disabled",
    "cluster.cpus_per_process=1",
    "cluster.colocate=true",
    "warm_start.trajectories=0",
    "rollout.prompts=2",
    "rollout.samples_per_prompt=2",
    "train.mini_batch_prompts=2",
    "eval.prompts=2",
    "eval.samples_per_prompt=1",
    "optimizer.warmup_steps=0",
    "checkpoint.every_steps=1",
)
LOST_WITHIN_S = 90  # Ray detects a dead node after 15 seconds; the machine may be busy


@pytest.fixture(scope="module")
def cluster():
    with two_nodes(CPUS) as cluster:
        yield cluster


def begin(cluster, folder, name: str, *more: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "megastep",
        "train",
        "configs/local.yaml",
        f"run.dir={folder}",
        f"run.name={name}",
    ]
    return subprocess.Popen(
        [*command, *SMALL, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=cluster.environment(),
        start_new_session=True,
    )


def nodes_of(cluster, kind: str) -> list[str]:
    return [actor["node_id"] for actor in cluster.actors() if actor["class_name"] == kind]


def is_up(cluster) -> bool:
    """Two ranks and an engine, as Ray sees them, and all CPUs taken."""
    ranks = nodes_of(cluster, "PolicyRank")
    engines = nodes_of(cluster, "Engine")
    return (len(ranks), len(engines)) == (2, 1) and cluster.cpus_used() == sum(CPUS)


def script(cluster, text: str) -> str:
    """The output of a Python script."""
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=120,
        env=cluster.environment(),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


NUMBERED = """
import json, os, ray
from megastep.cluster import Cluster
from megastep.policy.actor import Policy, PolicyRank
from megastep.config import load

config = load("configs/local.yaml", ["policy.ranks=4", "cluster.cpus_per_process=1"])
cluster = Cluster(config, with_engines=False)
try:
    cluster._connect()
    cluster._reserve()
    turns = [
        cluster._actor(PolicyRank, bundle, 1, config, 1, os.getcwd(), None)
        for bundle in (0, 2, 1, 3)
    ]
    nodes = [
        [ray.get(actor.where.remote())[0] for actor in actors]
        for actors in (turns, Policy(turns).ranks)
    ]
    print(json.dumps(nodes))
finally:
    cluster.__exit__()
"""


def test_d3_ranks_are_numbered_node_by_node(cluster):
    """In any order of the bundles; here those of the two nodes alternate."""
    turns, ranks = json.loads(script(cluster, NUMBERED))
    assert turns[0] == turns[2] != turns[1] == turns[3]
    assert ranks == [WORKER, WORKER, HEAD, HEAD]


TWO_MACHINES = """
import ray
from megastep import cluster
from megastep.errors import ClusterError
from megastep.config import load

nodes = ray.nodes
ray.nodes = lambda: [node | {"NodeManagerHostname": f"m{node['NodeID'][0]}"} for node in nodes()]
config = load("configs/local.yaml", ["cluster.cpus_per_process=1", "cluster.colocate=true"])
asked = cluster.Cluster(config)
try:
    asked._connect()
    asked._reserve()
except ClusterError as error:
    print(error)
finally:
    asked.__exit__()
"""


def test_d3_two_machines_without_gpus_are_rejected(cluster):
    """The nodes of this cluster are on one machine, so the runs below are accepted."""
    line = script(cluster, TWO_MACHINES)
    assert line.startswith("sync.backend = shm") and line.endswith("on ma, mb only\n")


DYING = """
import os, ray, time
from ray.exceptions import RayActorError
from megastep.policy.actor import Policy, RankPlace

class Rank:
    def where(self):
        return "node", []

    def learn(self, mini_batches, references):
        if not mini_batches:
            raise RuntimeError("Connection reset by peer")
        time.sleep(1)
        os._exit(1)

ray.init(log_to_driver=False)
policy = Policy([ray.remote(Rank).options(num_cpus=0).remote() for _ in range(2)])
policy.places = [RankPlace(0, 0), RankPlace(1, 0)]
try:
    policy.learn([[], [[]]])
except RayActorError:
    print("the death")
"""


def test_d5_dead_rank_is_reported_before_the_error_of_its_peer(cluster):
    assert "the death\n" in script(cluster, DYING)


@pytest.fixture(scope="module")
def trained(cluster, tmp_path_factory):
    """A run of three training steps: its directory, and the nodes of its ranks and engine."""
    folder = tmp_path_factory.mktemp("trained")
    process = begin(cluster, folder, "both", "train.steps=3")
    try:
        wait_for(lambda: is_up(cluster) or process.poll() is not None, 120)
        places = nodes_of(cluster, "PolicyRank"), nodes_of(cluster, "Engine")
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    return folder / "both", *places


def test_d3_d5_a_policy_on_two_nodes_trains_to_the_end(cluster, trained):
    """With expert parallelism over both; the engine is on the first rank's node."""
    folder, ranks, engines = trained
    assert sorted(ranks) == [WORKER, HEAD] and engines == [WORKER]
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    # The weights of both ranks reach the engine.
    assert all(row["mismatch/max_abs"] < 1e-3 for row in rows[1:])
    assert read_manifest(latest(folder / "checkpoints"))["step"] == 3


def test_d3_given_cluster_stays_and_is_free_again(cluster, trained):
    wait_for(lambda: not cluster.actors() and cluster.cpus_used() == 0, 60)
    assert sorted(cluster.nodes()) == [WORKER, HEAD]
    assert cluster.head.process.poll() is None and cluster.worker.process.poll() is None


def test_d5_lost_node_ends_the_run_with_one_line(cluster, tmp_path):
    """The last test of this cluster. A rank and the only engine are lost during a rollout: the run
    does not wait for a restart of the engine, since the policy is incomplete.
    """
    process = begin(
        cluster,
        tmp_path,
        "lost",
        "train.steps=1000",
        "rollout.prompts=16",
        "rollout.samples_per_prompt=16",
    )
    checkpoints = tmp_path / "lost" / "checkpoints"
    try:
        wait_for(lambda: (checkpoints / "step_1").exists() or process.poll() is not None, 200)
        assert nodes_of(cluster, "Engine") == [WORKER], process.stderr.read()[-3000:]
        cluster.worker.kill()
        _, errors = process.communicate(timeout=LOST_WITHIN_S)
    finally:
        process.kill()
    (line,) = [line for line in errors.splitlines() if line]
    # Noticed by the rollout, if all episodes failed, or by training on those that had ended.
    cause = "the node of the policy's rank(s) 0 is lost" in line or line.startswith(
        "error: a policy rank died"
    )
    assert process.returncode == 1 and line.startswith("error: ") and cause, errors[-3000:]
    saved = latest(checkpoints)
    assert read_manifest(saved)["step"] == int(saved.name.removeprefix("step_")) >= 1
    wait_for(lambda: cluster.nodes() == [HEAD] and not cluster.actors(), 60)
    left = alive(cluster.head.family())
    assert not [line for line in left if "PolicyRank" in line or "ray::Engine" in line]
