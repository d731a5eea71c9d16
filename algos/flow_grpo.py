"""Flow-GRPO: GRPO for flow-matching generators, by sampling the flow's ODE as an SDE (arXiv 2505.05470).

    python algos/flow_grpo.py                                    # the embedded digits, reward `label`
    python algos/flow_grpo.py --reward ink --num-iterations 100
    python algos/flow_grpo.py --resume runs/RUN

This is the baseline that the other algorithms of this folder change. An iteration:
    1. rollout    for each of P prompts sample G images with stochastic steps; keep each state, its log-prob
    2. reward     score the final images
    3. advantage  A = (r - mean of the group) / std: better or worse than the same prompt's other images
    4. update     raise the probability of every step of the better trajectories, within PPO's clip range

Symbols
    paper               here              shape         range
    x_t, t              x, sigma          (B, *E), ()   sigma in [0, 1]: 1 = noise, 0 = data
    v_theta             v                 (B, *E)       velocity dx/dsigma, from data to noise
    a                   noise_level       ()            (0, inf)
    T                   num_steps         ()            2, 3, ..
    G                   group_size        ()            2, 3, ..
    R(x_0, c)           rewards           (P, G)        any
    A^i                 advantages        (P, G)        [-5, 5]
    r_t^i(theta)        ratio             (B,)          (0, inf); exactly 1 before the first update
    epsilon             clip_range        ()            (0, inf)
    beta                beta              ()            [0, inf)

Differs from the authors' code in
    1. The KL divides by the variance of the step, dt included (theirs, for SD3, lacks dt):
       test_kl_is_the_divergence.
    2. The state is rounded to its storage dtype before its log-probability, so that ratio == 1 exactly before
       the first update: test_ratio_is_one_before_the_first_update.
    3. Every optimiser update takes all trajectories of the iteration, and there is one by default (theirs:
       two, of half of them each, the second off-policy): test_updates_per_rollout.
    4. A group is known by its index, not by its decoded prompt: test_duplicate_prompts_stay_apart.
    5. EMA is updated once per optimiser update, not per micro-batch:
       test_ema_counts_updates_not_micro_batches.
    6. The singularity at sigma = 1 is guarded by sigma > sigma[1], not sigma == 1:
       test_first_step_std_is_the_noise_level.
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
from shared.prompts import sample_groups
from shared.rewards import score
from shared.rollout import Rollout, rollout, sample_noise, step_moments
from shared.run import Run
from shared.sde import gaussian_kl, gaussian_log_prob
from shared.training import apply_update, average, gather, micro_batches, prepare, set_up, timed


@dataclass
class Args(FlowArgs):
    """Flow-GRPO: online reinforcement learning of a flow-matching generator (arXiv 2505.05470)."""

    algorithm: ClassVar[str] = "flow_grpo"

    # groups
    num_prompts: int = 8
    """P: prompts, one group each, per iteration over all processes (upstream: num_batches_per_epoch etc.)."""
    group_size: int = 16
    """G: images per prompt (upstream: sample.num_image_per_prompt)."""

    # algorithm
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


def step_loss(
    policy, trajectory: Rollout, j: int, k: int, cond: dict, sigmas: Tensor, advantages: Tensor, args: Args
):
    """The paper's objective at one trained step of B trajectories, as a loss: the mean over the
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
    check_flow_args(args)
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
                    storage_dtype=getattr(torch, args.storage_dtype),
                )  # fmt: skip
                trajectories.append((rows, cond, trajectory))
                images.append(policy.decode(trajectory.final).cpu())

        with timed(seconds, "reward"):
            scores = score(rewards, torch.cat(images), texts, args.reward_batch_size)
            all_rewards = gather(accelerator, scores.total).view(-1, args.group_size)  # (P, G)

        advantages = group_advantages(all_rewards, args.advantage_std)  # (P, G)
        trained = int((advantages != 0).sum()) * n * args.updates_per_rollout  # steps with a signal
        advantages = advantages[share].flatten().to(accelerator.device)  # (size,), of this process

        with timed(seconds, "update"):
            step_metrics, grad_norms = [], []
            for update in range(args.updates_per_rollout):
                for rows, cond, trajectory in trajectories:
                    for j, k in enumerate(trained_steps):
                        A = advantages[rows]  # (B,)
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
            **average(accelerator, step_metrics),
            "grad_norm": sum(grad_norms) / len(grad_norms),
        }
        run.log(all_rewards, scores, [t for _, _, t in trajectories], metrics, seconds)

    run.finish()
    return run.history


if __name__ == "__main__":
    run_command(train, Args)
