"""The adapters for published code, on stand-ins of a checkout: small code of our own under its names.
A right stand-in is accepted, a wrong one is refused with the sentence that names the fault, and what is no
checkout is refused with one line."""

import json
import subprocess
import sys

import pytest
import torch

from oracle.__main__ import ROOT, main

torch.set_num_threads(1)
FLOW, TURNING = (ROOT / "oracle" / "adapters" / f"{name}_grpo_public.py" for name in ("flow", "turningpoint"))

STEP = """
import math
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.utils.torch_utils import randn_tensor


def sde_step_with_logprob(
    self: FlowMatchEulerDiscreteScheduler, model_output, timestep, sample, noise_level=0.7, prev_sample=None,
    generator=None, sde_type="sde",
):
    at = [self.index_for_timestep(t) for t in timestep]
    sigma, after = (self.sigmas[[i + k for i in at]].view(-1, *[1] * (sample.dim() - 1)) for k in (0, 1))
    x, v, dt = sample.float(), model_output.float(), sigma - after
    eps_hat = x + (1 - sigma) * v
    if sde_type == "cps":
        std = after * math.sin(noise_level * math.pi / 2)
        mean = (1 - after) * (x - sigma * v) + (after**2 - std**2).clamp(min=0).sqrt() * eps_hat
    else:
        below = sigma.clamp(max=self.sigmas[1])
        g = noise_level * torch.sqrt(sigma / (1 - below))
        mean = x - (v + g**2 / (2 * sigma) * eps_hat) * dt
        std = g * dt.sqrt()
    if prev_sample is None:
        prev_sample = mean + std * randn_tensor(x.shape, generator=generator, dtype=x.dtype)
    log = -((prev_sample.detach() - mean) ** 2) / (2 * std**2) - std.log() - math.log(2 * math.pi) / 2
    return prev_sample, log.flatten(1).mean(1), mean, std
"""
TRACKER = """
import numpy as np


class PerPromptStatTracker:
    def __init__(self, global_std=False):
        self.global_std = global_std

    def update(self, prompts, rewards):
        prompts, result = np.array(prompts), np.zeros_like(rewards)
        for prompt in set(prompts):
            group = rewards[prompts == prompt]
            std = (rewards if self.global_std else group).std(axis=0, ddof=0)
            flat = group.max(axis=0) == group.min(axis=0)
            result[prompts == prompt] = np.where(flat, 0.0, (group - group.mean(axis=0)) / (std + 1e-4))
        return result
"""
WAN = """
import math
import torch
from diffusers.callbacks import PipelineCallback
from diffusers.utils.torch_utils import randn_tensor


def sde_step_with_logprob(
    self, model_output, timestep, sample, prev_sample=None, generator=None, determistic=False,
    return_dt_and_std_dev_t=False,
):
    at = [self.index_for_timestep(t) for t in timestep]
    sigma, after = (self.sigmas[[i + k for i in at]].view(-1, *[1] * (sample.dim() - 1)) for k in (0, 1))
    x, v, dt = sample.float(), model_output.float(), sigma - after
    g = self.sigmas[-1] + (self.sigmas[1] - self.sigmas[-1]) * sigma
    mean = x - (v + g**2 / (2 * sigma) * (x + (1 - sigma) * v)) * dt
    std = g * dt.sqrt()
    if prev_sample is None:
        prev_sample = mean + std * randn_tensor(x.shape, generator=generator, dtype=x.dtype)
    if determistic:
        prev_sample = x - v * dt
    log = -((prev_sample.detach() - mean) ** 2) / (2 * std**2) - std.log() - math.log(2 * math.pi) / 2
    rest = (g, dt.sqrt()) if return_dt_and_std_dev_t else (std,)
    return prev_sample, log.flatten(1).mean(1), mean, *rest
"""
LOSS = """
def train():
    for j in range(steps):
        advantages = sample["advantages"][:, j].clamp(-config.train.adv_clip_max, config.train.adv_clip_max)
        ratio = torch.exp(log_prob - sample["log_probs"][:, j])
        unclipped_loss = -advantages * ratio
        clipped_loss = -advantages * ratio.clamp(1 - config.train.clip_range, 1 + config.train.clip_range)
        policy_loss = torch.maximum(unclipped_loss, clipped_loss).mean()
        kl_loss = ((prev_sample_mean - prev_sample_mean_ref) ** 2).flatten(1).mean(1) / (2 * std_dev_t**2)
        kl_loss = kl_loss.mean()
"""
REWARDS = """
def reward():
    for sample in samples:
        final, first = sample["rewards"]["avg"], sample["ode_rewards"]["avg"]
        later = sorted(sample["intermediate_results"], key=lambda result: result["sde_steps_count"])
        R = torch.stack([first, *[result["rewards"]["avg"] for result in later]], dim=1)
        d_list = list((R[:, 1:] - R[:, :-1]).unbind(1))
        awards = list((final[:, None] - R[:, :-1]).unbind(1))
        s_list = [d.sign() * (final - first).sign() for d in d_list]
        indicator_list = []
        for t, d in enumerate(d_list):
            goes_on = d.sign() * (final - R[:, t + 1]).sign() > 0
            turns = (s_list[t - 1] < 0) & (s_list[t] > 0) if t else s_list[0] > 0
            if config.select_inter_step_only_from_consistent_trajectory:
                turns = turns & goes_on if t else goes_on
            indicator_list.append(turns.double())
        if config.use_balanced_bonus and global_step >= config.turn_on_bonus_global_step:
            ranked = torch.stack(d_list if config.take_delta_global_as_main else awards, 1).flatten()
            mask = torch.stack(indicator_list, 1).flatten() > 0
            sides = [mask & (ranked > 0), mask & (ranked < 0)]
            keep = min(int(side.sum()) for side in sides)
            for side in sides if keep else []:
                order = torch.where(side, ranked.abs(), -1.0).argsort(descending=True, stable=True)
                mask[order[keep : int(side.sum())]] = False
            indicator_list = list(mask.view(len(indicator_list[0]), -1).double().unbind(1))
        chosen = torch.stack(indicator_list, 1) > 0
        sample["process_rewards"] = torch.where(chosen, torch.stack(awards, 1), torch.stack(d_list, 1))
"""
FILES = {
    "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py": STEP,
    "flow_grpo/stat_tracking.py": TRACKER,
    "flow_grpo/diffusers_patch/wan_pipeline_with_logprob.py": WAN,
    "scripts/train_sd3.py": LOSS,
    "scripts/train_wan2_1.py": LOSS.replace("std_dev_t**2", "(std_dev_t * dt_ref)**2"),
    "scripts/my_train_sd3_fast_with_op3.py": LOSS + REWARDS,
}


