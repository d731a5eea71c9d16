"""Settings of all tests: one thread (tiny networks run slower with more), and a policy whose network is a
closed form."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("tests", deadline=None, derandomize=True, database=None, report_multiple_bugs=False)
settings.load_profile("tests")


class LinearPolicy:
    """A policy with v = x A^T + sigma b + c[label], in the dtype of A: exact to differentiate, and not
    symmetric in anything."""

    def __init__(self, dtype=torch.float64):
        torch.manual_seed(7)
        self.module = torch.nn.Linear(3, 3, dtype=dtype)
        self.shift = torch.tensor([[0.3, -0.2, 0.5], [-0.7, 0.1, 0.4]], dtype=dtype)
        self.dtype, self.rows_per_call = dtype, []

    def noise(self, n, generator):
        return torch.randn((n, 3), generator=generator, dtype=self.dtype)

    def velocity(self, x, sigma, cond):
        self.rows_per_call.append(len(x))
        return self.module(x.to(self.dtype)) * (0.5 + float(sigma)) + self.shift[cond["label"]]

    def decode(self, x):
        return x


@pytest.fixture(autouse=True)
def pictures_where_they_are_asked_for(request, monkeypatch):
    """Runs draw no pictures, which takes longer than to train them, except in tests marked `pictures`."""
    if not request.node.get_closest_marker("pictures"):
        monkeypatch.setattr("shared.run.save_samples", lambda *args: None)
        monkeypatch.setattr("shared.run.save_reward_curve", lambda *args: None)
        monkeypatch.setattr("algos.tp_grpo.save_turning_points", lambda *args: None)
        monkeypatch.setattr("algos.op_grpo.save_replay", lambda *args: None)
        for module, name in [
            ("shared.run", "save_confusion"),
            ("algos.dflow_grpo", "save_filmstrip"),
            ("algos.dflow_grpo", "save_ratio_noise"),
        ]:
            monkeypatch.setattr(f"{module}.{name}", lambda *args: None)


@pytest.fixture
def linear_policy():
    return LinearPolicy()
