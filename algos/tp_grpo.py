"""TurningPoint-GRPO: each step gets the reward it earned, and more at turning points (arXiv 2602.06422).

    python algos/tp_grpo.py                                      # the embedded digits, reward `label`
    python algos/tp_grpo.py --reward ink --rule trend --no-balanced
    python algos/tp_grpo.py --resume runs/RUN

Flow-GRPO gives the final image's reward to every step alike, although a good trajectory contains bad steps.
Here each state of the trajectory is also completed by the ODE, without further noise, and the completed
images are scored: R[0..n]. A step's reward is the change that it made, R[j] - R[j-1]. A turning point is a
step that turns the trajectory to the direction in which it then ends; since it shaped everything after it, it
gets the whole remaining change, R[n] - R[j-1].

Differs from Flow-GRPO in
    1. `rollout` also completes each state before a stochastic step; all n + 1 images are scored.
    2. `step_rewards` turns R (P, G, n+1) into one reward per step (P, G, n).
    3. Advantages are normalised within the group step by step, and each step is trained with its own.

Symbols
    paper               here              shape         range
    R(x_0)              R[n]              (P, G)        any: reward of the trajectory's own image
    R(x_t^ODE)          R[j]              (P, G)        any: reward after j stochastic steps and the ODE
    r_t (Eq. 7)         d[j]              (P, G)        R[j] - R[j-1], j = 1 .. n; they add up to R[n] - R[0]
    s_t                 s[j]              (P, G)        sign(d[j]) sign(R[n] - R[0]) in {-1, 0, 1}
    r_t^agg (Eq. 8)     r_agg[j]          (P, G)        R[n] - R[j-1]
In code the step j = 1 .. n has index j - 1 in tensors of n steps. Other symbols: algos/flow_grpo.py.

Differs from the authors' code in
    1. R[0] completes the trajectory's own initial noise (theirs: other noise):
       test_baseline_shares_the_initial_noise.
    2. Balancing ranks turning points by the reward they are awarded, r_agg (theirs: R[n] - R[0]), over the
       whole batch (theirs: each process's sampling batch): test_balance_keeps_the_largest_awards.
    3. The final image is scored once, so that the last step is never a consistent turning point, also with a
       reward that jitters (theirs: scored twice): test_last_step_is_never_a_consistent_turning_point.
    4. A state's first ODE evaluation is shared with its stochastic step, and completions go down the grid
       together: 55 network evaluations a sample at T = 10 in place of 64: test_wavefront_counts.
    5. All that algos/flow_grpo.py lists.
Left out: propagation of turning points (off in the published run).
"""

import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bundle: drop

import torch
from torch import Tensor

from shared.args import FlowArgs, check_flow_args
from shared.command import run_command
from shared.evaluation import ode_evaluation
from shared.grpo import clipped_surrogate, group_advantages
from shared.pictures import save_turning_points
from shared.prompts import sample_groups
from shared.rewards import score
from shared.rollout import Rollout, rollout, sample_noise, step_moments
from shared.run import Run
from shared.sde import gaussian_kl, gaussian_log_prob
from shared.training import apply_update, average, gather, micro_batches, prepare, set_up, timed


