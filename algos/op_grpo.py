"""OP-GRPO: replay the best trajectories of earlier iterations, with a correction (arXiv 2604.04142).

    python algos/op_grpo.py                                      # the embedded digits, reward `next`
    python algos/op_grpo.py --reward label --no-correction
    python algos/op_grpo.py --resume runs/RUN

Where success is rare, most groups of Flow-GRPO contain none, their rewards are all equal, and nothing is
learned. Here the best trajectory of each prompt is kept and replayed in later groups of that prompt. Three
policies are involved: `off`, which sampled the stored trajectory; `old`, the policy at the start of the
iteration; and `theta` (new), which is being optimised.

Differs from Flow-GRPO in
    1. Replay: `ReplayBuffer` keeps the best fresh trajectory of each prompt; its reward decays with age. The
       group of a prompt that has one is hybrid: G - m fresh trajectories and m replayed ones.
    2. Truncation: a stored trajectory is followed down to a step; from there `old` samples m new ends, and
       the new final images are scored. Late steps have small std, so that their log-weights vary most.
    3. Correction: the ratio under the clip stays theta / old, at replayed steps too; the whole loss of a
       replayed trajectory is multiplied by the constant w = p_old / p_off, `sequence_weight`.
    4. Several updates per rollout, so that the ratio moves and the clip acts.

Symbols
    paper               here              shape         range
    tau_off             Replay.latents    (p+1, *E)     states before and after the p replayed steps
    p_off               log_prob_off      (B, p)        log-probability of these steps when they were sampled
    t_off               truncate_at       ()            p / n: share of the n trained steps that is replayed
    w(tau)              weights           (B,)          (0, max_weight]; exactly 1 for fresh trajectories
    m                   replays_per_group ()            1 .. G - 1
Other symbols: algos/flow_grpo.py.

E_off[w f(tau)] = E_old[f(tau)] for every f, which the oracle shows, if w has no cap and storage is
unselected. But the best of a group is selected, and training on a replay raises its own p_old / p_off:
`max_weight` = 1 bounds that.
No code of the authors is public. Our choices, measured in the README: m, t_off, decay and cap; not measured:
a reward below 0 decays downwards; a group's statistics include its replays.
Left out: a correction in windows that start below sigma = 1.
"""

import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bundle: drop

import torch
from torch import Tensor

from shared.args import FlowArgs, check_flow_args
from shared.command import run_command
from shared.errors import InputError
from shared.evaluation import ode_evaluation
from shared.grpo import clipped_surrogate, group_advantages, weight_metrics
from shared.pictures import save_replay
from shared.prompts import sample_groups
from shared.rewards import score
from shared.rollout import Rollout, all_moments, log_weight_variance, rollout, sample_noise, step_moments
from shared.run import Run
from shared.sde import gaussian_kl, gaussian_log_prob
from shared.training import apply_update, average, gather, micro_batches, prepare, set_up, timed


@dataclass
class Args(FlowArgs):
    """OP-GRPO: replay of the best trajectories, corrected for being off-policy (arXiv 2604.04142)."""

    algorithm: ClassVar[str] = "op_grpo"
    model: str = "digits-faithful"
    reward: str = "next"
    num_iterations: int = 200
    eval_every: int = 10
    learning_rate: float = 5e-4

    # groups
    num_prompts: int = 8
    """P: prompts, one group each, per iteration over all processes."""
    group_size: int = 4
    """G: images per prompt."""

    # replay
    hybrid_fraction: float = 1.0
    """Largest share of the groups that replay; 0 is Flow-GRPO."""
    hybrid_source: Literal["dataset", "buffer"] = "dataset"
    """dataset: an iteration's prompts that have a stored trajectory replay it. buffer: up to half of the
    groups draw their prompt from the buffer, for sets so large that prompts do not come back."""
    replays_per_group: int | None = None
    """m: replayed trajectories in a hybrid group. Default: a quarter of the group, at least 1."""
    buffer_capacity: int = 512
    """Stored trajectories, one a prompt; the one of lowest decayed reward leaves."""
    reward_decay: float = 0.95
    """A stored reward counts decay^age times, age in iterations, when a fresh one is compared with it."""
    decay: bool = True
    """Ablation of --reward-decay: --no-decay lets a stored reward keep its worth."""
    truncate_at: float = 0.6
    """t_off: the share of the trained steps that is replayed; the rest is sampled anew."""
    truncation: bool = True
    """Ablation of --truncate-at: --no-truncation replays all trained steps; the m replays are then the
    same."""
    correction: bool = True
    """Ablation of the weight: --no-correction gives replayed trajectories the weight 1."""
    naive_ratio: bool = False
    """Ablation: the ratio theta / off under the clip at replayed steps, and no weight."""
    max_weight: float | None = None
    """Largest weight of a replayed trajectory; inf: any. Default: 1 with --ratio exact, inf with per_dim."""

    # algorithm
    advantage_std: Literal["group", "batch", "none"] = "group"
    """Centred rewards are divided by the std of the group, of the batch, or not."""
    ratio: Literal["exact", "per_dim"] = "exact"
    """Log-probabilities of ratio, weight and KL: summed over the latent's entries, or averaged."""
    clip_range: float = 0.2
    """epsilon: the ratio is clipped to 1 - epsilon .. 1 + epsilon (upstream: train.clip_range)."""
    updates_per_rollout: int = 4
    """Optimiser updates on the trajectories of an iteration, each with all of them."""
    beta: float = 0.0
    """beta: weight of the KL to the model before RL."""


