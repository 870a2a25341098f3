"""`megastep serve`: the engines and the endpoint of agent programs, without training.

An agent can be tried by hand against a checkpoint; `--record` keeps its calls, one trajectory, as a
rollout file.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megastep import signals
from megastep.cluster import Cluster
from megastep.config import Config
from megastep.errors import OutputError, RunDirError
from megastep.rollout.endpoint import LLM, Endpoint
from megastep.rollout.generation import Session
from megastep.rollout.recording import Model, Recording
from megastep.rollout.renderer import Renderer
from megastep.rollout.task import answering, check_vocabulary, limits_of, sampling_of
from megastep.samples import store
from megastep.trainer.collect import checkpoint_of, writable_log
from megastep.types import Group, StopReason, Trajectory

_CALLS = 1 << 30  # no limit


def serve(config: Config, port: int, record: Path | None) -> None:
    """Until SIGINT or SIGTERM."""
    _check_port(config.agent.host, port)
    checkpoint = checkpoint_of(config)
    renderer = Renderer.for_model(config.model.path, config.rollout.mode, config.rollout.template)
    check_vocabulary(renderer, config)
    log = _log(config) if record is None else writable_log(record, "--record")
    with_policy = checkpoint is not None or config.model.init == "random"
    print(f"starting {config.engine.num_engines} engine(s); logs: {log}", flush=True)
    with Cluster(config, with_policy=with_policy, log=log) as cluster:
        if checkpoint is not None:
            cluster.policy.load(checkpoint)
            cluster.sync()
        model = _model(config, renderer, cluster)
        recording = Recording(model, 0, 0, Session("serve", 0))
        endpoint = Endpoint(config.agent.host, config.agent.max_body_mb, port)
        asyncio.run(_answer(endpoint, recording))
    if record is not None:
        _write(record, recording)


def _check_port(host: str, port: int) -> None:
    """Before the engines start."""
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        raise OutputError(f"--port {port}: cannot be used ({error.strerror})") from None


def _log(config: Config) -> Path:
    folder = Path(config.run.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(f"{folder}: cannot be written ({error.strerror})") from None
    return folder / "serve.log"


def _model(config: Config, renderer: Renderer, cluster: Cluster) -> Model:
    limits = replace(limits_of(config), max_turns=_CALLS)
    sampling = sampling_of(config, config.rollout)
    seed = f"serve/{config.train.seed}"
    return answering(config, renderer, cluster.engines.generate, limits, sampling, seed)


async def _answer(endpoint: Endpoint, recording: Recording) -> None:
    with _stopping() as stopped:
        async with endpoint.session(recording) as llm:
            print(_address(llm), flush=True)
            await stopped.wait()


def _address(llm: LLM) -> str:
    """Lines for a shell."""
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
    variables = llm.variables()
    return "\n".join(f"export {name}={variables[name]}" for name in names)


@contextlib.contextmanager
def _stopping() -> Iterator[asyncio.Event]:
    """An event that SIGINT and SIGTERM set."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield stopped
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        signals.listen()


def _write(path: Path, recording: Recording) -> None:
    steps = recording.steps()
    if not steps:
        raise OutputError(f"--record {path}: no call was made, nothing is written")
    trajectory = Trajectory(
        0,
        0,
        steps,
        StopReason.DONE,
        recording.metrics(),
        sampling=recording.model.sampling.distribution,
    )
    store.write(path, [Group(0, [trajectory])])
    print(f"{path}: {len(steps)} calls written; report: megastep view {path}")