@dataclass
class Args(FlowArgs):
    """TurningPoint-GRPO: a reward for every step, from ODE completions (arXiv 2602.06422)."""

    algorithm: ClassVar[str] = "tp_grpo"

    # groups
    num_prompts: int = 8
    """P: prompts, one group each, per iteration over all processes (upstream: num_batches_per_epoch etc.)."""
    group_size: int = 16
    """G: images per prompt (upstream: sample.num_image_per_prompt)."""

    # algorithm
    rule: Literal["consistent", "trend"] = "consistent"
    """Which steps are turning points: Definition 5.1 (consistent), as in the published run, or 4.1 (trend)
    (upstream: select_inter_step_only_from_consistent and select_first_step_only_from_consistent)."""
    balanced: bool = True
    """Keep equally many turning points of positive and of negative reward (upstream: use_balanced_bonus)."""
    reward_tolerance: float = 0.0
    """Reward differences up to this count as 0 in the rule, for rewards that jitter between calls."""
    completion_batch_size: int | None = None
    """Rows of one network call that completes trajectories. Default: all that a grid step has."""
    advantage_std: Literal["group", "batch", "none"] = "group"
    """Centred rewards are divided by the std of the group, of the batch, or not (upstream: global_std)."""
    ratio: Literal["exact", "per_dim"] = "exact"
    """Log-probabilities of the ratio and the KL: summed over the latent's entries, or averaged, as upstream
    does (clip ranges are then 1e-5 to 1e-3)."""
    clip_range: float = 0.2
    """epsilon: the ratio is clipped to 1 - epsilon .. 1 + epsilon (upstream: train.clip_range). With one
    update per rollout the ratio is 1 and the clip has no effect."""
    updates_per_rollout: int = 1
    """Optimiser updates on the trajectories of an iteration, each with all of them
    (upstream: train.num_inner_epochs)."""
    beta: float = 0.0
    """beta: weight of the KL to the model before RL (upstream: train.beta)."""


def incremental_rewards(R: Tensor) -> Tensor:
    """What each step changed: d[j] = R[j] - R[j-1], j = 1 .. n (Eq. 7).

    R: (..., n+1), rewards of the ODE completions after 0 .. n stochastic steps. Returns (..., n).
    """
    return R[..., 1:] - R[..., :-1]  # Eq. (7)


def turning_points(R: Tensor, rule: str = "consistent", tolerance: float = 0.0) -> Tensor:
    """Which steps turn the trajectory to the direction in which it ends.

    With s[j] = sign(d[j]) sign(R[n] - R[0]), +1 where step j agrees with the overall trend:
        trend       j >= 2: s[j-1] < 0 and s[j] > 0                              (Definition 4.1)
                    j  = 1: s[1] > 0
        consistent  as trend for j >= 2, and sign(d[j]) sign(R[n] - R[j]) > 0    (Definition 5.1)
                    j  = 1: sign(d[1]) sign(R[n] - R[1]) > 0
    A consistent turning point is followed by more change in its direction, so |R[n] - R[j-1]| > |d[j]|; the
    last step, followed by none, is never one. sign(0) = 0 (our choice, the paper has no rule for ties): a
    turn across a step that changes nothing is no turning point.

    R: (..., n+1). rule: "consistent" or "trend". tolerance: |differences| up to it have sign 0.
    Returns bool (..., n). Raises ValueError for an unknown rule.
    """
    if rule not in ("consistent", "trend"):
        raise ValueError(f'rule must be "consistent" or "trend", not {rule!r}')

    def sign(difference: Tensor) -> Tensor:
        return torch.where(difference.abs() <= tolerance, 0, difference.sign())

    d = sign(incremental_rewards(R))  # (..., n)
    s = d * sign(R[..., -1:] - R[..., :1])
    follows = (
        d * sign(R[..., -1:] - R[..., 1:]) > 0
    )  # what follows step j keeps its direction; false at j = n
    points = torch.zeros_like(d, dtype=torch.bool)
    points[..., 1:] = (s[..., :-1] < 0) & (s[..., 1:] > 0)
    if rule == "trend":
        points[..., 0] = s[..., 0] > 0
    else:
        points &= follows
        points[..., 0] = follows[..., 0]
    return points


