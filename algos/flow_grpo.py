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
    3. One optimiser update per iteration (theirs: two, the second of them off-policy):
       test_one_update_per_iteration.
    4. A group is known by its index, not by its decoded prompt: test_duplicate_prompts_stay_apart.
    5. EMA is updated once per optimiser update, not per micro-batch:
       test_ema_counts_updates_not_micro_batches.
    6. The singularity at sigma = 1 is guarded by sigma > sigma[1], not sigma == 1:
       test_first_step_std_is_the_noise_level.
Left out: classifier-free guidance (the digits have none); several updates per rollout, without which the
ratio stays 1 and the clip has no effect.
"""

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bundle: drop

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim import AdamW

from shared.command import check_args, run_command
from shared.grpo import clipped_surrogate, group_advantages
from shared.policies import make_policy
from shared.prompts import load_prompts, sample_groups
from shared.rewards import make_rewards, score
from shared.rollout import Rollout, rollout, sample_noise
from shared.run import Run, StopSignal
from shared.sde import gaussian_kl, gaussian_log_prob, transition
from shared.training import (
    EMA,
    Evaluation,
    apply_update,
    average,
    gather,
    micro_batches,
    own_groups,
    reward_means,
    timed,
)


@dataclass
class Args:
    """Flow-GRPO: online reinforcement learning of a flow-matching generator (arXiv 2505.05470)."""

    algorithm: ClassVar[str] = "flow_grpo"

    # run
    output_dir: str | None = None
    """Folder of the run (upstream: save_dir). Default: runs/<algorithm>-<model>-<reward>-<seed>-<time>."""
    resume: str | None = None
    """Folder of a run to continue exactly; it needs no other option."""
    seed: int = 0
    """Seed of the prompts' order and of all training noise (upstream: seed)."""
    num_iterations: int = 60
    """Training iterations, one optimiser update each (upstream: num_epochs)."""
    eval_every: int = 2
    """Evaluate every so many iterations, and before the first and after the last (upstream: eval_freq)."""
    eval_samples: int = 400
    """Images of an evaluation: the prompts in turn, with noise that is the same in all runs."""
    eval_steps: int = 20
    """ODE steps of an evaluation (upstream: sample.eval_num_steps)."""
    checkpoint_every: int = 10
    """Save the state every so many iterations, and at the end and on Ctrl-C (upstream: save_freq)."""

    # model
    model: str = "digits"
    """The generator: digits (upstream: pretrained.model)."""

    # sampling
    sampler: Literal["flow", "dance", "cps"] = "flow"
    """Stochastic step: flow (the paper), dance (DanceGRPO), cps (Flow-CPS) (upstream: sample.sde_type)."""
    num_steps: int = 10
    """T: steps of a training trajectory (upstream: sample.num_steps)."""
    noise_level: float = 0.7
    """a: strength of the noise (upstream: sample.noise_level)."""
    sde_window: tuple[int, int] | None = None
    """START STOP: steps START .. STOP-1 are stochastic and trained. Default: all but the last
    (upstream: sample.sde_window_range)."""
    storage_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Trajectories are rounded to and kept in this dtype (upstream: mixed_precision)."""

    # prompts and reward
    prompts: str = "digits"
    """A built-in set (digits) or a file: text, one prompt a line, or .jsonl (upstream: dataset)."""
    num_prompts: int = 8
    """P: prompts, one group each, per iteration over all processes (upstream: num_batches_per_epoch etc.)."""
    group_size: int = 16
    """G: images per prompt (upstream: sample.num_image_per_prompt)."""
    reward: str = "label"
    """label, ink, jpeg, or a weighted sum as "label:1,jpeg:0.5" (upstream: reward_fn)."""
    reward_batch_size: int | None = None
    """Images in one call of the reward. Default: all of an iteration."""

    # algorithm
    advantage_std: Literal["group", "batch", "none"] = "group"
    """Centred rewards are divided by the std of the group, of the batch, or not (upstream: global_std)."""
    ratio: Literal["exact", "per_dim"] = "exact"
    """Log-probabilities of the ratio and the KL: summed over the latent's entries, or averaged, as upstream
    does (clip ranges are then 1e-5 to 1e-3)."""
    clip_range: float = 0.2
    """epsilon: the ratio is clipped to 1 - epsilon .. 1 + epsilon (upstream: train.clip_range). With one
    update per rollout the ratio is 1 and the clip has no effect."""
    beta: float = 0.0
    """beta: weight of the KL to the model before RL (upstream: train.beta)."""

    # optimisation
    learning_rate: float = 4e-4
    """AdamW's learning rate (upstream: train.learning_rate)."""
    weight_decay: float = 1e-4
    """AdamW's weight decay (upstream: train.adam_weight_decay)."""
    adam_eps: float = 1e-15
    """AdamW's epsilon, below the gradients of per_dim, about 1e-8 (upstream: train.adam_epsilon = 1e-8)."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm (upstream: train.max_grad_norm)."""
    ema_decay: float = 0.0
    """Decay of the averaged weights that are evaluated and exported; 0: no average (upstream: train.ema)."""
    micro_batch_size: int | None = None
    """Trajectories in one network call. Default: all of an iteration. It changes the result by rounding only
    (upstream: train.batch_size)."""


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
    step = {"noise_level": args.noise_level, "sigma_clip": sigmas[1], "kind": args.sampler}
    entries = x[0].numel() if args.ratio == "per_dim" else 1
    v = policy.velocity(x, sigmas[k], cond)
    mean, step_std = transition(x, v, sigmas[k], sigmas[k + 1], **step)
    log_prob_new = gaussian_log_prob(x_next, mean, step_std)  # (B,)
    log_prob_old = trajectory.log_prob[:, j]
    per_entry = (log_prob_new / entries, log_prob_old / entries)
    loss, metrics = clipped_surrogate(*per_entry, advantages, args.clip_range)
    metrics["kl"] = None
    if args.beta > 0:
        with torch.no_grad(), policy.reference():
            v_ref = policy.velocity(x, sigmas[k], cond)
        mean_ref, _ = transition(x, v_ref, sigmas[k], sigmas[k + 1], **step)
        kl = (gaussian_kl(mean, mean_ref, step_std) / entries).mean()
        loss = loss + args.beta * kl
        metrics["kl"] = kl.item()
    return loss, metrics | {"loss": loss.item()}


