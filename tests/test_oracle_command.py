"""`python -m oracle` on right implementations in several styles, which it must accept, on wrong ones, which
it must refuse with the sentence that names the fault, and on files that it cannot use."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from oracle import checks
from oracle.__main__ import PROJECT, ROOT, main
from oracle.definitions import DEFINITIONS
from oracle.properties import CONTRACT, PROPERTIES, WRONGS

torch.set_num_threads(1)


def hold(tmp_path, capsys, source, *options):
    """Exit code and JSON rows of the command on a file with this source."""
    path = tmp_path / "implementation.py"
    path.write_text("import math\nimport numpy as np\nimport torch\n" + textwrap.dedent(source))
    code = main(["--impl", str(path), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


# ---- right implementations

STEPS = {
    "coefficients of x and v, float64 throughout": """
        def transition(x, v, sigma, sigma_next, *, noise_level, sigma_clip, kind="flow"):
            dt = sigma_next - sigma
            if kind == "cps":
                std = sigma_next * math.sin(noise_level * math.pi / 2)
                clean, noise = x - sigma * v, x + v * (1 - sigma)
                keep = math.sqrt(max(0, sigma_next**2 - std**2))
                return clean * (1 - sigma_next) + noise * keep, std
            if kind == "flow":
                below = sigma_clip if sigma > sigma_clip else sigma
                g = math.sqrt(sigma / (1 - below)) * noise_level
            else:
                g = noise_level
            mean = x * (1 + g**2 / (2 * sigma) * dt) + v * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
            return mean, g * math.sqrt(-dt)

        def ode_step(x, v, sigma, sigma_next):
            return x + (sigma_next - sigma) * v

        def shifted_sigmas(num_steps, shift=1.0):
            s = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
            return s * shift / (s * shift + 1 - s)
        """,
    "float32 only": """
        def single(*values):
            return [torch.as_tensor(value, dtype=torch.float32) for value in values]

        def transition(x, v, sigma, sigma_next, *, noise_level, sigma_clip, kind="flow"):
            x, v, sigma, after, clip = single(x, v, sigma, sigma_next, sigma_clip)
            dt = sigma - after
            if kind == "cps":
                std = after * torch.sin(torch.tensor(noise_level * math.pi / 2))
                keep = (after**2 - std**2).clamp(min=0).sqrt()
                return (1 - after) * (x - sigma * v) + keep * (x + (1 - sigma) * v), std
            g = torch.tensor(noise_level, dtype=torch.float32)
            if kind == "flow":
                g = g * torch.sqrt(sigma / (1 - torch.where(sigma > clip, clip, sigma)))
            score = -(x + (1 - sigma) * v) / sigma
            return x - (v - g**2 / 2 * score) * dt, g * dt.sqrt()

        def ode_step(x, v, sigma, sigma_next):
            x, v, sigma, after = single(x, v, sigma, sigma_next)
            return x - v * (sigma - after)

        def gaussian_log_prob(x_next, mean, step_std):
            x_next, mean, std = single(x_next, mean, step_std)
            log = -((x_next - mean) ** 2) / (2 * std**2) - std.log() - torch.tensor(2 * math.pi).sqrt().log()
            return log.sum(dim=tuple(range(1, log.ndim)))

        def gaussian_kl(mean, mean_ref, step_std):
            mean, ref, std = single(mean, mean_ref, step_std)
            return ((mean - ref) ** 2).flatten(1).sum(1) / (2 * std**2)

        def shifted_sigmas(num_steps, shift=1.0):
            s = torch.linspace(1, 0, num_steps + 1)
            return shift * s / (1 + (shift - 1) * s)
        """,
    "float32 inside, results in the dtype of x": """
        def transition(x, v, sigma, sigma_next, *, noise_level, sigma_clip, kind="flow"):
            kept, x, v = x.dtype, x.float(), v.float()
            dt = float(sigma) - float(sigma_next)
            if kind == "cps":
                turn = noise_level * math.pi / 2
                clean, noise = x - sigma * v, x + v * (1 - sigma)
                mean = clean * (1 - sigma_next) + noise * sigma_next * math.cos(turn)
                return mean.to(kept), torch.tensor(sigma_next * math.sin(turn)).to(kept)
            ratio = sigma / (1 - min(sigma, sigma_clip)) if kind == "flow" else 1.0
            std = noise_level * math.sqrt(ratio * dt)
            mean = x - v * dt - std**2 / (2 * sigma) * (x + v * (1 - sigma))
            return mean.to(kept), torch.tensor(std).to(kept)

        def gaussian_log_prob(x_next, mean, step_std):
            z = (x_next.float() - mean.float()) / float(step_std)
            constant = math.log(float(step_std)) + math.log(2 * math.pi) / 2
            return -(z.square() / 2 + constant).flatten(1).sum(1)

        def gaussian_kl(mean, mean_ref, step_std):
            return (mean.float() - mean_ref.float()).div(float(step_std)).square().flatten(1).sum(1).div(2)
        """,
    "numpy scalars for step_std": """
        def transition(x, v, sigma, sigma_next, *, noise_level, sigma_clip, kind="flow"):
            s, after = np.float64(sigma), np.float64(sigma_next)
            dt, eps_hat = s - after, x + float(1 - s) * v
            if kind == "cps":
                std = after * np.sin(noise_level * np.pi / 2)
                lost = after - np.sqrt(np.maximum(after**2 - std**2, 0))
                return x - v * float(dt) - float(lost) * eps_hat, std
            ratio = s / (1 - np.minimum(s, sigma_clip)) if kind == "flow" else np.float64(1)
            g = noise_level * np.sqrt(ratio)
            drift = v + float(g**2 / (2 * s)) * eps_hat
            return x - drift * float(dt), g * np.sqrt(dt)

        def gaussian_log_prob(x_next, mean, step_std):
            normal = torch.distributions.Normal(mean, float(step_std))
            return normal.log_prob(x_next).reshape(len(mean), -1).sum(-1)

        def gaussian_kl(mean, mean_ref, step_std):
            p, q = (torch.distributions.Normal(m, float(step_std)) for m in (mean, mean_ref))
            return torch.distributions.kl_divergence(p, q).reshape(len(mean), -1).sum(-1)
        """,
    "sigmas as tensors only, one std a sample": """
        def transition(x, v, sigma, sigma_next, *, noise_level, sigma_clip, kind="flow", generator=None):
            shape = (len(x),) + (1,) * (x.dim() - 1)
            sigma, after, clip = (s.expand(len(x)).view(shape) for s in (sigma, sigma_next, sigma_clip))
            dt = sigma - after
            if kind == "cps":
                std = after * math.sin(noise_level * math.pi / 2)
                return (1 - after) * (x - sigma * v) + (after**2 - std**2).clamp(min=0).sqrt() * (
                    x + (1 - sigma) * v
                ), std
            g = noise_level * torch.ones_like(dt)
            if kind == "flow":
                g = g * torch.sqrt(sigma / (1 - sigma.minimum(clip)))
            return x - (v + g.square() / (2 * sigma) * (x + (1 - sigma) * v)) * dt, g * dt.sqrt()

        def gaussian_log_prob(x_next, mean, step_std, reduce=True):
            log = -(x_next - mean).square() / (2 * step_std.square()) - step_std.log()
            return (log - math.log(2 * math.pi) / 2).flatten(1).sum(1)

        def gaussian_kl(mean, mean_ref, step_std):
            return ((mean - mean_ref) / step_std).square().flatten(1).sum(1) / 2
        """,
    "float64 with the constant in float32, state detached": """
        LOG_ROOT = torch.log(torch.sqrt(2 * torch.as_tensor(math.pi)))

        def gaussian_log_prob(x_next, mean, step_std):
            log = -((x_next.detach() - mean) ** 2) / (2 * step_std**2) - math.log(step_std) - LOG_ROOT
            return log.sum(dim=tuple(range(1, log.ndim)))

        def gaussian_kl(mean, mean_ref, step_std):
            return ((mean - mean_ref.detach()) ** 2 / (2 * step_std**2)).sum(dim=tuple(range(1, mean.ndim)))
        """,
}
LEARNING = {
    "loops and PPO's min": """
        def group_advantages(rewards, std="group", eps=1e-4, clamp=5.0):
            out = torch.empty(rewards.shape, dtype=torch.float64)
            flat = rewards.reshape(*rewards.shape[:2], -1).double()
            for j in range(flat.shape[2]):
                for p in range(flat.shape[0]):
                    group = flat[p, :, j] - flat[p, 0, j]  # equal rewards become 0 exactly
                    centred = group - group.mean()
                    scale = (group if std == "group" else flat[:, :, j]).std(unbiased=False)
                    divided = centred if std == "none" else centred / (scale + eps)
                    out.view(flat.shape)[p, :, j] = divided.clip(-clamp, clamp)
            return out

        def clipped_surrogate(log_prob_new, log_prob_old, advantages, clip_range, weights=None, log=False):
            log_prob_old, advantages = log_prob_old.detach(), advantages.detach()
            ratio = (log_prob_new - log_prob_old).exp()
            objective = torch.min(ratio * advantages, ratio.clip(1 - clip_range, 1 + clip_range) * advantages)
            if weights is not None:
                objective = objective * weights.detach()
            return -objective.mean(), {"ratio": ratio.mean().item()}

        def sequence_weight(log_prob_old, log_prob_off):
            return (log_prob_old - log_prob_off).exp().prod(dim=-1)
        """,
    "float32 only": """
        def group_advantages(rewards, std="group", eps=1e-4, clamp=5.0):
            r = rewards.to(torch.float32)
            mean = r.mean(dim=1, keepdim=True)
            if std == "none":
                scale = 1.0
            else:
                dims = (1,) if std == "group" else (0, 1)
                scale = r.var(dim=dims, keepdim=True, correction=0).sqrt() + eps
            flat = (r == r[:, :1]).all(dim=1, keepdim=True)
            return torch.where(flat, torch.zeros_like(r), (r - mean) / scale).clamp(-clamp, clamp)

        def clipped_surrogate(log_prob_new, log_prob_old, advantages, clip_range, weights=None):
            new, old, A = log_prob_new.float(), log_prob_old.detach().float(), advantages.detach().float()
            ratio = torch.exp(new - old)
            loss = torch.maximum(-A * ratio, -A * torch.clamp(ratio, 1.0 - clip_range, 1.0 + clip_range))
            w = torch.ones_like(A) if weights is None else weights.detach().float()
            return (w * loss).sum() / loss.numel(), {}

        def sequence_weight(log_prob_old, log_prob_off):
            return (log_prob_old.float() - log_prob_off.float()).sum(1).exp()
        """,
}
TURNING = {
    "loops": """
        def incremental_rewards(R):
            return torch.diff(R, dim=-1)

        def turning_points(R, rule="consistent", tolerance=0.0):
            def sgn(d):
                return 0 if abs(d) <= tolerance else (1 if d > 0 else -1)

            def one(r):
                n, total, out = len(r) - 1, sgn(r[-1] - r[0]), []
                for j in range(1, n + 1):
                    step, rest = sgn(r[j] - r[j - 1]), sgn(r[n] - r[j])
                    if j == 1:
                        out.append(step * rest == 1 if rule == "consistent" else step * total == 1)
                    else:
                        turn = sgn(r[j - 1] - r[j - 2]) * total == -1 and step * total == 1
                        out.append(turn and (rule == "trend" or step == rest))
                return out

            rows = [one(row) for row in R.reshape(-1, R.shape[-1]).tolist()]
            return torch.tensor(rows).reshape(R.shape[:-1] + (R.shape[-1] - 1,))

        def balance(mask, r_agg):
            pairs = zip(mask.flatten().tolist(), r_agg.flatten().tolist())
            entries = [(abs(a), -i, i, a > 0) for i, (m, a) in enumerate(pairs) if m]
            up, down = (sorted((e for e in entries if e[3] == side), reverse=True) for side in (True, False))
            k = min(len(up), len(down)) or len(entries)
            kept = torch.zeros(mask.numel(), dtype=torch.bool)
            for *_, i, _ in up[:k] + down[:k]:
                kept[i] = True
            return kept.reshape(mask.shape)

        def step_rewards(R, rule="consistent", balanced=True, tolerance=0.0):
            points, award = turning_points(R, rule, tolerance), R[..., -1:] - R[..., :-1]
            points = balance(points, award) if balanced else points
            return incremental_rewards(R) + points * (award - incremental_rewards(R))
        """,
    "float32 only": """
        def incremental_rewards(R):
            return R.float()[..., 1:] - R.float()[..., :-1]

        def turning_points(R, rule="consistent", tolerance=0.0):
            R = R.float()
            def sgn(d):
                return d.sign() * (d.abs() > tolerance)
            d, rest = sgn(R[..., 1:] - R[..., :-1]), sgn(R[..., -1:] - R[..., 1:])
            total = sgn(R[..., -1:] - R[..., :1])
            before = torch.cat([-total, d[..., :-1]], dim=-1)  # the first step turns against nothing
            turn = (before * total < 0) & (d * total > 0)
            if rule == "trend":
                return turn
            go_on = d * rest > 0
            return torch.cat([go_on[..., :1], (turn & go_on)[..., 1:]], dim=-1)
        """,
}
RIGHT = {
    f"{part}: {name}": source
    for part, group in (("steps", STEPS), ("learning", LEARNING), ("turning", TURNING))
    for name, source in group.items()
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_implementations_are_accepted(tmp_path, capsys, name):
    code, rows = hold(tmp_path, capsys, RIGHT[name])
    assert [(row["property"], row["meaning"]) for row in rows if row["verdict"] == "FAILS"] == []
    assert code == 0
    assert sum(row["verdict"] == "holds" for row in rows) >= 15
    if "float32" in name:
        assert "float32" in {row["arithmetic"] for row in rows}


def test_the_definitions_hold():
    rows = checks.examine(DEFINITIONS, PROPERTIES, WRONGS)
    assert {row.verdict for row in rows} == {"holds"}


# ---- wrong implementations

FLOW = """
def transition(x, v, sigma, sigma_next, *, noise_level, sigma_clip, kind="flow"):
    dt = sigma - sigma_next
    eps_hat, x0_hat = x + (1 - sigma) * v, x - sigma * v
    if kind == "cps":
        std = sigma_next * math.sin(noise_level * math.pi / 2)
        keep = math.sqrt(max(sigma_next**2 - std**2, 0))
        return (1 - sigma_next) * x0_hat + keep * eps_hat, std
    below = sigma_clip if sigma > sigma_clip else sigma
    g = noise_level * math.sqrt(sigma / (1 - below)) if kind == "flow" else noise_level
    drift = v + g**2 / (2 * sigma) * eps_hat
    mean = x - drift * dt
    return mean, g * math.sqrt(dt)
