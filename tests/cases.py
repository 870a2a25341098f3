"""What test ranks run. Each function builds its policy under the layout it is given."""

import torch

from megastep.config import Config, ParallelConfig
from megastep.policy import parallel
from megastep.policy.worker import PolicyWorker
from megastep.sync.hf_files import HFReader
from tests import ranks
from tests.models import some_tokens


def make_worker(folder, layout: dict, precision: str = "fp32", steps: int = 100, **settings) -> PolicyWorker:
    config = Config()
    config.model.path = str(folder)
    config.policy.parallel = ParallelConfig(**layout)
    config.policy.precision = precision
    config.train.steps = steps
    config.train.micro_batch_sequences = 2
    config.optimizer.lr = 1e-3
    config.checkpoint.asynchronous = settings.get("asynchronous", False)
    parallel.start(config.policy.parallel, *ranks.current)
    return PolicyWorker(config)


def logits_and_round_trip(folder, layout: dict):
    """Logits of this rank's sequences (last stage only), with their place, and whether the export is bit-exact."""
    worker = make_worker(folder, layout)
    logits = worker.logits(some_tokens())
    place = parallel.place()
    original, exported = (HFReader(folder), {}) if place.rank == 0 else (None, None)
    for name, tensor in worker.hf_tensors():
        exported[name] = torch.equal(tensor, original(name))
    if place.rank == 0:
        exported = set(exported) == set(original.file_of) and all(exported.values())
    return None if logits is None else (place.data, place.data_size, logits.numpy()), exported


def take_steps(folder, layout: dict, steps: int, precision: str = "fp32") -> list[dict]:
    worker = make_worker(folder, layout, precision)
    return [worker.train_step(some_tokens()) for _ in range(steps)]


def tied_copies(folder, layout: dict, steps: int):
    """The two ends of a tied embedding after some steps: what the first and the last stage hold."""
    worker = make_worker(folder, layout)
    for _ in range(steps):
        worker.train_step(some_tokens())
    (chunk,) = worker.chunks
    return chunk.module.shared_embedding_or_output_weight().detach().numpy().copy()


def export(folder, layout: dict, destination, precision: str = "fp32") -> None:
    make_worker(folder, layout, precision).export(destination, shard_bytes=200_000)


def save_then_go_on(folder, layout: dict, root, before: int, after: int, precision: str = "fp32", asynchronous=False):
    """Steps, a checkpoint, more steps; the metrics of the steps after the checkpoint."""
    worker = make_worker(folder, layout, precision, asynchronous=asynchronous)
    for _ in range(before):
        worker.train_step(some_tokens())
    worker.save(root)
    metrics = [worker.train_step(some_tokens()) for _ in range(after)]
    worker.finish_saving()
    return metrics


def load_and_go_on(folder, layout: dict, checkpoint, steps: int, precision: str = "fp32") -> list[dict]:
    worker = make_worker(folder, layout, precision)
    worker.load(checkpoint)
    return [worker.train_step(some_tokens()) for _ in range(steps)]


def random_numbers_after_load(folder, layout: dict, root) -> tuple:
    """The next random numbers with and without a save and load between."""
    worker = make_worker(folder, layout)
    worker.train_step(some_tokens())
    worker.save(root)
    expected = torch.rand(3).tolist()
    parallel.seed_everything(99)
    worker.load(f"{root}/step_1")
    return expected, torch.rand(3).tolist()


def loading_error(folder, layout: dict, checkpoint) -> str:
    try:
        make_worker(folder, layout).load(checkpoint)
    except ValueError as error:
        return str(error)
    return "loaded"


def save_and_export(folder, layout: dict, root, destination) -> None:
    worker = make_worker(folder, layout)
    for _ in range(2):
        worker.train_step(some_tokens())
    worker.save(root)
    worker.export(destination)