class Replay(NamedTuple):
    """A stored trajectory down to the truncation step, on the CPU, in the storage dtype."""

    prompt: int  # its index among the prompts
    reward: float  # of the image that it led to
    iteration: int  # in which it was sampled
    latents: Tensor  # (p+1, *E) states before and after its first p stochastic steps
    log_prob: Tensor  # (p,) log p_off of these steps, summed over E


class ReplayBuffer:
    """The best trajectory of each prompt, at most `capacity` of them. decay: per iteration, in (0, 1]."""

    def __init__(self, capacity: int, decay: float):
        self.capacity, self.decay = capacity, decay
        self.entries: dict[int, Replay] = {}

    def worth(self, entry: Replay, iteration: int) -> float:
        """The decayed reward of an entry: r decay^age, or r - (1 - decay^age) |r| for any sign of r."""
        return entry.reward - (1 - self.decay ** (iteration - entry.iteration)) * abs(entry.reward)

    def offer(self, new: Replay) -> None:
        """Store a trajectory, unless its prompt has one worth as much. Of too many, the least goes.

        A reward of 0 does not decay: a stored failure stays, with a falling weight, until a better one comes.
        """
        old = self.entries.get(new.prompt)
        if old is not None and new.reward <= self.worth(old, new.iteration):
            return
        self.entries[new.prompt] = new
        if len(self.entries) > self.capacity:
            least = min(self.entries.values(), key=lambda entry: self.worth(entry, new.iteration))
            del self.entries[least.prompt]

    def sample(self, k: int, generator: torch.Generator) -> list[Replay]:
        """k entries of different prompts, uniformly; all of them if there are fewer."""
        entries = list(self.entries.values())
        return [entries[i] for i in torch.randperm(len(entries), generator=generator)[:k].tolist()]

    def age(self, iteration: int) -> float:
        """Mean age of the entries in iterations."""
        return sum(iteration - entry.iteration for entry in self.entries.values()) / len(self.entries)

    def state_dict(self) -> dict:
        return {"entries": [entry._asdict() for entry in self.entries.values()]}

    def load_state_dict(self, state: dict) -> None:
        self.entries = {entry["prompt"]: Replay(**entry) for entry in state["entries"]}


def hybrid_groups(
    groups: list[int], buffer: ReplayBuffer, most: int, source: str, generator: torch.Generator
) -> tuple[list[int], list[Replay | None]]:
    """The prompts of an iteration's P groups and what each of them replays, None for a group that does not.

    groups: the prompts that the data set offers. At most `most` groups replay. source "dataset": the first of
    `groups` that have an entry; "buffer": prompts drawn from the buffer, in place of the last of `groups`.
    """
    if source == "dataset":
        known = [prompt for prompt in groups if prompt in buffer.entries][:most]
        return groups, [buffer.entries[prompt] if prompt in known else None for prompt in groups]
    drawn = buffer.sample(most, generator)
    others = [prompt for prompt in groups if prompt not in {replay.prompt for replay in drawn}]
    fresh = others[: len(groups) - len(drawn)]
    return [replay.prompt for replay in drawn] + fresh, drawn + [None] * len(fresh)