"""
LOG_PROB = """
def gaussian_log_prob(x_next, mean, step_std):
    log = -((x_next - mean) ** 2) / (2 * step_std**2) - math.log(step_std) - 0.5 * math.log(2 * math.pi)
    return log.flatten(1).sum(1)
"""
KL = """
def gaussian_kl(mean, mean_ref, step_std):
    return ((mean - mean_ref) ** 2 / (2 * step_std**2)).flatten(1).sum(1)
"""
ADVANTAGES = """
def group_advantages(rewards, std="group", eps=1e-4, clamp=5.0):
    rewards = rewards.double()
    equal = (rewards == rewards[:, :1]).all(1, keepdim=True)
    A = rewards - rewards.mean(1, keepdim=True)
    if std == "group":
        A = A / (rewards.std(1, keepdim=True, unbiased=False) + eps)
    if std == "batch":
        A = A / (rewards.std((0, 1), keepdim=True, unbiased=False) + eps)
    return A.masked_fill(equal, 0.0).clamp(-clamp, clamp)
"""
SURROGATE = """
def clipped_surrogate(log_prob_new, log_prob_old, advantages, clip_range, weights=None):
    A, old = advantages.detach(), log_prob_old.detach()
    w = 1.0 if weights is None else weights.detach()
    ratio = torch.exp(log_prob_new - old)
    clipped = torch.clamp(ratio, 1 - clip_range, 1 + clip_range)
    return (w * torch.max(-A * ratio, -A * clipped)).mean(), {}
