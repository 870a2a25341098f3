"""Patches that let Megatron-Core run on gloo, on a machine without CUDA.

Megatron-Core refers to CUDA in a few dozen places that have nothing to do with kernels: the device
of this rank, stream synchronization, the generator of dropout. Each has an obvious meaning on a
CPU, which `install()` supplies:

    torch, as Megatron's modules see it   a copy of the module whose `cuda` describes the CPU and
                                          whose factories treat `device="cuda"` as the CPU
    Tensor.cuda                           returns the tensor itself
    a few functions                       replaced one by one, each with its place in Megatron

The real `torch` module is unchanged for all other libraries, except for `Tensor.cuda`, which would
raise. With CUDA present `install()` does nothing.

Line numbers are of Megatron-Core 0.16.1; 0.19.2 has the same places.

Call it before a Megatron model is built; further calls have no effect.
"""

import contextlib
import os
import sys
import types

import torch
import torch.distributed as dist

from megastep.distributed.amx import avoid_amx

_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
)


def install() -> bool:
    """Apply the patches if there is no CUDA. Returns whether they are active."""
    if torch.cuda.is_available():
        return False
    avoid_amx()
    _run_fused_functions_eagerly()
    _import_patched_modules()
    _patch_random_state()
    _patch_moe()
    _patch_uneven_collectives()
    _patch_optimizer_type_names()
    _patch_torch_adam_loading()
    _show_cpu_torch_to_megatron()
    # language_module.py:244 (second copy of a tied embedding), exchange_utils.py:336: calls of the
    # method, which the copied module does not cover.
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    return True


def import_megatron() -> None:
    """Import Megatron without torch's compiler, if there is no CUDA and nothing imported it before.

    megatron/core/jit.py decorates small functions with torch.compile. The decorator imports the
    compiler, two seconds per process, for functions that run eagerly here.
    """
    if torch.cuda.is_available():
        return
    decorator = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        _import_patched_modules()
    finally:
        torch.compile = decorator


def _run_fused_functions_eagerly() -> None:
    """Those that torch.compile has decorated: it would start a C++ compiler per process."""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # read when torch._dynamo is imported
    if "torch._dynamo" in sys.modules:
        torch._dynamo.config.disable = True


def _import_patched_modules() -> None:
    """Megatron imports some modules late; they must be loaded before they can be patched."""
    import megatron.core.dist_checkpointing.strategies.async_utils
    import megatron.core.dist_checkpointing.strategies.filesystem_async
    import megatron.core.dist_checkpointing.strategies.fully_parallel
    import megatron.core.dist_checkpointing.strategies.state_dict_saver
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer.distrib_optimizer
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.transformer.moe.moe_layer  # noqa: F401


def _patch_random_state() -> None:
    """tensor_parallel/random.py:38,71 read and write the state of a CUDA generator by its index."""
    from megatron.core.tensor_parallel import random

    def get_state(device="cuda", clone=False, graph_safe=False):
        return torch.get_rng_state()

    def set_state(state, device=-1, graph_safe=False):
        torch.set_rng_state(state)

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state