def balance(mask: Tensor, r_agg: Tensor) -> Tensor:
    """Keep equally many turning points with positive and with negative reward (App. D).

    The side with more of them loses those of smallest |r_agg|; of equal ones the later in the batch. If one
    side is empty, all stay. The scope is the whole tensor, which is the global batch (our choice: the result
    does not depend on the number of processes). mask, r_agg: equal shapes. Returns bool, a subset of mask.
    """
    positive, negative = mask & (r_agg > 0), mask & (r_agg < 0)
    keep = min(int(positive.sum()), int(negative.sum()))
    if keep == 0:
        return mask
    kept = (mask & (r_agg == 0)).flatten()
    for side in (positive, negative):
        size = torch.where(side, r_agg.abs(), -1.0).flatten()
        kept[size.sort(descending=True, stable=True).indices[:keep]] = True
    return kept.view(mask.shape)


def step_rewards(
    R: Tensor, rule: str = "consistent", balanced: bool = True, tolerance: float = 0.0
) -> Tensor:
    """The reward of every step: r_agg[j] = R[n] - R[j-1] (Eq. 8) at turning points, d[j] elsewhere.

    R: (..., n+1). Returns (..., n). A turning point that balancing drops gets d[j]. Adding a constant to R
    changes nothing; a positive factor scales the result; negating R negates it.
    """
    r_agg = R[..., -1:] - R[..., :-1]  # Eq. (8)
    points = turning_points(R, rule, tolerance)
    if balanced:
        points = balance(points, r_agg)
    return torch.where(points, r_agg, incremental_rewards(R))


def step_loss(
    policy, trajectory: Rollout, j: int, k: int, cond: dict, sigmas: Tensor, advantages: Tensor, args: Args
):
    """The clipped GRPO objective at one trained step of B trajectories, as a loss: the mean over the
    trajectories.

        loss = mean( max(-A ratio, -A clip(ratio, 1 - epsilon, 1 + epsilon)) + beta KL(policy || reference) )

    j: index among the trained steps; k: its index in the grid sigmas (N+1,). advantages: (B,).
    Returns the loss () with its gradient, and metrics as floats; kl is None where beta = 0: not computed.
    """
    x, x_next = trajectory.latents[:, j], trajectory.latents[:, j + 1]  # (B, *E)
    step = {"noise_level": args.noise_level, "kind": args.sampler}
    entries = x[0].numel() if args.ratio == "per_dim" else 1
    mean, step_std = step_moments(policy, x, k, cond, sigmas, **step)
    log_prob_new = gaussian_log_prob(x_next, mean, step_std)  # (B,)
    log_prob_old = trajectory.log_prob[:, j]
    per_entry = (log_prob_new / entries, log_prob_old / entries)
    loss, metrics = clipped_surrogate(*per_entry, advantages, args.clip_range)
    metrics["kl"] = None
    if args.beta > 0:
        with torch.no_grad(), policy.reference():
            mean_ref, _ = step_moments(policy, x, k, cond, sigmas, **step)
        kl = (gaussian_kl(mean, mean_ref, step_std) / entries).mean()
        loss = loss + args.beta * kl
        metrics["kl"] = kl.item()
    return loss, metrics | {"loss": loss.item()}


