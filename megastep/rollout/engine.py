"""One vLLM engine as a Ray actor, and all calls of vLLM's API; `fleet.py` manages many engines.

An engine answers one `generate` per model call and records, for each call in flight, which weight
version sampled which tokens. During a weight sync it is paused: running calls freeze, the KV cache
and all cached prefixes are dropped, and both are recomputed when it resumes, so that no token is
sampled from keys of another version. Routing is recorded when a token is first computed: a call
frozen after its prefill keeps the routing of its prompt.

vLLM and torch are imported when the actor starts, after their environment variables are set.
"""

import asyncio
import contextlib
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megastep.config import Config
from megastep.distributed import amx
from megastep.distributed.processes import forks_end_with_us, send_output_to
from megastep.models.architecture import read_architecture
from megastep.rollout.generation import Generation, Sampling

_CPU_BATCH_TOKENS = 4096
_CPU_BLOCK_TOKENS = 32
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Setup:
    """Settings of an engine beyond the configuration."""

    index: int
    backend: str  # of the weight transfer: shm | nccl | ipc
    has_gpu: bool
    gpu_ids: tuple[str, ...] | None  # GPUs shared with policy ranks; None: assigned by Ray
    own_weights: bool  # from model.path; else from the first weight sync
    threads: int  # without a GPU
    folder: str  # working directory
    log: str | None  # file for vLLM's output


class Progress(NamedTuple):
    """An engine's answer to a health check."""

    running: int = 0  # calls that it has accepted, those in vLLM's queue included
    tokens: int = 0  # sampled so far; any change is progress
    paused: bool = False


@dataclass(eq=False)
class Running:
    """A call in flight."""

    runs: list[list[int]]  # [weight version, tokens sampled before it]
    request_id: str | None = None  # vLLM's, once assigned


def exit_when_dead(method):
    """Exit the actor when its vLLM engine dies, so that Ray reports it."""

    @functools.wraps(method)
    async def call(self, *arguments, **named):
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await method(self, *arguments, **named)
        except EngineDeadError:
            os._exit(1)

    return call