def sequence_weight(log_prob_old: Tensor, log_prob_off: Tensor) -> Tensor:
    """The weight of a replayed trajectory, w = prod over its replayed steps of p_old / p_off.

    For trajectories sampled by `off` down to the last of these steps and by `old` after it, E[w f] = E_old[f]
    for every f of the whole trajectory, provided that which ones were stored does not depend on them.

    log_prob_old, log_prob_off: (B, p), of the same reduction. Returns (B,), exactly 1 where both agree.
    """
    return (log_prob_old - log_prob_off).sum(dim=1).exp()


class Batch(NamedTuple):
    """The B trajectories of one network call."""

    rows: slice  # their places among those of this process
    cond: dict[str, Tensor]
    trajectory: Rollout  # its log_prob is log p_old, of replayed steps too
    log_prob_off: Tensor  # (B, p) log p_off; of fresh trajectories log p_old, since `old` sampled them
    weights: Tensor  # (B,) sequence_weight, float64; exactly 1 for fresh trajectories
    replayed: Tensor  # (B,) bool


def hybrid_rollout(policy, replays, rows, noise, cond, sigmas, window, prefix, args: Args) -> Batch:
    """A rollout of B trajectories; those with a Replay, not None, in `replays` follow it for `prefix`
    steps."""
    replayed = torch.tensor([replay is not None for replay in replays], device=noise.device)
    stored, followed = [replay for replay in replays if replay is not None], None
    if stored:
        states = torch.stack([replay.latents for replay in stored]).to(noise.device)  # (R, p+1, *E)
        followed = (replayed.nonzero()[:, 0], states)
    trajectory = rollout(
        policy, noise, cond, sigmas, window, noise_level=args.noise_level, kind=args.sampler,
        storage_dtype=getattr(torch, args.storage_dtype), replayed=followed,
    )  # fmt: skip
    log_prob_old = trajectory.log_prob[:, :prefix]
    log_prob_off = log_prob_old.clone()
    if stored:
        log_prob_off[replayed] = torch.stack([replay.log_prob for replay in stored]).to(noise.device)
    entries = noise[0, 0].numel() if args.ratio == "per_dim" else 1
    weights = sequence_weight(log_prob_old.double() / entries, log_prob_off.double() / entries)
    return Batch(rows, cond, trajectory, log_prob_off, weights, replayed)


def step_loss(
    policy, batch: Batch, j: int, k: int, sigmas: Tensor, advantages: Tensor, weights: Tensor, args: Args
):
    """The paper's objective at one trained step of B trajectories, as a loss: the mean over the trajectories.

        loss = mean( w (max(-A ratio, -A clip(ratio, 1 - epsilon, 1 + epsilon)) + beta KL(policy || ref)) )

    with ratio = p_theta / p_old, or p_theta / p_off with --naive-ratio. j: index among the trained steps; k:
    its index in the grid sigmas (N+1,). advantages, weights: (B,).
    Returns the loss () with its gradient; metrics as floats, None where not computed; and of the steps that
    have an advantage how many are outside the clip range, and how many there are, (3, 2): those that `old`
    sampled; the replayed ones by p_theta / p_old, and by p_theta / p_off.
    """
    x, x_next = batch.trajectory.latents[:, j], batch.trajectory.latents[:, j + 1]  # (B, *E)
    step = {"noise_level": args.noise_level, "kind": args.sampler}
    entries = x[0].numel() if args.ratio == "per_dim" else 1
    mean, step_std = step_moments(policy, x, k, batch.cond, sigmas, **step)
    log_prob_new = gaussian_log_prob(x_next, mean, step_std) / entries  # (B,)
    log_prob_old = log_prob_off = batch.trajectory.log_prob[:, j] / entries
    replayed = torch.zeros_like(batch.replayed)
    if j < batch.log_prob_off.shape[1]:
        log_prob_off, replayed = batch.log_prob_off[:, j] / entries, batch.replayed
    compared = log_prob_off if args.naive_ratio else log_prob_old
    loss, metrics = clipped_surrogate(log_prob_new, compared, advantages, args.clip_range, weights)
    metrics["kl"] = None
    if args.beta > 0:
        with torch.no_grad(), policy.reference():
            mean_ref, _ = step_moments(policy, x, k, batch.cond, sigmas, **step)
        kl = gaussian_kl(mean, mean_ref, step_std) / entries
        loss = loss + args.beta * (weights * kl).mean()
        metrics["kl"] = kl.mean().item()
    counts, trained = [], advantages != 0
    for log_prob, rows in ((log_prob_old, ~replayed), (log_prob_old, replayed), (log_prob_off, replayed)):
        outside = (torch.exp(log_prob_new.detach() - log_prob) - 1).abs()[rows & trained] > args.clip_range
        counts.append([int(outside.sum()), len(outside)])
    return loss, metrics | {"loss": loss.item()}, torch.tensor(counts, dtype=torch.float64)