"""
POINTS = """
def turning_points(R, rule="consistent", tolerance=0.0):
    def sgn(d):
        return torch.where(d.abs() <= tolerance, 0.0, d.sign())
    d, n = sgn(R[..., 1:] - R[..., :-1]), R.shape[-1] - 1
    total = sgn(R[..., -1:] - R[..., :1])
    rest = sgn(R[..., -1:] - R[..., 1:])
    out = torch.zeros(d.shape, dtype=torch.bool)
    for j in range(1, n):
        out[..., j] = (d[..., j - 1] * total[..., 0] < 0) & (d[..., j] * total[..., 0] > 0)
    if rule == "consistent":
        out &= d * rest > 0
        out[..., 0] = d[..., 0] * rest[..., 0] > 0
    else:
        out[..., 0] = d[..., 0] * total[..., 0] > 0
    return out
"""
AWARDS = (
    POINTS
    + """
def balance(mask, r_agg):
    kept, up, down = mask.clone(), mask & (r_agg > 0), mask & (r_agg < 0)
    spare = int(up.sum()) - int(down.sum())
    if not up.any() or not down.any():
        return mask
    side = up if spare > 0 else down
    places = side.flatten().nonzero().flatten().tolist()
    values = r_agg.flatten().tolist()
    for i in sorted(places, key=lambda i: (abs(values[i]), -i))[:abs(spare)]:
        kept.view(-1)[i] = False
    return kept

