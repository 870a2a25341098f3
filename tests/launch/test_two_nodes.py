"""D3, D5, X18: one job over two Ray nodes, and the loss of one of them."""

import json
import re
import subprocess
import sys

import pytest

from megastep.checkpoint.manifest import latest, read_manifest
from megastep.report.metrics_log import read_metrics
from tests.launch.ray_cluster import HEAD, SPARE, WORKER, two_nodes
from tests.processes import alive, wait_for
from tests.runs import trained_ids

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
from megastep.errors import PolicyLost
from megastep.policy.actor import Policy, RankPlace

class Rank:
    def where(self):
        return "node", []

    def learn(self, mini_batches, references):
        if len(mini_batches) == 0:
            raise RuntimeError("Connection reset by peer")
        if len(mini_batches) == 1:
            time.sleep(1000)  # in a collective call
        time.sleep(1)
        os._exit(1)

ray.init(log_to_driver=False)
policy = Policy([ray.remote(Rank).options(num_cpus=0).remote() for _ in range(3)])
policy.places = [RankPlace(rank, 0) for rank in range(3)]
begun = time.time()
for call in (lambda: policy.learn([[], [[]], [[], []]]), policy.check):
    try:
        call()
    except PolicyLost as lost:
        print(lost, time.time() - begun < 20)
"""


def test_d5_x18_dead_rank_is_reported_whatever_its_peers_do(cluster):
    """One of them fails before it, another waits for it forever."""
    assert script(cluster, DYING).endswith("policy rank 2 died True\n" * 2)


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


LARGE = ("rollout.prompts=16", "rollout.samples_per_prompt=16")  # nodes are lost in a rollout


@pytest.fixture(scope="module")
def survived(cluster, tmp_path_factory):
    """A run whose second node ends after its first checkpoint: its ranks and its only engine move
    to a spare node. Returns the run directory, its output, and the spare node."""
    folder = tmp_path_factory.mktemp("survived")
    given = ("train.steps=4", "rollout.workers=2", "run.rollouts_every=1", *LARGE)
    process = begin(cluster, folder, "moved", *given)
    try:
        wait_for(lambda: is_up(cluster) or process.poll() is not None, 120)
        spare = cluster.add(SPARE, CPUS[1])
        saved = folder / "moved" / "checkpoints" / "step_1"
        wait_for(lambda: saved.exists() or process.poll() is not None, 200)
        assert nodes_of(cluster, "Engine") == [WORKER], process.stderr.read()[-3000:]
        cluster.worker.kill_raylet()
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    return folder / "moved", output, spare


def test_d5_x18_a_run_outlives_the_node_of_a_rank_and_its_engine(survived):
    """Every prompt is trained once, by id, and on the same weights everywhere."""
    folder, output, _ = survived
    (line,) = [line for line in output.splitlines() if "new ranks continue" in line]
    assert re.match("policy rank 0 died; new ranks continue after step [12] ", line)
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert sorted(trained_ids(folder, 4)) == list(range(4 * 16))
    last = rows[-1]
    assert last["policy/restarts"] == 1 and last["engine/restarts"] >= 1
    assert sum(row["filter/dropped"] for row in rows[1:]) == 0
    assert all(row["mismatch/max_abs"] < 1e-3 for row in rows[1:])


def test_d5_lost_node_ends_the_run_with_one_line(cluster, survived, tmp_path):
    """The last test of this cluster: no other node has room for the new ranks."""
    process = begin(cluster, tmp_path, "lost", "train.steps=1000", "cluster.timeout_s=8", *LARGE)
    checkpoints = tmp_path / "lost" / "checkpoints"
    try:
        wait_for(lambda: (checkpoints / "step_1").exists() or process.poll() is not None, 200)
        assert nodes_of(cluster, "Engine") == [SPARE], process.stderr.read()[-3000:]
        survived[2].kill()
        output, errors = process.communicate(timeout=LOST_WITHIN_S)
    finally:
        process.kill()
    (line,) = [line for line in errors.splitlines() if line]
    saved = latest(checkpoints)
    assert process.returncode == 75, errors[-3000:]
    assert line == (
        "error: there is no room for 2 new policy rank(s) after cluster.timeout_s = 8; 2 of "
        "train.restarts = 2 since the newest checkpoint; to resume from "
        f"{saved}: the same command with run.name=lost"
    )
    assert "policy rank 0 died; new ranks continue after step" in output
    assert read_manifest(saved)["step"] == int(saved.name.removeprefix("step_")) >= 1
    wait_for(lambda: cluster.nodes() == [HEAD] and not cluster.actors(), 60)
    left = alive(cluster.head.family())
    assert not [line for line in left if "PolicyRank" in line or "ray::Engine" in line]
