"""python -m tests.cluster_scenes SCENE MODEL_FOLDER: a cluster for tests that end it."""

import json
import sys
import time

from megastep.cluster import Cluster
from megastep.config import Config
from megastep.errors import ClusterError
from tests.engines import Rollouts, export, shake
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
    cluster.sync()
    rollouts.on_ranks(export, f"{folder}-synced")
    return [g.ids.tolist() for g in rollouts.ask(some_tokens())]


def main(scene: str, folder: str) -> None:
    config = small(folder)
    results = sys.stdout
    sys.stdout = sys.stderr  # progress of the cluster
    if scene == "too_small":
        config.cluster.cpus_per_process = 1000
    try:
        with Cluster(config, with_policy=scene == "interrupted") as cluster:
            if scene == "interrupted":
                print(json.dumps(sync_and_generate(cluster, folder)), file=results, flush=True)
            print("up", file=results, flush=True)
            time.sleep(600)
    except ClusterError as error:
        print(error, file=results, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