def step_rewards(R, rule="consistent", balanced=True, tolerance=0.0):
    award, d = R[..., -1:] - R[..., :-1], R[..., 1:] - R[..., :-1]
    points = turning_points(R, rule, tolerance)
    kept = balance(points, award) if balanced else points
    return torch.where(kept, award, d)
"""
)
WEIGHT = """
def sequence_weight(log_prob_old, log_prob_off):
    return (log_prob_old - log_prob_off).sum(1).exp()
"""
GRID = """
def shifted_sigmas(num_steps, shift=1.0):
    s = 1 - torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
    return shift * s / (1 + (shift - 1) * s)
"""
ODE = """
def ode_step(x, v, sigma, sigma_next):
    return x - v * (sigma - sigma_next)
"""
DEFAULT_LEVEL = """def transition(x, v, sigma, sigma_next, *, noise_level, **rest):
    return right(x, v, sigma, sigma_next, noise_level=noise_level or 0.7, **rest)

def right("""
RIGHT_ONES = (FLOW, LOG_PROB, KL, ADVANTAGES, SURROGATE, POINTS, AWARDS, WEIGHT, GRID, ODE)
WRONG = [  # source, what is replaced, by what, a part of the sentence that must name it
    (
        FLOW,
        "return mean, g * math.sqrt(dt)",
        "return mean, g",
        "step_std lacks sqrt(dt): KL and log-prob are off by the step size",
    ),
    (FLOW, "return mean, g * math.sqrt(dt)", "return mean, g * dt", "step_std has dt in place of sqrt(dt)"),
    (FLOW, "sigma > sigma_clip", "sigma == 1", "the guard at sigma = 1 tests for equality"),
    (FLOW, "sigma > sigma_clip", "abs(sigma - 1) < 1e-5", "the guard at sigma = 1 fires next to 1 only"),
    (
        FLOW,
        "below = sigma_clip if sigma > sigma_clip else sigma",
        "below = min(sigma, 0.9999999)",
        "sigma_clip is not used",
    ),
    (
        FLOW,
        "below = sigma_clip if sigma > sigma_clip else sigma",
        "below = sigma_clip",
        "sigma_clip is used at every step",
    ),
    (
        FLOW,
        "math.sqrt(sigma / (1 - below))",
        "math.sqrt(below / (1 - below))",
        "sigma_clip also replaces sigma in the numerator",
    ),
    (FLOW, "mean = x - drift * dt", "mean = x + drift * dt", None),
    (FLOW, "drift = v + g**2", "drift = v - g**2", "the drift correction has the wrong sign"),
    (FLOW, "g**2 / (2 * sigma)", "g**2 / sigma", "lacks the 1/2"),
    (FLOW, "g**2 / (2 * sigma) * eps_hat", "(g**2 * dt) / (2 * sigma) * eps_hat", "contains dt twice"),
    (FLOW, "g**2 / (2 * sigma) * eps_hat", "g**2 / (2 * sigma) * x", "must act on x + (1 - sigma) v"),
    (FLOW, "std = sigma_next *", "std = sigma *", "cps: step_std has sigma in place of sigma_next"),
    (
        FLOW,
        "keep = math.sqrt(max(sigma_next**2 - std**2, 0))",
        "keep = sigma_next - std",
        "must be sqrt(sigma_next^2 - step_std^2)",
    ),
    (FLOW, "noise_level * math.pi / 2", "noise_level", "the pi / 2 in the sine is missing"),
    (
        FLOW,
        "def transition(",
        DEFAULT_LEVEL,
        "'not given'",
    ),
    (
        FLOW,
        "return mean, g * math.sqrt(dt)",
        "return mean, max(g * math.sqrt(dt), 1e-3)",
        "step_std has a lower bound",
    ),
    (FLOW, "drift = v +", "drift = v.detach() +", None),
    (FLOW, "return mean, g", "return mean.detach(), g", "no gradient flows into the mean"),
    (LOG_PROB, ".sum(1)", ".mean(1)", "log_prob is the mean over the entries"),
    (LOG_PROB, " - 0.5 * math.log(2 * math.pi)", "", "lacks the normalising constant log(2 pi) / 2"),
    (LOG_PROB, " - math.log(step_std)", "", "lacks -log(step_std)"),
    (LOG_PROB, "(2 * step_std**2)", "step_std**2", "lacks the 1/2"),
    (
        LOG_PROB,
        "    log = -(",
        "    step_std = step_std**0.5\n    log = -(",
        "step_std is used as the variance",
    ),
    (LOG_PROB, "(x_next - mean)", "(x_next - mean.detach())", "no gradient flows through the mean"),
    (KL, "(2 * step_std**2)", "(2 * step_std**2 / 0.1)", "loses the factor dt (here 0.1)"),
    (KL, "(2 * step_std**2)", "step_std**2", "the KL lacks the 1/2"),
    (KL, "(2 * step_std**2)", "(2 * step_std)", "it must be divided by step_std^2"),
    (KL, ".sum(1)", ".mean(1)", "the KL is the mean over the entries"),
    (ADVANTAGES, "unbiased=False", "unbiased=True", "the std is the unbiased one"),
    (
        ADVANTAGES,
        "rewards.mean(1, keepdim=True)",
        "rewards.mean((0, 1), keepdim=True)",
        "the mean is that of the whole batch",
    ),
    (ADVANTAGES, "rewards.std(1, keepdim", "rewards.std(0, keepdim", "the std runs over the prompts"),
    (ADVANTAGES, " + eps", "", "eps is missing"),
    (ADVANTAGES, ".clamp(-clamp, clamp)", "", "the advantages are not clamped"),
    (ADVANTAGES, ".clamp(-clamp, clamp)", ".clamp(max=clamp)", "the clamp holds on the positive side only"),
    (ADVANTAGES, ".masked_fill(equal, 0.0)", "", "it must get exactly 0"),
    (
        SURROGATE,
        "torch.exp(log_prob_new - old)",
        "torch.exp(log_prob_new - old).detach()",
        "the ratio is detached",
    ),
    (SURROGATE, "torch.max(", "torch.min(", "min stands for max"),
    (SURROGATE, "log_prob_new - old", "old - log_prob_new", "old and new are swapped"),
    (
        SURROGATE,
        "torch.clamp(ratio, 1 - clip_range, 1 + clip_range)",
        "torch.clamp(ratio, max=1 + clip_range)",
        "clipped from above only",
    ),
    (SURROGATE, "torch.clamp(ratio, 1 - clip_range, 1 + clip_range)", "ratio", "there is no clip"),
    (SURROGATE, "torch.max(-A * ratio, -A * clipped)", "(-A * clipped)", "only the clipped ratio is used"),
    (SURROGATE, "weights.detach()", "weights", "gradient flows through the weights"),
    (SURROGATE, "advantages.detach()", "advantages", "gradient flows through the advantages"),
    (SURROGATE, "log_prob_old.detach()", "log_prob_old", "gradient flows through log_prob_old"),
    (SURROGATE, "(w * torch.max", "(torch.max", "the weights are ignored"),
    (
        SURROGATE,
        "ratio = torch.exp(log_prob_new - old)",
        "ratio, w = w * torch.exp(log_prob_new - old), 1.0",
        "the weights stand inside the clip",
    ),
    (SURROGATE, ".mean(), {}", ".sum(), {}", "the loss is the sum over the samples"),
    (POINTS, "out[..., 0] = d[..., 0] * rest[..., 0] > 0", "out[..., 0] = False", None),
    (POINTS, "    return out\n", "    out[..., 0] = False\n    return out\n", "the first step is ignored"),
    (
        POINTS,
        "    return out\n",
        "    out[..., -1] = True\n    return out\n",
        "the last step is always a turning point",
    ),
    (
        POINTS,
        "rest = sgn(R[..., -1:] - R[..., 1:])",
        "rest = sgn(R[..., -1:] - R[..., :-1])",
        "it must be R[n] - R[j]",
    ),
    (
        POINTS,
        "d[..., j - 1] * total[..., 0] < 0",
        "d[..., j - 1] * total[..., 0] <= 0",
        "a flat step counts as one against the trend",
    ),
    (POINTS, "d.abs() <= tolerance, 0.0, d.sign()", "d == 0, 0.0, d.sign()", "the tolerance is ignored"),
    (
        AWARDS,
        "return torch.where(kept, award, d)",
        "return torch.where(kept, award, torch.where(points, 0 * d, d))",
        "a dropped turning point gets 0",
    ),
    (
        AWARDS,
        "balance(points, award)",
        "balance(points, (R[..., -1:] - R[..., :1]).expand_as(d))",
        "balancing ranks by R[n] - R[0]",
    ),
    (AWARDS, "award, d = R[..., -1:] - R[..., :-1]", "award, d = R[..., -1:] - R[..., 1:]", None),
    (AWARDS, "(abs(values[i]), -i)", "(values[i], -i)", None),
    (AWARDS, "(abs(values[i]), -i)", "(-abs(values[i]), -i)", "the smallest awards are kept"),
    (WEIGHT, "log_prob_old - log_prob_off", "log_prob_off - log_prob_old", "the weight is inverted"),
    (WEIGHT, ".sum(1)", ".mean(1)", "the geometric mean"),
    (
        WEIGHT,
        "(log_prob_old - log_prob_off)",
        "(log_prob_old - log_prob_off)[:, 1:]",
        "the first step of the prefix is left out",
    ),
    (WEIGHT, ".exp()", ".exp().clamp(max=1)", "the weight is capped at 1"),
    (
        GRID,
        "shift * s / (1 + (shift - 1) * s)",
        "(shift * s / (1 + (shift - 1) * s)).flip(0)",
        "it must fall from 1 to 0",
    ),
    (ODE, "x - v *", "x + v *", "the sign of dt is wrong"),
    (ODE, "return x - v * (sigma - sigma_next)", "x -= v * (sigma - sigma_next)\n    return x", None),
]


def test_the_sources_that_the_wrong_ones_depart_from_are_right(tmp_path, capsys):
    code, rows = hold(tmp_path, capsys, "\n".join(RIGHT_ONES))
    assert code == 0 and sum(row["verdict"] == "holds" for row in rows) >= 170


@pytest.mark.parametrize(("source", "old", "new", "words"), WRONG, ids=range(len(WRONG)))
def test_wrong_implementations_are_refused_by_name(tmp_path, capsys, source, old, new, words):
    assert old in source
    code, rows = hold(tmp_path, capsys, source.replace(old, new))
    meanings = [row["meaning"] for row in rows if row["verdict"] == "FAILS"]
    assert code == 1 and meanings
    if words is not None:
        assert words in max(meanings, key=meanings.count), meanings


def test_a_kl_that_loses_dt_between_two_functions_is_named(tmp_path, capsys):
    source = (
        FLOW.replace("dt = sigma - sigma_next", "dt = STATE.dt = sigma - sigma_next")
        + """
class STATE:
    dt = 1.0

def gaussian_kl(mean, mean_ref, step_std):
    g = step_std / math.sqrt(STATE.dt)
    return ((mean - mean_ref) ** 2 / (2 * g**2)).flatten(1).sum(1)
"""
    )
    code, rows = hold(tmp_path, capsys, source)
    assert code == 1
    assert sum("divides by g^2 and so loses the factor dt" in row["meaning"] for row in rows) >= 3


NAIVE = (
    SURROGATE.replace("def clipped_surrogate", "def right_surrogate")
    + """
OFF = []

def sequence_weight(log_prob_old, log_prob_off):
    OFF.append(log_prob_off)
    return torch.ones(len(log_prob_off), dtype=log_prob_off.dtype)

def clipped_surrogate(log_prob_new, log_prob_old, advantages, clip_range, weights=None):
    off = OFF.pop() if OFF else None
    if off is not None and len(off) == len(log_prob_old):
        log_prob_old = torch.cat([off, log_prob_old[:, off.shape[1] :]], 1)
    return right_surrogate(log_prob_new, log_prob_old, advantages, clip_range, weights)
"""
)
REPLAYED = {
    "the naive ratio p_theta/p_off stands in the clip": NAIVE,
    "all weights are 1: replayed samples are not corrected": SURROGATE
    + WEIGHT.replace("(log_prob_old - log_prob_off)", "(0 * log_prob_off)"),
    "the weights stand inside the clip": WEIGHT
    + SURROGATE.replace("torch.exp(log_prob_new - old)", "w * torch.exp(log_prob_new - old)").replace(
        "(w * torch.max", "(torch.max"
    ),
}


@pytest.mark.parametrize("words", REPLAYED)
def test_wrong_corrections_of_replayed_samples_are_named(tmp_path, capsys, words):
    """By the loss and gradient that both functions make together, at every prefix where the clip bites."""
    code, rows = hold(tmp_path, capsys, REPLAYED[words] + FLOW + LOG_PROB)
    meanings = [row["meaning"] for row in rows if "where the clip bites" in row["property"]]
    assert code == 1 and len(meanings) == 3 and all(words in meaning for meaning in meanings), meanings
    assert any(words in row["meaning"] for row in rows if "samples replayed for 1 of 2" in row["property"])


def test_named_wrong_versions_fail_and_differ():
    """Each fails a property of its function alone, and no two of a function measure the same."""
    seen = {}
    for wrong in WRONGS:
        functions = checks.version(wrong)
        concerned = [p for p in PROPERTIES if p.quick and set(wrong.functions) == set(p.needs)]
        outcomes = [checks.measure(p, functions) for p in concerned]
        assert not all(outcome.holds for outcome in outcomes), wrong.sentence
        for other, others in seen.get(tuple(wrong.functions), []):
            pairs = zip(outcomes, others, strict=True)
            assert any(differ(one, two) for one, two in pairs), f"{wrong.sentence} / {other}"
        seen.setdefault(tuple(wrong.functions), []).append((wrong.sentence, outcomes))


def differ(one, two):
    """Whether two outcomes of a property differ by more than rounding."""
    if one.measured is None or two.measured is None:
        return (one.measured is None) != (two.measured is None)
    a, b = one.measured.observed, two.measured.observed
    return a.shape != b.shape or not torch.allclose(a, b, rtol=1e-8, atol=1e-14, equal_nan=True)


def test_every_property_is_needed_by_its_function():
    assert len(PROPERTIES) >= 60
    assert {p.function for p in PROPERTIES} == set(CONTRACT)
    assert len({str(p) for p in PROPERTIES}) == len(PROPERTIES)
    assert all(p.function in p.needs and p.equation for p in PROPERTIES)


# ---- the command line


FUNCTIONS_OF = {  # the files that may be absent
    "algos/op_grpo.py": ("sequence_weight",),
    "shared/ctmc.py": ("MixturePath", "MetricPath", "transition_log_prob", "sample_step"),
    "algos/dflow_grpo.py": ("mc_log_ratio", "aggregate", "posterior_kl"),
}


def test_this_project_holds(capsys):
    assert main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    unchecked = {row["function"] for row in rows if row["verdict"] == "not checked"}
    absent = [names for path, names in FUNCTIONS_OF.items() if not (ROOT / path).exists()]
    assert set(FUNCTIONS_OF) < set(PROJECT) and unchecked == {name for names in absent for name in names}


def test_the_command_in_a_process_of_its_own(tmp_path):
    path = tmp_path / "weight.py"
    path.write_text("print('noise of the file')\n" + WEIGHT.replace(".sum(1)", ".mean(1)"))
    command = [sys.executable, "-m", "oracle", "--impl", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["function", "property", "deviation", "tolerance", "verdict"]
    assert "    -> the weight is the geometric mean of the steps': it must be their product" in lines
    assert lines[-1].startswith(f"{len(PROPERTIES)} properties: ") and "lacks transition" in lines[-1]
    assert "noise of the file" not in done.stdout and "noise of the file" in done.stderr


UNUSABLE = {
    "missing": (None, "there is no such file"),
    "syntax": ("def transition(:\n", "it cannot be imported: SyntaxError"),
    "import": ("import a_module_that_is_not_there\n", "it cannot be imported: ModuleNotFoundError"),
    "exit": ("raise SystemExit(0)\n", "it cannot be imported: SystemExit"),
    "lines": ("raise ValueError('two\\nlines')\n", "ValueError: two lines"),
    "empty": ("x = 1\n", "none of the contract's functions is defined"),
    "value": ("transition = 3\n", "none of the contract's functions is defined"),
    "binary": ("\x00\x01", "it cannot be imported"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_files_give_one_line_and_exit_code_2(tmp_path, capsys, name):
    source, words = UNUSABLE[name]
    path = tmp_path / "file.py"
    if source is not None:
        path.write_text(source)
    assert main(["--impl", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err
    assert err.startswith("oracle: ") and len(err.splitlines()) == 1


def test_a_folder_or_another_kind_of_file_is_unusable(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("transition")
    for path in (tmp_path, tmp_path / "notes.txt"):
        assert main(["--impl", str(path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_only(tmp_path, capsys):
    code, rows = hold(tmp_path, capsys, KL + LOG_PROB.replace(".sum(1)", ".mean(1)"), "--only", "gaussian_kl")
    assert code == 0 and {row["function"] for row in rows} == {"gaussian_kl"}
    code, rows = hold(tmp_path, capsys, KL, "--only", "equal means")
    assert code == 0 and [row["property"] for row in rows] == ["equal means give 0"]
    assert main(["--only", "no such words"]) == 2
    assert main(["--impl", str(tmp_path / "implementation.py"), "--only", "transition"]) == 2
    assert "nothing to check" in capsys.readouterr().err


def test_list(capsys):
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(PROPERTIES)
    assert main(["--list", "--json", "--only", "balance"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {entry["function"] for entry in listed} <= {"balance", "step_rewards"} and listed[0]["equation"]


def test_a_raising_function_fails_with_its_reason(tmp_path, capsys):
    code, rows = hold(tmp_path, capsys, "def balance(mask, r_agg):\n    raise KeyError('x')\n")
    assert code == 1
    assert {row["meaning"] for row in rows if row["verdict"] == "FAILS"} == {"raised KeyError: 'x'"}


def test_a_sampler_that_is_not_implemented_is_not_checked(tmp_path, capsys):
    source = FLOW.replace(
        'if kind == "cps":',
        'if kind == "dance":\n        raise NotImplementedError(kind)\n    if kind == "cps":',
    )
    code, rows = hold(tmp_path, capsys, source, "--only", "transition")
    assert code == 0
    found = {row["verdict"]: row["meaning"] for row in rows if "dance" in row["property"]}
    assert found == {"not checked": "not implemented: dance"}
    assert {row["verdict"] for row in rows if "cps" in row["property"]} == {"holds"}


ADAPTER = """
import math
import torch
from their_code import sde_step

def transition(x, v, sigma, sigma_next, *, noise_level, sigma_clip, kind="flow"):
    if kind != "flow":
        raise NotImplementedError(kind)
    _, _, mean, std_dev_t = sde_step(v, x, sigma, sigma_next, eta=noise_level, sigma_max=sigma_clip)
    return mean, std_dev_t * math.sqrt(sigma - sigma_next)

def gaussian_log_prob(x_next, mean, step_std):
    x, v = mean, torch.zeros_like(mean)
    _, per_entry, _, _ = sde_step(v, x, 0.5, 0.25, prev_sample=x_next, mean=mean, std=float(step_std))
    return per_entry * mean[0].numel()
"""
THEIR_CODE = """
import math
import torch

def sde_step(output, sample, sigma, sigma_prev, eta=0.7, sigma_max=1.0, prev_sample=None, mean=None, std=0):
    dt = sigma_prev - sigma
    std_dev_t = math.sqrt(sigma / (1 - (sigma_max if sigma == 1 else sigma))) * eta
    if mean is None:
        mean = sample * (1 + std_dev_t**2 / (2 * sigma) * dt)
        mean = mean + output * (1 + std_dev_t**2 * (1 - sigma) / (2 * sigma)) * dt
    std = torch.tensor(std or std_dev_t * math.sqrt(-dt), dtype=torch.float64)
    if prev_sample is None:
        prev_sample = mean + std * torch.randn_like(mean)
    log_prob = -((prev_sample.detach() - mean) ** 2) / (2 * std**2) - std.log() - math.log(2 * math.pi) / 2
    return prev_sample, log_prob.flatten(1).mean(1), mean, std_dev_t
"""


def test_an_adapter_for_other_signatures(tmp_path, capsys):
    """The code reports g in place of a std and averages its log-probability: the adapter puts both right. It
    guards sigma = 1 by an equality: the oracle finds that."""
    (tmp_path / "their_code.py").write_text(THEIR_CODE)
    code, rows = hold(tmp_path, capsys, ADAPTER)
    failures = {row["property"]: row["meaning"] for row in rows if row["verdict"] == "FAILS"}
    assert code == 1 and set(failures) == {
        f"flow: first step from sigma = {s}" for s in ("0.999999", "0.999")
    }
    assert all("the guard at sigma = 1 tests for equality" in meaning for meaning in failures.values())
    assert sum(row["verdict"] == "holds" for row in rows) > 25


def test_the_oracle_shares_no_code_with_what_it_checks():
    for path in (ROOT / "oracle").glob("*.py"):
        lines = [line.split() for line in Path(path).read_text().splitlines()]
        imported = [words[1].split(".")[0] for words in lines if words[:1] in (["import"], ["from"])]
        assert not {"shared", "algos"} & set(imported), path