def _patch_moe() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # moe_utils.py, RouterGatingLinearFunction: tests a name that only Transformer Engine defines.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    # moe_utils.py:1093 converts only GPU tensors to numpy; the all-to-all needs numpy splits.
    def to_host(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _patch_uneven_collectives() -> None:
    """mappings.py:150,187: gloo does not support uneven gathers and scatters (sharded experts)."""
    from megatron.core.tensor_parallel import mappings

    gather = mappings._gather_along_first_dim
    scatter = mappings._reduce_scatter_along_first_dim
    if gather.__module__ == __name__:
        return

    def gather_parts(input_, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        parts = [input_.new_empty(size, *input_.shape[1:]) for size in output_split_sizes]
        parts[group.rank()] = input_.contiguous()
        for rank, part in enumerate(parts):
            dist.broadcast(part, group=group, group_src=rank)
        return torch.cat(parts)

    def scatter_parts(input_, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, use_global_buffer)
        parts = [part.clone() for part in input_.split(input_split_sizes)]
        for rank, part in enumerate(parts):
            dist.reduce(part, group=group, group_dst=rank)
        return parts[group.rank()]

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = scatter_parts


def _patch_optimizer_type_names() -> None:
    """Comparisons with 'torch.cuda.FloatTensor' and the like.

    distrib_optimizer.py:361,420,582, optimizer.py:671, clip_grads.py:167
    """
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    for function in (
        clip_grads.clip_grad_by_total_norm_fp32,
        distrib_optimizer.DistributedOptimizer.__init__,
        distrib_optimizer.DistributedOptimizer._build_model_and_main_param_groups,
        optimizer.Float16OptimizerWithFloat16Params.__init__,
    ):
        plain_function = getattr(function, "__func__", function)  # of a class method
        code = plain_function.__code__
        constants = tuple(_cpu_type_names(constant) for constant in code.co_consts)
        plain_function.__code__ = code.replace(co_consts=constants)


def _cpu_type_names(constant):
    if isinstance(constant, str):
        return constant.replace("torch.cuda.", "torch.")
    if isinstance(constant, tuple):
        return tuple(_cpu_type_names(c) for c in constant)
    return constant


def _patch_torch_adam_loading() -> None:
    """distrib_optimizer.py handles the per-parameter `step` of torch's AdamW only partly."""
    from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if not USING_PYTORCH_OPTIMIZER:
        return
    set_state = DistributedOptimizer._set_main_param_and_optimizer_states
    load_state_dict = DistributedOptimizer.load_state_dict

    def set_state_but_step(self, model_param, tensors):
        # :938 copies every key of the state; the loaded tensors have no `step` (:2101 drops it).
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        set_state(self, model_param, {"step": state["step"], **tensors})

    def load_with_own_steps(self, state_dict):
        # :825 assigns one `step` tensor to all parameters; each would advance it once per update.
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    if set_state.__name__ != set_state_but_step.__name__:
        DistributedOptimizer._set_main_param_and_optimizer_states = set_state_but_step
        DistributedOptimizer.load_state_dict = load_with_own_steps


def _show_cpu_torch_to_megatron() -> None:
    """Replace `torch` in every loaded module of Megatron."""
    cpu_torch = _cpu_torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = cpu_torch


def _cpu_torch() -> types.ModuleType:
    cpu_torch = types.ModuleType("torch")
    attributes = cpu_torch.__dict__
    attributes.update(vars(torch))
    # Attributes that torch loads late.
    attributes["__getattr__"] = lambda name: getattr(torch, name)
    attributes["cuda"] = _CpuAsCuda()
    for name in _FACTORIES:
        attributes[name] = _on_cpu(getattr(torch, name))
    return cpu_torch


def _on_cpu(factory):
    def create(*args, device=None, **kwargs):
        if device is None or str(device).startswith("cuda"):
            return factory(*args, **kwargs)
        return factory(*args, device=device, **kwargs)

    return create


class _Stream:
    """A stream or an event: no-ops, since CPU calls are synchronous."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return _Stream()

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass


class _CpuAsCuda:
    """`torch.cuda` for Megatron: the device and its generator are the CPU's."""

    Stream = _Stream
    Event = _Stream
    _stream = _Stream()

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def set_device(self, device):
        pass

    def synchronize(self, device=None):
        pass

    def empty_cache(self):
        pass

    def current_stream(self, device=None):
        return self._stream

    default_stream = current_stream

    def stream(self, stream):
        return contextlib.nullcontext()

    def manual_seed(self, seed):
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self, device="cuda"):
        return torch.get_rng_state()

    def set_rng_state(self, state, device="cuda"):
        torch.set_rng_state(state)

    def __getattr__(self, name):
        return getattr(torch.cuda, name)