def train(args: Args) -> list[dict]:
    """Train and leave a run folder behind. Returns the metrics of every iteration, as in metrics.jsonl."""
    check_args(args)
    prompts = load_prompts(args.prompts)
    sample_groups(len(prompts), args.num_prompts, args.seed, 0)  # refuses a set that is too small
    accelerator = Accelerator()
    share = own_groups(accelerator, args.num_prompts)
    policy = make_policy(args.model, accelerator.device)
    rewards = make_rewards(args.reward, accelerator.device)
    policy.encode(prompts)  # refuses prompts that the model cannot take
    window = args.sde_window or (0, args.num_steps - 1)
    run = Run(replace(args, sde_window=window), accelerator)

    sigmas, trained_steps = policy.sigmas(args.num_steps), range(*window)
    n = len(trained_steps)
    parameters = [p for p in policy.module.parameters() if p.requires_grad]
    optimizer = AdamW(parameters, args.learning_rate, eps=args.adam_eps, weight_decay=args.weight_decay)
    ema = EMA(policy.module, args.ema_decay)
    policy.module, optimizer = accelerator.prepare(policy.module, optimizer)
    evaluation = Evaluation(policy, prompts, args.eval_samples, args.eval_steps, args.micro_batch_size)
    start = run.restore(policy.module, optimizer, ema)
    if start in (0, args.num_iterations):  # new, or all trained but its end not written
        with ema.applied():
            evaluated = evaluation.run(policy, rewards, args.reward_batch_size)
    if start == 0:
        run.begin(evaluated)
        run.save(0, policy.module, optimizer, ema)

    size = len(share) * args.group_size  # trajectories of this process in an iteration
    first = share[0] * args.group_size  # place of the first of them among those of all processes
    chunks = micro_batches(size, args.micro_batch_size)
    with StopSignal(accelerator) as stop, run.progress(start) as bar:
        for iteration in bar:
            seconds: dict[str, float] = {}
            began = time.perf_counter()
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
            advantages = advantages[share].flatten().to(accelerator.device)  # (size,), of this process

            with timed(seconds, "update"):
                step_metrics = []
                for rows, cond, trajectory in trajectories:
                    for j, k in enumerate(trained_steps):
                        A = advantages[rows]  # (B,)
                        weight = len(A) / (size * n)  # so that the sum is a mean over trajectories and steps
                        last = rows is chunks[-1] and k == trained_steps[-1]
                        if args.beta == 0 and not last and not A.any():
                            continue  # no gradient here; the last one runs always: processes meet there
                        with nullcontext() if last else accelerator.no_sync(policy.module):
                            loss, metrics = step_loss(policy, trajectory, j, k, cond, sigmas, A, args)
                            accelerator.backward(weight * loss)
                        step_metrics.append((weight, metrics))
                grad_norm = apply_update(accelerator, policy.module, optimizer, args.max_grad_norm)
                ema.update()

            eval_reward = None
            if iteration % args.eval_every == 0 or iteration == args.num_iterations:
                with timed(seconds, "evaluate"), ema.applied():
                    evaluated = evaluation.run(policy, rewards, args.reward_batch_size)
                eval_reward = evaluated.rewards.mean().item()

            run.log(
                {
                    "iteration": iteration,
                    "reward_mean": all_rewards.mean().item(),
                    "reward_std": all_rewards.std(correction=0).item(),
                    "eval_reward": eval_reward,
                    **reward_means(accelerator, scores.parts),
                    **average(accelerator, step_metrics),
                    "grad_norm": grad_norm,
                    "seconds": time.perf_counter() - began,
                    "nfe_rows": sum(t.nfe_rows for _, _, t in trajectories) * accelerator.num_processes,
                    "nfe_calls": sum(t.nfe_calls for _, _, t in trajectories) * accelerator.num_processes,
                    "reward_calls": scores.calls * accelerator.num_processes,
                },
                seconds,
            )
            stopping = stop.requested()
            if iteration % args.checkpoint_every == 0 or iteration == args.num_iterations or stopping:
                run.save(iteration, policy.module, optimizer, ema)
            if stopping and iteration < args.num_iterations:
                raise KeyboardInterrupt(f"stopped and saved; continue with --resume {run.folder}")

    run.finish(policy, ema, evaluated)
    return run.history


if __name__ == "__main__":
    run_command(train, Args)
