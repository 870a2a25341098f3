"""What can be said about an offloaded optimizer without a GPU: Megatron's hybrid one, its streams left out."""

from types import SimpleNamespace

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megastep.policy.optimizer import _allocate_adam_state


def test_x8_an_offloaded_optimizer_can_be_saved_and_loaded_before_its_first_step(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    weight = torch.nn.Parameter(torch.full((4,), 2.0, dtype=torch.bfloat16))
    hybrid = HybridDeviceOptimizer(
        [{"params": [weight]}], offload_fraction=1.0, cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW, param_update_in_fp32=True, overlap_cpu_optimizer_d2h_h2d=False,
    )
    _allocate_adam_state(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=hybrid)]))
    hybrid.load_state_dict(hybrid.state_dict())
    state = hybrid.state[weight]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "master_param"}
    assert state["master_param"].dtype == torch.float32 and state["master_param"].tolist() == [2.0] * 4