def train(args: Args) -> list[dict]:
    """Train and leave a run folder behind. Returns the metrics of every iteration, as in metrics.jsonl."""
    tolerance, limit = args.reward_tolerance, args.completion_batch_size
    own = {"reward_tolerance": (0 <= tolerance < float("inf"), "0 or more")}
    check_flow_args(args, **own, completion_batch_size=(limit is None or limit >= 1, "at least 1"))
    accelerator, prompts, eval_prompts, share, policy, rewards = set_up(args)
    window = args.sde_window or (0, args.num_steps - 1)
    run = Run(replace(args, sde_window=window), accelerator)

    sigmas, trained_steps = policy.sigmas(args.num_steps), range(*window)
    n = len(trained_steps)
    optimizer, ema = prepare(accelerator, policy, args)
    evaluation = ode_evaluation(policy, eval_prompts, args)
    run.start(policy, rewards, optimizer, ema, evaluation)

    size = len(share) * args.group_size  # trajectories of this process in an iteration
    first = share[0] * args.group_size  # place of the first of them among those of all processes
    chunks = micro_batches(size, args.micro_batch_size)
    for iteration in run.iterations():
        seconds: dict[str, float] = {}
        groups = sample_groups(len(prompts), args.num_prompts, args.seed, iteration - 1)
        texts = [prompts[groups[p]] for p in share for _ in range(args.group_size)]  # (size,)

        with timed(seconds, "rollout"):
            trajectories, images = [], []
            for rows in chunks:
                cond = policy.encode(texts[rows])
                samples = range(first, first + size)[rows]
                noise = sample_noise(policy, args.seed, iteration, samples, 1 + n)
                trajectory = rollout(
                    policy, noise, cond, sigmas, window, noise_level=args.noise_level, kind=args.sampler,
                    storage_dtype=getattr(torch, args.storage_dtype), with_completions=True,
                    completion_batch_size=args.completion_batch_size,
                )  # fmt: skip
                trajectories.append((rows, cond, trajectory))
                images.append(policy.decode(trajectory.completions.flatten(0, 1)).cpu())
            images = torch.cat(images)  # (size (n+1), 3, H, W), trajectory by trajectory

        with timed(seconds, "reward"):
            repeated = [text for text in texts for _ in range(n + 1)]
            scores = score(rewards, images, repeated, args.reward_batch_size)
            R = gather(accelerator, scores.total).view(-1, args.group_size, n + 1)  # (P, G, n+1)

        per_step = step_rewards(R, args.rule, args.balanced, args.reward_tolerance)  # (P, G, n)
        advantages = group_advantages(per_step, args.advantage_std)  # (P, G, n)
        trained = int((advantages != 0).sum()) * args.updates_per_rollout  # steps with a signal
        advantages = advantages[share].flatten(0, 1).to(accelerator.device)  # (size, n), of this process
        points = turning_points(R, args.rule, args.reward_tolerance)  # (P, G, n)
        awarded = balance(points, R[..., -1:] - R[..., :-1]) if args.balanced else points

        with timed(seconds, "update"):
            step_metrics, grad_norms = [], []
            for update in range(args.updates_per_rollout):
                for rows, cond, trajectory in trajectories:
                    for j, k in enumerate(trained_steps):
                        A = advantages[rows, j]  # (B,)
                        part = len(A) / (size * n)  # so that the sum is a mean over trajectories and steps
                        last = rows is chunks[-1] and k == trained_steps[-1]
                        if args.beta == 0 and not last and not A.any():
                            continue  # no gradient here; the last one runs always: processes meet there
                        with nullcontext() if last else accelerator.no_sync(policy.module):
                            loss, metrics = step_loss(policy, trajectory, j, k, cond, sigmas, A, args)
                            accelerator.backward(part * loss)
                        if update > 0:
                            del metrics["ratio_deviation"]  # of interest where the ratio must be 1
                        step_metrics.append((part, metrics))
                grad_norms.append(apply_update(accelerator, policy.module, optimizer, args.max_grad_norm))
                ema.update()

        metrics = {
            "trained_steps": trained,
            "turning_points": awarded.float().mean().item(),
            **average(accelerator, step_metrics),
            "grad_norm": sum(grad_norms) / len(grad_norms),
        }
        final = scores._replace(parts={name: r[n :: n + 1] for name, r in scores.parts.items()})
        run.log(R[..., -1], final, [t for _, _, t in trajectories], metrics, seconds)
        if iteration == 1 and accelerator.is_main_process:
            drawn = [values[share].flatten(0, 1) for values in (R, points, awarded)]  # of this process
            drawn += [images.unflatten(0, (size, n + 1)), texts, sigmas[window[0] : window[1] + 1]]
            save_turning_points(run.folder / "turning_points.png", *drawn)

    run.finish()
    return run.history


if __name__ == "__main__":
    run_command(train, Args)