class Engine:
    """An async actor: all methods run in one event loop."""

    def __init__(self, config: Config, setup: Setup):
        self.config = config
        self.setup = setup
        self.version = 0
        self.running: set[Running] = set()
        self.answered_tokens = 0
        self.accepts_calls = asyncio.Event()  # cleared while paused
        self.accepts_calls.set()
        os.chdir(setup.folder)
        if setup.log:
            send_output_to(Path(setup.log))
        os.environ.update(_environment(config, setup))
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would replace engine.cpu_kv_gb
        # Takes seconds: here it overlaps with the start of the policy ranks. An error is raised
        # by `start`, where it is reported.
        with contextlib.suppress(Exception):
            import vllm.v1.engine.async_llm  # noqa: F401

    async def start(self) -> int:
        """Build the engine; returns the process id."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**_arguments(self.config, self.setup))
        vllm_config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        if not self.setup.has_gpu:
            _fork_engine_core()
        self.llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
        _unlink_shared_memory()
        return os.getpid()

    @exit_when_dead
    async def check(self) -> Progress:
        """Health check."""
        await self.llm.check_health()
        tokens = sum(self._tokens_so_far(call) or 0 for call in self.running)
        return Progress(
            len(self.running), self.answered_tokens + tokens, not self.accepts_calls.is_set()
        )

    # ------------------------------------------------------------ generation

    @exit_when_dead
    async def generate(
        self,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        name: str,
        routing_start: int,
        routing_version: int | None = None,
    ) -> Generation:
        await self.accepts_calls.wait()  # self.version is final only after that
        if routing_version not in (None, self.version):
            routing_start = 0
        call = Running(runs=[[self.version, 0]])
        self.running.add(call)
        try:
            params = _sampling_params(sampling, routing_start)
            output = await self._output(call, prompt_ids, params, name)
        except ValueError as error:  # unpickling vLLM's own class would import vLLM
            raise ValueError(str(error)) from None
        finally:
            self.running.remove(call)
        generation = _generation(output, call, routing_start)
        self.answered_tokens += len(generation.ids)
        return generation

    async def _output(self, call: Running, prompt_ids: np.ndarray, params, name: str):
        """As `AsyncLLM.generate`, but records vLLM's request id."""
        prompt = {"prompt_token_ids": prompt_ids.tolist()}
        queue = await self.llm.add_request(name, prompt, params)
        call.request_id = queue.request_id
        try:
            return await queue.get()
        except asyncio.CancelledError:
            await self.llm.abort(call.request_id, internal=True)
            raise

    def _tokens_so_far(self, call: Running) -> int | None:
        """None: generation has finished and the call is about to return."""
        if call.request_id is None:
            return 0
        state = self.llm.output_processor.request_states.get(call.request_id)
        return state and state.detokenizer.num_output_tokens()

    # ------------------------------------------------------------ weights

    @exit_when_dead
    async def pause(self, finish_calls: bool = False) -> None:
        """Freeze running calls, or let them finish, and drop the KV cache. New calls wait."""
        self.accepts_calls.clear()
        await self.llm.pause_generation(mode="wait" if finish_calls else "keep", clear_cache=True)
        await self._read_all_outputs()

    async def _read_all_outputs(self) -> None:
        """vLLM may acknowledge the pause before this process has handled the last tokens."""
        while not self.llm.engine_core.outputs_queue.empty():
            await asyncio.sleep(0)
        # vLLM processes the dequeued outputs in chunks of 128 calls and yields after each.
        for _ in range(2 + self.config.engine.max_sequences // 128):
            await asyncio.sleep(0)

    @exit_when_dead
    async def resume(self) -> None:
        await self.llm.resume_generation()
        self.accepts_calls.set()

    @exit_when_dead
    async def init_weight_transfer(self, info: dict) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(info))

    @exit_when_dead
    async def start_weight_update(self) -> None:
        await self.llm.start_weight_update()

    @exit_when_dead
    async def update_weights(self, info: dict) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.llm.update_weights(WeightTransferUpdateRequest(info))

    @exit_when_dead
    async def finish_weight_update(self, version: int) -> None:
        await self.llm.finish_weight_update(weight_version=str(version))
        self.version = version
        for call in self.running:
            tokens = self._tokens_so_far(call)
            if tokens is not None and call.runs[-1][0] != version:
                call.runs.append([version, tokens])

    @exit_when_dead
    async def abandon_weight_update(self) -> None:
        """End an update whose weights did not all arrive; vLLM has no such call."""
        await self.llm.collective_rpc("abandon_weight_update")

    @exit_when_dead
    async def received_checksums(self) -> list[dict[str, int]]:
        """Of the last weight sync, one table per worker; empty without `sync.verify`."""
        return await self.llm.collective_rpc("received_checksums")

    # ------------------------------------------------------------ colocated with the policy

    @exit_when_dead
    async def sleep(self) -> None:
        """Free a shared GPU's memory, weights included: a weight sync must precede the next call.
        Running calls freeze."""
        if self.setup.gpu_ids is not None:
            await self.llm.sleep(level=2, mode="keep")

    @exit_when_dead
    async def wake(self, what: str) -> None:
        """`weights` before the weight sync, `kv_cache` after it."""
        if self.setup.gpu_ids is not None:
            await self.llm.wake_up(tags=[what])


def _fork_engine_core() -> None:
    """Fork vLLM's engine core, a process of its own, which then need not import vLLM once more.

    vLLM spawns it in a Ray actor, and on every CPU: the fork of a process whose OpenMP threads have
    started would hang. This process computes nothing.
    """
    import ray._raylet
    from vllm.utils import system_utils

    forks_end_with_us()
    # In a fork of a Ray worker vLLM's own call has no effect.
    os.register_at_fork(after_in_child=lambda: ray._raylet.setproctitle("VLLM::EngineCore"))
    system_utils._maybe_force_spawn = lambda: None
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # after vLLM's configuration set it


