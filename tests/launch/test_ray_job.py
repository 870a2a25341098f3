"""D5: launch/ray_job.sh against a real cluster, and the manifest for Kubernetes."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megastep.checkpoint.manifest import latest, read_manifest
from megastep.config import load
from megastep.plan.planning import make_plan
from megastep.report.metrics_log import read_metrics
from tests.launch.ray_cluster import two_nodes, without_ray
from tests.processes import alive, wait_for

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "launch" / "ray_job.sh")
LOCAL = "configs/local.yaml"
SMALL = (
    "run.wandb=offline",
    "policy.ranks=1",
    "policy.parallel.expert=1",
    "warm_start.trajectories=0",
    "rollout.prompts=2",
    "rollout.samples_per_prompt=2",
    "train.mini_batch_prompts=2",
    "eval.prompts=2",
    "eval.samples_per_prompt=1",
    "optimizer.warmup_steps=0",
)
PASSED_ON = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}


@pytest.fixture(scope="module")
def cluster():
    with two_nodes(cpus=(2, 2)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Another project folder, as on the nodes of a cluster."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


def environment(cluster, project=None, **more: str) -> dict[str, str]:
    found = cluster.environment(RAY_API_SERVER_ADDRESS=cluster.dashboard, **more)
    if project is not None:
        found |= {"MEGASTEP_ROOT": str(project), "MEGASTEP_BIN": str(Path(sys.executable).parent)}
    return found


def submit(arguments, env, stdout=subprocess.PIPE) -> subprocess.Popen:
    """In its own process group, as a shell would start it."""
    return subprocess.Popen(
        [SCRIPT, LOCAL, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )


def run(arguments, env, timeout: int = 300) -> subprocess.CompletedProcess:
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, timeout=timeout, env=env
    )


def status(cluster, job: str) -> str | None:
    """None before the job exists."""
    jobs = {found["submission_id"]: found["status"] for found in cluster.get("/api/jobs/")}
    return jobs.get(job)


def is_clean(cluster) -> bool:
    """No actor, no CPU in use, and no process of a job on either node."""
    names = ("megastep train", "PolicyRank", "ray::Engine", "wandb")
    processes = alive(cluster.head.family() | cluster.worker.family())
    if [line for line in processes if any(name in line for name in names)]:
        return False
    return not cluster.actors() and cluster.cpus_used() == 0


# ---------------------------------------------------------------- followed, stopped, resumed


@pytest.fixture(scope="module")
def stopped(cluster, project):
    """Ctrl-C during training, without periodic checkpoints."""
    folder = project / "runs" / "local"
    shown = project / "shown.txt"
    with shown.open("w") as output:
        process = submit(
            [*SMALL, "train.steps=1000"], environment(cluster, project, **PASSED_ON), output
        )
    try:
        wait_for(lambda: len(read_metrics(folder)) >= 3 or process.poll() is not None, 200)
        # The log is followed, not read at the end.
        wait_for(lambda: "runs/local: a new run\n" in shown.read_text(), 60)
        second = run([LOCAL], environment(cluster, project))
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    return folder, process.returncode, shown.read_text(), errors, second


def test_d5_ctrl_c_stops_the_job_with_a_checkpoint(cluster, stopped):
    folder, code, output, errors, _ = stopped
    assert code == 130 and "ray_job: job local-1: STOPPED" in errors, (
        output[-2000:] + errors[-2000:]
    )
    assert status(cluster, "local-1") == "STOPPED"
    step = read_metrics(folder)[-1]["step"]
    # Ray stops wandb's helper too.
    assert f"stopped after step {step}" in output and "Traceback" not in output
    assert latest(folder / "checkpoints").name == f"step_{step}"
    wait_for(lambda: is_clean(cluster), 60)


def test_d5_run_in_training_is_not_submitted_again(stopped):
    folder, *_, second = stopped
    assert second.returncode == 1
    assert second.stderr.startswith(
        f"ray_job: {folder} is being trained by job local-1; to see it: .venv/bin/ray job"
    )


def test_d5_the_job_has_its_environment(cluster, project, stopped):
    described = cluster.get("/api/jobs/local-1")
    runtime = described["runtime_env"]
    assert runtime["working_dir"] == f"local://{project}" and described["metadata"]["run"] == str(
        stopped[0]
    )
    assert runtime["env_vars"].items() >= (PASSED_ON | {"WANDB_MODE": "offline"}).items()
    assert runtime["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "600"


def test_d5_submitted_again_it_resumes_and_ends_with_0(cluster, project, stopped):
    """Followed to its end; results are in the project's folder, not in a copy by Ray."""
    folder = stopped[0]
    at = read_metrics(folder)[-1]["step"]
    done = run([LOCAL, *SMALL, f"train.steps={at + 2}"], environment(cluster, project), 300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"continues after step {at}" in done.stdout and "held-out success" in done.stdout
    assert "ray_job: job local-2: SUCCEEDED" in done.stderr
    assert [row["step"] for row in read_metrics(folder)] == list(range(at + 3))
    assert read_manifest(latest(folder / "checkpoints"))["step"] == at + 2
    wait_for(lambda: is_clean(cluster), 60)


def test_d5_sigterm_stops_a_job_that_is_starting(cluster, project):
    """Sent to the script and its children, as `timeout` does. This driver reserves a CPU."""
    process = submit(
        [*SMALL, "run.name=early"], environment(cluster, project, MEGASTEP_DRIVER_CPUS="1")
    )
    try:
        wait_for(lambda: (cluster.cpus_used() or 0) >= 1 or process.poll() is not None, 60)
        os.killpg(process.pid, signal.SIGTERM)
        output, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 75 and status(cluster, "early-1") == "STOPPED", (
        output[-2000:] + errors[-2000:]
    )
    wait_for(lambda: is_clean(cluster), 60)


# ---------------------------------------------------------------- failures


def test_d5_config_error_is_one_line_and_exit_code_2(cluster):
    done = run([LOCAL, "run.name=mistake", "train.stepz=1"], environment(cluster))
    assert done.returncode == 2 and status(cluster, "mistake-1") == "FAILED"
    assert done.stdout.endswith("\nerror: train.stepz: unknown key; did you mean train.steps?\n")


def test_d5_run_name_of_the_config_is_printed(cluster, project):
    """Of a job that fails soon with exit code 1: this cluster is too small for it."""
    (project / "mine.yaml").write_text(
        f"base: {ROOT}/{LOCAL}\nrun: {{dir: results, name: named}}\n"
    )
    done = run(["mine.yaml", "cluster.cpus_per_process=9"], environment(cluster, project))
    assert (
        f"ray_job: job named-1 at {cluster.dashboard}; its run is {project}/results/named\n"
        in done.stderr
    )
    assert done.returncode == 1 and "error: the cluster is too small: " in done.stdout


def test_d5_folder_missing_on_the_nodes_is_an_error(cluster):
    done = run([LOCAL, "run.name=nowhere"], environment(cluster, "/nowhere"))
    assert (
        done.returncode == 1
        and "'/nowhere', which must already exist on every node" in done.stdout + done.stderr
    )


@pytest.mark.parametrize(
    "arguments, given, code, message",
    [
        (
            [LOCAL],
            {},
            2,
            "set RAY_API_SERVER_ADDRESS to the address of Ray's dashboard, such as http://HEAD:8265",
        ),
        (
            [LOCAL],
            {"RAY_ADDRESS": "127.0.0.1:6379"},
            2,
            "127.0.0.1:6379: the dashboard's address is needed, such as http://HEAD:8265",
        ),
        (
            [LOCAL],
            {"RAY_ADDRESS": "http://127.0.0.1:1"},
            1,
            "http://127.0.0.1:1: no Ray dashboard at this address ",
        ),
        (["train.steps=1"], {"RAY_ADDRESS": "http://127.0.0.1:1"}, 2, "CONFIG is missing; usage: "),
        (
            [LOCAL],
            {"RAY_ADDRESS": "http://127.0.0.1:1", "RAY_JOB_STOP_WAIT_TIME_S": "10m"},
            2,
            "RAY_JOB_STOP_WAIT_TIME_S = 10m: must be a whole number of seconds",
        ),
    ],
)
def test_d5_missing_or_wrong_address_is_one_line(arguments, given, code, message):
    done = run(arguments, without_ray() | given)
    (line,) = done.stderr.splitlines()
    assert done.returncode == code and line.startswith(f"ray_job: {message}")


def test_d5_missing_token_is_one_line(cluster):
    done = run([LOCAL], without_ray() | {"RAY_ADDRESS": cluster.dashboard})
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "Missing authentication token; see RAY_AUTH_MODE in" in line


def test_d5_help_explains_every_variable():
    done = run(["--help"], without_ray())
    after = Path(SCRIPT).read_text().partition("USAGE\n}")[2]
    used = set(re.findall(r"\b(?:MEGASTEP|RAY)_[A-Z_]+", after))
    passed_on = set(re.findall(r'"([A-Z_]+)"', re.search(r"\npassed_on = \(([^)]*)\)", after)[1]))
    assert done.returncode == 0 and len(used) > 5 and len(passed_on) > 5
    assert not [name for name in used | passed_on if not re.search(rf"\b{name}", done.stdout)]


# ---------------------------------------------------------------- Kubernetes


@pytest.fixture(scope="module")
def manifest():
    claim, job = yaml.safe_load_all((ROOT / "launch" / "kuberay.yaml").read_text())
    assert (claim["kind"], job["kind"], job["apiVersion"]) == (
        "PersistentVolumeClaim",
        "RayJob",
        "ray.io/v1",
    )
    return claim, job["spec"]


def test_d5_the_manifest_trains_with_a_config_that_loads(manifest):
    """With the shape of the same model, whose weights are on the volume."""
    megastep, train, config, *overrides = shlex.split(manifest[1]["entrypoint"])
    assert (megastep, train) == ("megastep", "train")
    loaded = load(config, [*overrides, "model.path=configs/models/qwen3-30b-a3b"])
    group = manifest[1]["rayClusterSpec"]["workerGroupSpecs"][0]
    gpus = group["replicas"] * int(group["rayStartParams"]["num-gpus"])
    assert (
        loaded.policy.ranks
        == gpus
        == loaded.engine.num_engines * loaded.engine.tensor_parallel
        == 16
    )
    assert loaded.cluster.colocate and loaded.run.name and loaded.checkpoint.every_steps > 0
    assert not make_plan(loaded).problems()


def test_d5_manifest_has_the_pinned_version_of_ray(manifest):
    pins = (ROOT / "launch" / "requirements-cpu.txt").read_text().replace(" \\", "").splitlines()
    assert f"ray=={manifest[1]['rayClusterSpec']['rayVersion']}" in pins
    assert (
        f'"ray[default]=={manifest[1]["rayClusterSpec"]["rayVersion"]}"'
        in (ROOT / "pyproject.toml").read_text()
    )


def test_d5_every_path_of_the_manifest_is_on_the_volume(manifest):
    claim, spec = manifest
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    paths = [text.partition("=")[2] for text in shlex.split(spec["entrypoint"]) if "=/" in text]
    groups = [spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"]]
    assert len(paths) == 5 and len(groups) == 2
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = {
            mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]
        }
        assert mounted["/data"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert all(path.startswith("/data/") for path in paths)
        gpus = container["resources"]["limits"].get("nvidia.com/gpu", "0")
        assert gpus == group["rayStartParams"]["num-gpus"]


def test_d5_rendezvous_of_the_manifest_uses_one_network(manifest):
    (container,) = manifest[1]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"][
        "containers"
    ]
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    assert given["NCCL_SOCKET_IFNAME"] == given["GLOO_SOCKET_IFNAME"]


def test_d5_a_job_of_the_manifest_has_time_for_its_checkpoint(manifest):
    runtime = yaml.safe_load(manifest[1]["runtimeEnvYAML"])
    assert int(runtime["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 600
    assert runtime["working_dir"].startswith("local:///")
    assert manifest[1]["shutdownAfterJobFinishes"] and manifest[1]["ttlSecondsAfterFinished"] > 0
