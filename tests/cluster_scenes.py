"""python -m tests.cluster_scenes SCENE MODEL_FOLDER: a cluster for tests that end it."""

import json
import sys
import time

import ray

from megastep.cluster import Cluster
from megastep.config import Config
from megastep.errors import ClusterError
from tests.engines import Rollouts, abandon_a_sync, export, send_incomplete, shake
from tests.models import some_tokens


def small(folder: str) -> Config:
    config = Config()
    config.model.path = folder
    config.engine.max_model_len = 64
    config.engine.max_sequences = 4
    config.cluster.colocate = True
    return config


def sync_and_generate(cluster: Cluster, folder: str) -> list[list[int]]:
    """Greedy tokens after a weight sync; the weights are exported too."""
    rollouts = Rollouts(cluster)
    rollouts.on_ranks(shake, 3)
    if cluster.config.engine.tensor_parallel > 1:
        rollouts.on_ranks(abandon_a_sync, cluster.engines.serving())
    cluster.sync()
    rollouts.on_ranks(export, f"{folder}-synced")
    return [g.ids.tolist() for g in rollouts.ask(some_tokens())]


def received(cluster: Cluster) -> list[dict[str, int]]:
    """Checksums of the last weight sync, by worker of the engine."""
    (engine,) = cluster.engines.serving()
    return ray.get(engine.received_checksums.remote())


def incomplete(cluster: Cluster) -> list[str]:
    """The engine's error after a weight sync without an expert."""
    engines = cluster.engines.serving()
    (errors,) = Rollouts(cluster).on_ranks(send_incomplete, engines, "layers.1.mlp.experts.5.")
    return errors


def main(scene: str, folder: str) -> None:
    config = small(folder)
    results = sys.stdout
    sys.stdout = sys.stderr  # progress of the cluster
    if scene == "too_small":
        config.cluster.cpus_per_process = 1000
    if scene == "sharded":
        config.cluster.colocate = False
        config.cluster.cpus_per_process = 0.1
        config.engine.tensor_parallel = 2
        config.engine.cpu_kv_gb = 0.1
        config.sync.verify = True
        config.sync.bucket_mb = 1
    try:
        with Cluster(config, with_policy=scene in ("interrupted", "sharded")) as cluster:
            if scene in ("interrupted", "sharded"):
                print(json.dumps(sync_and_generate(cluster, folder)), file=results, flush=True)
            if scene == "sharded":
                print(json.dumps(received(cluster)), file=results, flush=True)
                print(json.dumps(incomplete(cluster)), file=results, flush=True)
                return
            print("up", file=results, flush=True)
            time.sleep(600)
    except ClusterError as error:
        print(error, file=results, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