def _unlink_shared_memory() -> None:
    """Unlink the shared memory that vLLM's processes have mapped, so that the kernel frees it when
    they end, even if they are killed."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        try:
            paths = {mapped.path for mapped in process.memory_maps()}
        except psutil.NoSuchProcess:  # a compile worker of torch, which ended meanwhile
            continue
        for path in paths:
            if path.startswith("/dev/shm/"):
                Path(path).unlink(missing_ok=True)


def _environment(config: Config, setup: Setup) -> dict[str, str]:
    """Variables that vLLM and torch read when they are imported."""
    common = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if setup.has_gpu:
        # vLLM's default serialization rejects CUDA IPC handles, which are tuples.
        variables = {**common, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        if setup.gpu_ids is not None:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(setup.gpu_ids)
        return variables
    return {
        **common,
        "OMP_NUM_THREADS": str(setup.threads),
        # vLLM would compile a sampler helper in C++ at the first call, for half a minute.
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # policy ranks use the same cores
        # vLLM then keeps the `uni` executor: no worker process that imports vLLM once more.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if config.engine.tensor_parallel == 1 else "1",
        amx.VARIABLE: os.environ.get(amx.VARIABLE, amx.WITHOUT_AMX),
    }


def _arguments(config: Config, setup: Setup) -> dict:
    arch = read_architecture(config.model.path)
    engine = config.engine
    max_model_len = engine.max_model_len or arch.max_positions
    scheduling: dict[str, Any] = {}
    if not setup.has_gpu:
        # After a chunked prefill vLLM rewinds the call's generator, which CPU generators cannot do.
        scheduling["enable_chunked_prefill"] = False
        scheduling["max_num_batched_tokens"] = max(max_model_len, _CPU_BATCH_TOKENS)
        # Prefixes are cached in whole blocks, and vLLM's default of 128 exceeds many turns.
        scheduling["block_size"] = _CPU_BLOCK_TOKENS
        scheduling["kv_cache_memory_bytes"] = int(engine.cpu_kv_gb * 2**30)
    return dict(
        model=config.model.path,
        skip_tokenizer_init=True,  # token ids in, token ids out
        generation_config="vllm",  # no sampling defaults from the model's folder
        dtype=_DTYPES[config.policy.precision],
        quantization=engine.quantization,  # not run on a GPU yet
        load_format="auto" if setup.own_weights else "dummy",
        max_model_len=max_model_len,
        max_num_seqs=engine.max_sequences,
        tensor_parallel_size=engine.tensor_parallel,
        # With tensor parallelism in a placement group vLLM would choose its Ray executor, and wait
        # for GPUs of its own.
        distributed_executor_backend="uni" if engine.tensor_parallel == 1 else "mp",
        gpu_memory_utilization=engine.gpu_memory_utilization,
        enforce_eager=not setup.has_gpu,
        seed=config.train.seed + setup.index,
        enable_prefix_caching=True,
        enable_return_routed_experts=arch.experts is not None,
        logprobs_mode="processed_logprobs",
        enable_sleep_mode=setup.has_gpu and config.cluster.colocate,
        weight_transfer_config={"backend": f"megastep_{setup.backend}"},
        worker_extension_cls="megastep.sync.receiver.WorkerExtension",
        additional_config={"sync_verify": config.sync.verify},
        **scheduling,
    )


def _sampling_params(sampling: Sampling, routing_start: int):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # stop_token_ids has every stop token
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        routed_experts_prompt_start=routing_start,
        **sampling.extra,
    )


def _generation(output, call: Running, routing_start: int) -> Generation:
    completion = output.outputs[0]
    ids = np.asarray(completion.token_ids, np.int32)  # [R]
    routing = completion.routed_experts  # [n, L, K]
    if routing is not None and routing.dtype != np.uint8:
        routing = routing.astype(np.int16)
    return Generation(
        ids=ids,
        logprobs=np.asarray(completion.logprobs.logprobs, np.float32),  # [R]
        versions=run_lengths(call.runs, len(ids)),
        finish=completion.finish_reason,
        routing=routing,
        routing_start=routing_start,
        cached_tokens=output.num_cached_tokens or 0,
    )


def run_lengths(runs: list[list[int]], tokens: int) -> np.ndarray:
    """[V, 2] i32: [version, tokens before it] in order → (version, tokens), without empty rows.

    >>> run_lengths([[3, 0], [4, 5]], 8).tolist()
    [[3, 5], [4, 3]]
    """
    ends = [start for _, start in runs[1:]] + [tokens]
    rows = [
        (version, end - start)
        for (version, start), end in zip(runs, ends, strict=True)
        if end > start
    ]
    return np.array(rows, np.int32).reshape(-1, 2)
