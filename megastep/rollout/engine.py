"""One vLLM engine, as a Ray actor. The only module that knows how vLLM is asked; `fleet.py` has many of these.

An engine answers one `generate` per model call and keeps, for each call in flight, which policy version sampled which
tokens. Around a push it is paused: running calls freeze, their cached keys and those of all prefixes are dropped, and
when it resumes they are computed anew, so that no token is ever sampled from the keys of another version. Experts are
recorded when a token is first computed: those of a call that is frozen after its prompt was read stay as they are.

vLLM and torch are imported when the actor starts, after the environment they read is set.
"""

import asyncio
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megastep.config import Config
from megastep.distributed import amx
from megastep.distributed.processes import send_output_to
from megastep.models.architecture import read_architecture
from megastep.rollout.generation import Generation, Sampling

_CPU_BATCH_TOKENS = 4096
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Setup:
    """What an engine needs to know beyond the configuration."""

    index: int
    backend: str  # of the weight transfer: shm | nccl | ipc
    has_gpu: bool
    gpu_ids: tuple[str, ...] | None  # GPUs shared with policy ranks; None: those that Ray assigns
    own_weights: bool  # from model.path; else they come with the first push
    folder: str  # working directory
    log: str | None  # file for what vLLM says


@dataclass(eq=False)
class Running:
    """A call in flight."""

    runs: list[list[int]]  # [version, tokens sampled before it took over]
    request_id: str | None = None  # vLLM's, once it has it


def ends_without_core(method):
    """An actor whose vLLM has died ends too, whatever it was asked: that is what others look for."""

    @functools.wraps(method)
    async def call(self, *arguments, **named):
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await method(self, *arguments, **named)
        except EngineDeadError:
            os._exit(1)

    return call


class Engine:
    """The methods are awaited one by one or together; the actor runs them in one event loop."""

    def __init__(self, config: Config, setup: Setup):
        self.config, self.setup = config, setup
        self.version = 0
        self.running: set[Running] = set()
        self.takes_calls = asyncio.Event()  # not while it is paused
        self.takes_calls.set()
        os.chdir(setup.folder)
        if setup.log:
            send_output_to(Path(setup.log))
        os.environ.update(_environment(config, setup))

    async def start(self) -> int:
        """Build the engine; returns the process id."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**_arguments(self.config, self.setup)))
        _forget_shared_memory_names()
        return os.getpid()

    @ends_without_core
    async def check(self) -> None:
        """Returns if the engine is well."""
        await self.llm.check_health()

    # ------------------------------------------------------------ generation

    @ends_without_core
    async def generate(
        self,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        name: str,
        routing_start: int,
        routing_version: int | None = None,
    ) -> Generation:
        await self.takes_calls.wait()  # the version it will be computed with is known afterwards
        if routing_version not in (None, self.version):
            routing_start = 0
        call = Running(runs=[[self.version, 0]])
        self.running.add(call)
        try:
            output = await self._answer(
                call, prompt_ids, _sampling_params(sampling, routing_start), name
            )
        except ValueError as error:  # vLLM's own class would make the caller import vLLM
            raise ValueError(str(error)) from None
        finally:
            self.running.remove(call)
        return _generation(output, call, routing_start)

    async def _answer(self, call: Running, prompt_ids: np.ndarray, params, name: str):
        """As `AsyncLLM.generate`, but saying under which id vLLM has the request."""
        prompt = {"prompt_token_ids": prompt_ids.tolist()}
        queue = await self.llm.add_request(name, prompt, params)
        call.request_id = queue.request_id
        try:
            return await queue.get()
        except asyncio.CancelledError:
            await self.llm.abort(call.request_id, internal=True)
            raise

    def _tokens_so_far(self, call: Running) -> int | None:
        """None: the call has all of its tokens and is only to be returned."""
        if call.request_id is None:
            return 0
        state = self.llm.output_processor.request_states.get(call.request_id)
        return state and state.detokenizer.num_output_tokens()

    # ------------------------------------------------------------ weights

    @ends_without_core
    async def pause(self, finish_calls: bool = False) -> None:
        """Freeze the running calls, or let them finish, and forget all cached keys. New calls wait."""
        self.takes_calls.clear()
        await self.llm.pause_generation(mode="wait" if finish_calls else "keep", clear_cache=True)
        await self._read_all_outputs()

    async def _read_all_outputs(self) -> None:
        """vLLM's answer to the pause may overtake the last tokens on their way through this process."""
        while not self.llm.engine_core.outputs_queue.empty():
            await asyncio.sleep(0)
        # What was taken off the queue is looked at 128 calls at a time, with a break after each.
        for _ in range(2 + self.config.engine.max_sequences // 128):
            await asyncio.sleep(0)

    @ends_without_core
    async def resume(self) -> None:
        await self.llm.resume_generation()
        self.takes_calls.set()

    @ends_without_core
    async def init_weight_transfer(self, info: dict) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(info))

    @ends_without_core
    async def start_weight_update(self) -> None:
        await self.llm.start_weight_update()

    @ends_without_core
    async def update_weights(self, info: dict) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.llm.update_weights(WeightTransferUpdateRequest(info))

    @ends_without_core
    async def finish_weight_update(self, version: int) -> None:
        await self.llm.finish_weight_update(weight_version=str(version))
        self.version = version
        for call in self.running:
            tokens = self._tokens_so_far(call)
            if tokens is not None and call.runs[-1][0] != version:
                call.runs.append([version, tokens])

    @ends_without_core
    async def received_checksums(self) -> list[dict[str, int]]:
        """Of the last push, one table per worker; empty without `sync.verify`."""
        return await self.llm.collective_rpc("received_checksums")

    # ------------------------------------------------------------ taking turns on a GPU

    @ends_without_core
    async def sleep(self) -> None:
        """Give up a shared GPU's memory, weights included: a push comes before the next call. Running calls freeze."""
        if self.setup.gpu_ids is not None:
            await self.llm.sleep(level=2, mode="keep")

    @ends_without_core
    async def wake(self, what: str) -> None:
        """`weights` before the push, `kv_cache` after it."""
        if self.setup.gpu_ids is not None:
            await self.llm.wake_up(tags=[what])