def train(args: Args) -> list[dict]:
    """Train and leave a run folder behind. Returns the metrics of every iteration, as in metrics.jsonl."""
    P, G = args.num_prompts, args.group_size
    m = max(1, G // 4) if args.replays_per_group is None else args.replays_per_group
    fraction = args.hybrid_fraction
    hybrid = int(fraction * P + 1e-9) if 0 <= fraction <= 1 else 0  # groups that may replay
    if args.hybrid_source == "buffer":
        hybrid = min(hybrid, P // 2)  # or prompts that are not stored would starve
    check_flow_args(
        args,
        hybrid_fraction=(fraction == 0 or hybrid > 0, "0, or enough for at least one group, and at most 1"),
        replays_per_group=(1 <= m < G, "at least 1 and below --group-size"),
        buffer_capacity=(args.buffer_capacity >= 1, "at least 1"),
        reward_decay=(0 < args.reward_decay <= 1, "above 0 and at most 1"),
        truncate_at=(0 < args.truncate_at <= 1, "above 0 and at most 1"),
        max_weight=(args.max_weight is None or args.max_weight > 0, "above 0"),
    )
    window = args.sde_window or (0, args.num_steps - 1)
    if window[0] > 0 and hybrid and args.correction and not args.naive_ratio:
        why = "no weight corrects for the unknown density of a state that ODE steps led to"
        raise InputError(f"--sde-window: {why}: START must be 0, or give --no-correction")
    accelerator, prompts, eval_prompts, share, policy, rewards = set_up(args)
    default = 1.0 if args.ratio == "exact" else float("inf")
    cap = default if args.max_weight is None else args.max_weight
    run = Run(replace(args, sde_window=window, replays_per_group=m, max_weight=cap), accelerator)
    if args.ratio == "exact" and cap == float("inf") and accelerator.is_main_process:
        print("warning: --max-weight inf: exact weights grow without bound in long runs", file=sys.stderr)

    sigmas, trained_steps = policy.sigmas(args.num_steps), range(*window)
    n = len(trained_steps)
    prefix = max(1, round(args.truncate_at * n)) if args.truncation else n  # replayed steps
    buffer = ReplayBuffer(args.buffer_capacity, args.reward_decay if args.decay else 1.0)
    optimizer, ema = prepare(accelerator, policy, args)
    evaluation = ode_evaluation(policy, eval_prompts, args)
    run.start(policy, rewards, optimizer, ema, evaluation, buffer)

    size, first = len(share) * G, share[0] * G  # trajectories of this process; place of the first among all
    chunks = micro_batches(size, args.micro_batch_size)
    step = {"noise_level": args.noise_level, "kind": args.sampler}
    for iteration in run.iterations():
        seconds: dict[str, float] = {}
        groups = sample_groups(len(prompts), P, args.seed, iteration - 1)
        generator = torch.Generator().manual_seed(2**40 + args.seed * 1_000_003 + iteration)
        groups, stored = hybrid_groups(groups, buffer, hybrid, args.hybrid_source, generator)
        texts = [prompts[groups[p]] for p in share for _ in range(G)]  # (size,)
        replays = [[stored[p] if i >= G - m else None for i in range(G)] for p in range(P)]
        replayed = torch.tensor([[replay is not None for replay in group] for group in replays])  # (P, G)

        with timed(seconds, "rollout"):
            batches, images = [], []
            own = [replay for p in share for replay in replays[p]]  # (size,)
            for rows in chunks:
                cond = policy.encode(texts[rows])
                noise = sample_noise(policy, args.seed, iteration, range(first, first + size)[rows], 1 + n)
                batch = hybrid_rollout(policy, own[rows], rows, noise, cond, sigmas, window, prefix, args)
                batches.append(batch)
                images.append(policy.decode(batch.trajectory.final).cpu())

        with timed(seconds, "reward"):
            scores = score(rewards, torch.cat(images), texts, args.reward_batch_size)
            all_rewards = gather(accelerator, scores.total).view(P, G)

        advantages = group_advantages(all_rewards, args.advantage_std)  # (P, G)
        trained = int((advantages != 0).sum()) * n * args.updates_per_rollout  # steps with a signal
        advantages = advantages[share].flatten().to(accelerator.device)  # (size,), of this process
        raw = gather(accelerator, torch.cat([batch.weights for batch in batches])).view(P, G)
        weights = torch.ones_like(raw)  # (P, G)
        if args.correction and not args.naive_ratio:
            weights[replayed] = raw[replayed].clamp(max=cap)
        own_weights = weights[share].flatten().to(advantages)  # (size,)
        if iteration == args.num_iterations:  # trajectories that are not trained on, for replay.png
            cond, samples = batches[0].cond, range(size)[chunks[0]]
            noise = sample_noise(policy, args.seed, iteration + 1, samples, 1 + n)
            probe = rollout(policy, noise, cond, sigmas, window, **step).latents
            before = all_moments(policy, probe, cond, sigmas, window, **step)

        with timed(seconds, "update"):
            step_metrics, grad_norms, counts = [], [], torch.zeros(3, 2, dtype=torch.float64)
            for update in range(args.updates_per_rollout):
                for batch in batches:
                    for j, k in enumerate(trained_steps):
                        A, w = advantages[batch.rows], own_weights[batch.rows]  # (B,)
                        part = len(A) / (size * n)  # so that the sum is a mean over trajectories and steps
                        last = batch is batches[-1] and k == trained_steps[-1]
                        if args.beta == 0 and not last and not A.any():
                            continue  # no gradient here; the last one runs always: processes meet there
                        with nullcontext() if last else accelerator.no_sync(policy.module):
                            loss, metrics, outside = step_loss(policy, batch, j, k, sigmas, A, w, args)
                            accelerator.backward(part * loss)
                        counts += outside
                        if update > 0:
                            del metrics["ratio_deviation"]  # of interest where the ratio must be 1
                        step_metrics.append((part, metrics))
                grad_norms.append(apply_update(accelerator, policy.module, optimizer, args.max_grad_norm))
                ema.update()

        best = all_rewards.masked_fill(replayed, -torch.inf).argmax(dim=1).tolist()  # fresh, of each group
        rows = [i * G + best[p] for i, p in enumerate(share)]
        latents = torch.cat([batch.trajectory.latents[:, : prefix + 1] for batch in batches])[rows]
        log_prob = torch.cat([batch.trajectory.log_prob[:, :prefix] for batch in batches])[rows]
        latents, log_prob = gather(accelerator, latents), gather(accelerator, log_prob)
        for p, prompt in enumerate(groups):
            reward = all_rewards[p, best[p]].item()
            buffer.offer(Replay(prompt, reward, iteration, latents[p].clone(), log_prob[p].clone()))

        counts = gather(accelerator, counts[None]).sum(0).tolist()
        clipped = zip(("fresh", "replayed", "naive"), counts, strict=True)
        metrics = {
            "trained_steps": trained,
            "fresh_reward": all_rewards[~replayed].mean().item(),
            "replayed_reward": all_rewards[replayed].mean().item() if replayed.any() else None,
            "replays": int(replayed.sum()),
            **weight_metrics(raw[replayed], weights[replayed]),
            **{f"clip_fraction_{name}": o / c if c else None for name, (o, c) in clipped},
            "buffer_size": len(buffer.entries),
            "buffer_age": buffer.age(iteration),
            **average(accelerator, step_metrics),
            "grad_norm": sum(grad_norms) / len(grad_norms),
        }
        run.log(all_rewards, scores, [batch.trajectory for batch in batches], metrics, seconds)
        if iteration == args.num_iterations:
            after = all_moments(policy, probe, cond, sigmas, window, **step)
            variance = log_weight_variance(probe, before, after)
            if accelerator.is_main_process:
                save_replay(
                    run.folder / "replay.png", run.history, *variance, sigmas[list(trained_steps)], prefix
                )

    run.finish()
    return run.history


if __name__ == "__main__":
    run_command(train, Args)
