"""Learning rates, and the state of Megatron's hybrid optimizer without its CUDA streams."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megastep.policy.optimizer import _allocate_adam_state
from tests import cases


def test_x8_an_offloaded_optimizer_can_be_saved_and_loaded_before_its_first_step(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    weight = torch.nn.Parameter(torch.full((4,), 2.0, dtype=torch.bfloat16))
    hybrid = HybridDeviceOptimizer(
        [{"params": [weight]}],
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False,
    )
    _allocate_adam_state(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=hybrid)]))
    hybrid.load_state_dict(hybrid.state_dict())
    state = hybrid.state[weight]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "master_param"}
    assert state["master_param"].dtype == torch.float32
    assert state["master_param"].tolist() == [2.0] * 4


LR = 0.01
# (schedule, warm-up, min_lr): the learning rates of the updates, by hand
SCHEDULES = {
    ("constant", 0, 0.0): [0.01, 0.01, 0.01, 0.01],
    ("linear", 0, 0.0): [0.01, 0.0075, 0.005, 0.0025],
    ("linear", 0, 0.002): [0.01, 0.008, 0.006, 0.004],
    ("linear", 1, 0.0): [0.01, 0.0075, 0.005, 0.0025],
    ("cosine", 0, 0.0): [0.01, 0.01 * (2 + 2**0.5) / 4, 0.005, 0.01 * (2 - 2**0.5) / 4],
    ("cosine", 0, 0.002): [
        0.01,
        0.002 + 0.008 * (2 + 2**0.5) / 4,
        0.006,
        0.002 + 0.008 * (2 - 2**0.5) / 4,
    ],
    ("constant", 2, 0.0): [0.005, 0.01, 0.01, 0.01],
    ("linear", 2, 0.0): [0.005, 0.01, 0.01 * 2 / 3, 0.01 / 3],
    ("cosine", 2, 0.0): [0.005, 0.01, 0.0075, 0.0025],
    ("linear", 3, 0.001): [0.01 / 3, 0.02 / 3, 0.01, 0.0055],
}


# Resumed after so many updates.
RESUMED = {("constant", 2, 0.0): 1, ("linear", 0, 0.0): 2, ("cosine", 2, 0.0): 3}
RUNS = [(key, 0) for key in SCHEDULES] + list(RESUMED.items())


@pytest.fixture(scope="module")
def rates_and_moves(ranks, models, tmp_path_factory) -> dict:
    wanted = [
        ({"lr": LR, "schedule": s, "warmup_steps": w, "min_lr": low}, 4, resume)
        for (s, w, low), resume in RUNS
    ]
    root = tmp_path_factory.mktemp("rates")
    results = ranks(1).run(
        cases.learning_rates, folder=models("llama")[0], root=str(root), schedules=wanted
    )[0]
    return dict(zip(RUNS, results, strict=True))


@pytest.mark.parametrize("schedule, resumed", RUNS, ids=str)
def test_a9_every_update_has_its_learning_rate(schedule, resumed, rates_and_moves):
    """The first update after the warm-up has the full rate, the last is above min_lr, a resumed run
    continues the schedule; and Adam changes the weights by that rate."""
    rates, moves = rates_and_moves[schedule, resumed]
    assert rates == pytest.approx(SCHEDULES[schedule], rel=1e-9)
    assert moves == pytest.approx(SCHEDULES[schedule], rel=1e-4)