def _forget_shared_memory_names() -> None:
    """vLLM's processes talk through shared memory, and have all of it mapped by now. Without its names it goes when
    they do; with them, it would stay after an engine that is killed."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        for path in {
            mapped.path for mapped in process.memory_maps() if mapped.path.startswith("/dev/shm/")
        }:
            Path(path).unlink(missing_ok=True)


def _environment(config: Config, setup: Setup) -> dict[str, str]:
    """What vLLM and torch read when they are imported."""
    common = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if setup.has_gpu:
        shown = {} if setup.gpu_ids is None else {"CUDA_VISIBLE_DEVICES": ",".join(setup.gpu_ids)}
        # The handles of shared GPU memory are tuples that vLLM's messages cannot spell.
        return {**common, **shown, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    return {
        **common,
        "OMP_NUM_THREADS": "1",
        # vLLM compiles a helper of its sampler at the first call, which takes a C++ compiler half a minute.
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # policy ranks use the same cores
        "VLLM_CPU_KVCACHE_SPACE": str(config.engine.cpu_kv_gb),
        amx.VARIABLE: os.environ.get(amx.VARIABLE, amx.WITHOUT_AMX),
    }


def _arguments(config: Config, setup: Setup) -> dict:
    arch, engine = read_architecture(config.model.path), config.engine
    max_model_len = engine.max_model_len or arch.max_positions
    # A prompt that is computed in parts makes vLLM rewind the random numbers of its call, which those of a CPU cannot.
    batches = (
        {}
        if setup.has_gpu
        else dict(
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(max_model_len, _CPU_BATCH_TOKENS),
        )
    )
    return dict(
        model=config.model.path,
        skip_tokenizer_init=True,  # token ids in, token ids out
        generation_config="vllm",  # no sampling defaults from the model's folder
        dtype=_DTYPES[config.policy.precision],
        load_format="auto" if setup.own_weights else "dummy",
        max_model_len=max_model_len,
        max_num_seqs=engine.max_sequences,
        tensor_parallel_size=engine.tensor_parallel,
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
        disable_log_stats=True,
        **batches,
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
        ignore_eos=True,  # what ends a response is in stop_token_ids
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        routed_experts_prompt_start=routing_start,
    )


def _generation(answer, call: Running, routing_start: int) -> Generation:
    output = answer.outputs[0]
    ids = np.asarray(output.token_ids, np.int32)
    routing = output.routed_experts
    if routing is not None and routing.dtype != np.uint8:
        routing = routing.astype(np.int16)
    return Generation(
        ids=ids,
        logprobs=np.asarray(output.logprobs.logprobs, np.float32),
        versions=run_lengths(call.runs, len(ids)),
        finish=output.finish_reason,
        routing=routing,
        routing_start=routing_start,
        cached_tokens=answer.num_cached_tokens or 0,
    )


def run_lengths(runs: list[list[int]], tokens: int) -> np.ndarray:
    """[version, tokens before it] in order → rows (version, tokens), without empty ones.

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