def stand_in(folder, before="", after=""):
    """Write a stand-in in which `before` is replaced."""
    assert not before or any(before in text for text in FILES.values())
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text.replace(before, after) if before else text)
    return folder


def hold(monkeypatch, capsys, adapter, folder, *options, step="sd3"):
    """Exit code and rows of the command on a stand-in."""
    monkeypatch.setenv("FLOW_GRPO" if adapter == FLOW else "TURNINGPOINT_GRPO", str(folder))
    monkeypatch.setenv("FLOW_GRPO_STEP", step)
    code = main(["--impl", str(adapter), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("adapter, number", [(FLOW, 75), (TURNING, 125)], ids=["flow", "turningpoint"])
def test_a_right_checkout_is_accepted(tmp_path, monkeypatch, capsys, adapter, number):
    """What it does not offer is not checked."""
    modules = set(sys.modules)
    code, rows = hold(monkeypatch, capsys, adapter, stand_in(tmp_path))
    assert [(row["property"], row["meaning"]) for row in rows if row["verdict"] == "FAILS"] == []
    assert code == 0
    assert sum(row["verdict"] == "holds" for row in rows) >= number
    dance = [row for row in rows if row["property"].startswith("dance") and row["function"] == "transition"]
    assert {row["meaning"] for row in dance} == {"not implemented: this checkout's step has no kind dance"}
    assert not [name for name in set(sys.modules) - modules if name.startswith("diffusers")]


FAULTS = {
    "KL without dt": (
        "mean, std\n",
        "mean, (std if sde_type == 'cps' else g)\n",
        "gaussian_kl",
        "loses the factor dt",
    ),
    "guard by equality": (
        "sigma.clamp(max=self.sigmas[1])",
        "torch.where(sigma == 1, self.sigmas[1], sigma)",
        "transition",
        "tests for equality",
    ),
    "step_std without sqrt(dt)": ("g * dt.sqrt()", "g", "transition", "step_std lacks sqrt(dt)"),
    "min for max": ("torch.maximum", "torch.minimum", "clipped_surrogate", "min stands for max"),
    "detached ratio": (
        "ratio = torch.exp(log_prob -",
        "ratio = torch.exp(log_prob.detach() -",
        "clipped_surrogate",
        "the ratio is detached",
    ),  # fmt: skip
    "unbiased std": ("ddof=0", "ddof=1", "group_advantages", "the unbiased one (divided by G - 1)"),
    "ranks by R[n] - R[0]": (
        "else awards, 1)",
        "else [final - first] * len(d_list), 1)",
        "step_rewards",
        "balancing ranks by R[n] - R[0]",
    ),
    "first step never": (
        "else goes_on",
        "else goes_on & False",
        "turning_points",
        "the first step is ignored",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_checkout_is_refused_with_the_fault(tmp_path, monkeypatch, capsys, fault):
    before, after, function, words = FAULTS[fault]
    code, rows = hold(monkeypatch, capsys, TURNING, stand_in(tmp_path, before, after), "--only", function)
    meanings = [row["meaning"] for row in rows if row["verdict"] == "FAILS"]
    assert code == 1
    assert any(words in meaning for meaning in meanings), meanings


def test_a_cps_log_prob_without_its_variance_fails_in_trajectories(tmp_path, monkeypatch, capsys):
    """It is the published one: -(x_next - mean)^2. The rows of `flow` hold."""
    before = "- std.log() - math.log(2 * math.pi) / 2\n"
    after = before + "    log = log if sde_type == 'sde' else -((prev_sample.detach() - mean) ** 2)\n"
    folder = stand_in(tmp_path, before, after)
    _, rows = hold(monkeypatch, capsys, FLOW, folder, "--only", "gaussian_log_prob")
    verdicts = {row["property"]: row["verdict"] for row in rows}
    assert verdicts["log-density of flow trajectories of a linear policy"] == "holds"
    assert verdicts["log-density of cps trajectories of a linear policy"] == "FAILS"
    assert verdicts["cps: change of measure"] == "FAILS"


def test_the_step_of_wan_is_checked_as_dance(tmp_path, monkeypatch, capsys):
    _, rows = hold(monkeypatch, capsys, FLOW, stand_in(tmp_path), step="wan")
    dance = [row for row in rows if "dance" in row["property"] and row["verdict"] != "not checked"]
    assert len(dance) >= 11
    assert {row["verdict"] for row in dance} == {"holds"}
    assert {row["arithmetic"] for row in dance if row["function"] == "transition"} == {"float32"}
    assert {row["property"] for row in rows if row["verdict"] == "FAILS"} == {
        "the default kind is flow",  # without a kind the adapter takes dance
        "flow: step_std is noise_level at sigma = 1",
    }


def test_a_wan_kl_without_dt_is_refused(tmp_path, monkeypatch, capsys):
    folder = stand_in(tmp_path, "(std_dev_t * dt_ref)**2", "std_dev_t**2")
    _, rows = hold(monkeypatch, capsys, FLOW, folder, "--only", "gaussian_kl", step="wan")
    assert any("loses the factor dt" in row["meaning"] for row in rows)


# ---- no checkout, or not all of one


def refusal(adapter):
    """The one line on stderr of the command, without any environment variable of the adapters."""
    run = subprocess.run(
        [sys.executable, "-m", "oracle", "--impl", str(adapter)], cwd=ROOT, capture_output=True, text=True,
        env={"PATH": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (2, "")
    lines = run.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("oracle: ")
    return lines[0]


@pytest.mark.parametrize("adapter, variable", [(FLOW, "FLOW_GRPO"), (TURNING, "TURNINGPOINT_GRPO")])
def test_the_command_refuses_where_no_checkout_is_named(adapter, variable):
    assert f"set {variable} to the folder of a checkout of" in refusal(adapter)


def refused(monkeypatch, capsys, adapter, folder):
    monkeypatch.setenv("FLOW_GRPO" if adapter == FLOW else "TURNINGPOINT_GRPO", str(folder))
    code = main(["--impl", str(adapter)])
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and len(captured.err.splitlines()) == 1
    return captured.err


@pytest.mark.parametrize("adapter", [FLOW, TURNING], ids=["flow", "turningpoint"])
def test_a_missing_or_empty_folder_is_refused(tmp_path, monkeypatch, capsys, adapter):
    folder = tmp_path / "missing"
    assert f"{folder}: there is no such folder" in refused(monkeypatch, capsys, adapter, folder)
    assert f"{tmp_path}: it has no " in refused(monkeypatch, capsys, adapter, tmp_path)


@pytest.mark.parametrize("adapter", [FLOW, TURNING], ids=["flow", "turningpoint"])
@pytest.mark.parametrize(
    "before, after, words",
    [
        ("def sde_step_with_logprob", "def another", "does not define sde_step_with_logprob"),
        ("class PerPrompt", "class Another", "does not define PerPromptStatTracker"),
        ("import numpy as np", "import a_module_that_is_missing", "cannot be imported: ModuleNotFoundError"),
        ("import math", "import math:", "is not Python"),
        ("policy_loss =", "the_loss =", "has no statement that assigns policy_loss"),
        ("kl_loss =", "the_kl =", "has no statement that assigns kl_loss"),
        ("adv_clip_max", "clip_max", "has no statement that clamps advantages"),
        ("import randn_tensor", "import randn_tensor, Used\nUsed()", "Used is a placeholder"),
    ],
)
def test_an_incomplete_checkout_is_refused(tmp_path, monkeypatch, capsys, adapter, before, after, words):
    assert words in refused(monkeypatch, capsys, adapter, stand_in(tmp_path, before, after))


@pytest.mark.parametrize(
    "before, after, words",
    [
        ("d_list = list(", "d_other = list(", "a loop that assigns d_list"),
        ("config.use_balanced_bonus", "balanced", "balances indicator_list"),
    ],
)
def test_a_script_without_turning_points_is_refused(tmp_path, monkeypatch, capsys, before, after, words):
    assert words in refused(monkeypatch, capsys, TURNING, stand_in(tmp_path, before, after))


def test_an_unknown_step_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLOW_GRPO_STEP", "flux")
    assert "FLOW_GRPO_STEP=flux: it must be one of sd3, wan" in refused(
        monkeypatch, capsys, FLOW, stand_in(tmp_path)
    )
