"""dFlowGRPO: GRPO for discrete flows, whose ratio knows the rates of the sampler (arXiv 2605.09291).

    python algos/dflow_grpo.py                                   # digits as 64 tokens of 17 grey levels
    python algos/dflow_grpo.py --task understanding              # the digit of a given image, as one token
    python algos/dflow_grpo.py --ratio mean_field                # what the paper compares with: diffu-GRPO
    python algos/dflow_grpo.py --resume runs/RUN

A token moves from t = 0 (source) to t = 1 (data) by jumps: draw a clean token X1 from the model's posterior,
then jump by the rates that lead to X1 (shared/ctmc.py). So the probability of a step is a sum over all X1
that could have caused it, and so is the ratio that GRPO needs.

Differs from Flow-GRPO in
    1. States are tokens. A step's ratio is the product over tokens of
           sum_v p_old(v) w(v) p_theta(v) / p_old(v),    w(v) = q(x' | x, v) / sum_u p_old(u) q(x' | x, u),
       exact, or estimated from n draws of X1 without further network calls.
    2. The ratio of D tokens is aggregated: their product, their geometric mean, or clipped token by token.
    3. All steps are trained, the last one (x' = X1) too; steps whose kernel is the identity are not.

Symbols
    paper               here              shape            range
    x_t, t              x, t              (B, D), ()       ids; t in [0, 1]: 0 = source, 1 = data
    p_theta(X1 | x)     logits            (B, D, V)        the posterior of the clean token, per token
    Q_t(x -> y | X1)    path.rates        (B, D, V)        conditional rates, [0, inf)
    h                   h                 ()               step size
    n                   num_draws         ()               1, 2, ..: draws of X1 per token
    r                   ratio             (B,) or (B, D)   (0, inf); exactly 1 before the first update
    A^i                 advantages        (P, G)           [-5, 5]
    beta                beta              ()               [0, inf)

Differs from the authors' code in
    1. The jump uses one X1, so the trained kernel is the sampled one; theirs jumps by the mean of n rates
       (--sampler released): test_released_sampler_is_another_kernel_for_more_than_one_draw.
    2. The last step is trained and identity steps are not (theirs: the reverse):
       test_which_steps_are_trained.
    3. The posterior is not cut to its maximum in training, which would leave no gradient:
       test_one_hot_posterior_has_no_gradient.
    4. The KL is the divergence of the posteriors: test_posterior_kl_is_the_divergence. Theirs, of the mean
       log-ratio rho, is e^rho - 1 - rho, which is none: test_golden_step_of_three_tokens.
Left out: classifier-free guidance; diffu-GRPO's random masking of the prompt.
"""

import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bundle: drop

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from shared.args import RunArgs, check_args
from shared.command import run_command
from shared.ctmc import transition_kl, transition_log_prob
from shared.errors import InputError
from shared.evaluation import decoded_states, join_samples, token_evaluation
from shared.grpo import clipped_surrogate, group_advantages
from shared.pictures import save_filmstrip, save_ratio_noise
from shared.prompts import sample_groups
from shared.rewards import score
from shared.run import Run
from shared.token_rollout import TokenRollout, at_draws, ratio_noise, sample_uniforms, token_rollout
from shared.training import apply_update, average, gather, micro_batches, prepare, set_up, swapped, timed

AGGREGATION = {"mean_field": "token", "mean_field_sequence": "geometric"}  # where the ratio decides it
CLIP_RANGES = {"product": (0.2, 0.2), "geometric": (5e-3, 7e-3), "token": (0.2, 0.2)}  # by aggregation
KEPT = {"exact": "transitions", "mc": "draws", "joint": "draws"}  # of the old policy; mean field: "ends"
DRAWS = (1, 2, 4, 8, 24)  # numbers of draws in the picture of the ratio's noise


@dataclass
class Args(RunArgs):
    """dFlowGRPO: online reinforcement learning of discrete flow models (arXiv 2605.09291)."""

    algorithm: ClassVar[str] = "dflow_grpo"
    model: str = "digit-tokens"
    """The generator: digit-tokens, digit-tokens-masked (a masked source) or digit-tokens-timed (its network
    sees t)."""
    task: Literal["generation", "understanding"] = "generation"
    """generation: images from prompts. understanding: answers to questions about images."""
    prompts: str | None = None
    """A built-in set or a file. Default: digits, or digit-images for understanding."""
    eval_prompts: str | None = None
    """Prompts of the evaluations. Default: those of training; with digit-images the held-out
    digit-images-test."""
    reward: str | None = None
    """label, ink, next, jpeg; for understanding: answer. Or a weighted sum as "label:1,jpeg:0.5".
    Default: label, or answer."""
    learning_rate: float = 1e-3
    """AdamW's learning rate."""
    eval_steps: int = 8
    """Sampling steps of an evaluation."""
    eval_top_k: int | None = None
    """Symbols that the posterior keeps in evaluations; 0: all. Default: all, or 1 for understanding."""

    # sampling
    num_steps: int = 8
    """K: steps of a training trajectory (upstream: num_steps)."""
    jump: Literal["exp", "euler"] = "exp"
    """Chance of a jump: 1 - exp(-h lambda), or h lambda, its first order."""
    sampler: Literal["conditional", "released"] = "conditional"
    """released, for comparison only: the authors' sampler and trained steps; needs --ratio mc, --jump exp."""

    # groups
    num_prompts: int = 8
    """P: prompts, one group each, per iteration over all processes."""
    group_size: int = 16
    """G: samples per prompt (upstream: num_generations)."""

    # algorithm
    ratio: Literal["exact", "mc", "joint", "mean_field", "mean_field_sequence"] = "exact"
    """exact: over all X1. mc: over num_draws of them. joint: of the used one. mean_field (diffu-GRPO),
    mean_field_sequence (diffu-GSPO): the final tokens' posterior at the source, token by token or their
    geometric mean."""
    num_draws: int = 24
    """n of --ratio mc: the used X1 and n - 1 further draws (upstream: n_mc)."""
    aggregation: Literal["product", "geometric", "token"] | None = None
    """Of the tokens' ratios: product, geometric mean, or none: clipped token by token. Default: geometric;
    product for dpo; mean_field is token."""
    clip_range: tuple[float, float] | None = None
    """BELOW ABOVE: ratios are clipped to 1 - BELOW .. 1 + ABOVE. Default: 5e-3 7e-3 for geometric, else
    0.2 0.2 (upstream: eps_low, eps_high)."""
    loss: Literal["grpo", "dpo"] = "grpo"
    """grpo: the clipped surrogate. dpo: online DPO on the better and the worse half of each group."""
    dpo_beta: float = 0.1
    """DPO's beta: scale of the log-ratio to the model before RL."""
    advantage_std: Literal["group", "batch", "none"] = "group"
    """Centred rewards are divided by the std of the group, of the batch, or not."""
    updates_per_rollout: int = 2
    """Optimiser updates on the trajectories of an iteration, each with all of them."""
    beta: float = 0.0
    """beta: weight of the KL to the model before RL (upstream: kl_beta)."""
    kl: Literal["posterior", "transition", "k3"] = "posterior"
    """posterior: the KL of the posteriors, which bounds that of the steps. transition: that of the steps (on
    metric paths of up to 2048 symbols). k3: an estimate of it."""


def draws_log_ratio(log_p_new: Tensor, log_p_old: Tensor, log_weight: Tensor) -> Tensor:
    """log of r = sum_j q_j p_new(X_j) / p_old(X_j) / sum_j q_j over n draws X_j, per token.

    All (n, ...): log-posteriors at the draws, and log q_j = log q(x_next | x, X_j). Returns (...,). With the
    X1 that made x_next among the draws, r is unbiased for every n, else it is not. Pinned by
    test_mc_is_unbiased_with_the_used_draw.
    """
    change = log_weight + (log_p_new - log_p_old)
    return change.logsumexp(0) - log_weight.logsumexp(0)


def mc_log_ratio(
    path, log_p_new: Tensor, log_p_old: Tensor, x: Tensor, x_next: Tensor, draws: Tensor, t, h, *,
    jump: str = "exp",
) -> Tensor:  # fmt: skip
    """Estimate of log p_new(x_next | x) - log p_old(x_next | x) of every token, from draws of X1.

    log_p_new, log_p_old: log-posteriors (..., V); x, x_next: (...,); draws: (n, ...), the first the X1 that
    made x_next, the others fresh from the old posterior. Returns (...,). See `draws_log_ratio`.
    """
    column = path.log_kernel_column(x, x_next, t, h, jump=jump).to(log_p_new)
    return draws_log_ratio(*(at_draws(values, draws) for values in (log_p_new, log_p_old, column)))


def aggregate(log_ratio: Tensor, mask: Tensor, how: str) -> Tensor:
    """Log-ratios of tokens (B, D) over those inside the mask (B, D), which must be some in each row.

    how: "product", their sum (B,); "geometric", their mean (B,); "token", each, 0 outside the mask (B, D).
    Values outside the mask, infinite or NaN, count for nothing. Raises ValueError for another `how`.
    """
    if how not in CLIP_RANGES:
        raise ValueError(f"how must be one of {', '.join(CLIP_RANGES)}, not {how!r}")
    inside = log_ratio.masked_fill(~mask, 0.0)
    if how == "token":
        return inside
    return inside.sum(1) if how == "product" else inside.sum(1) / mask.sum(1)


def posterior_kl(logits: Tensor, logits_ref: Tensor) -> Tensor:
    """KL(p || p_ref) = sum_v p(v) (log p(v) - log p_ref(v)) in nats, of softmaxes (..., V). Returns (...,).

    Symbols of probability 0 in p count 0. It is at least the KL of the transitions that they lead to.
    """
    log_p, log_ref = logits.log_softmax(-1), logits_ref.log_softmax(-1)
    possible = log_p > -torch.inf
    gap = torch.where(possible, log_p, 0.0) - torch.where(possible, log_ref, 0.0)
    return (log_p.exp() * gap).sum(-1)


def of_interest(total: Tensor, mask: Tensor) -> Tensor:
    """What `aggregate` gave, without padding: (B,), or the tokens inside the mask of (B, D)."""
    return total[mask] if total.ndim == 2 else total


def surrogate(log_ratio: Tensor, mask: Tensor, advantages: Tensor, how: str, clip_range: tuple[float, float]):
    """`clipped_surrogate` of the aggregated log-ratios of tokens (B, D), the mean over samples; by "token"
    the mean over each sample's tokens first. advantages: (B,). Returns the loss () and metrics."""
    total, weights = aggregate(log_ratio, mask, how), None
    if how == "token":
        share = mask.sum() / (len(mask) * mask.sum(1, keepdim=True)).to(total)  # all / (samples x own tokens)
        weights, advantages = (v.expand_as(mask)[mask] for v in (share, advantages[:, None]))
    total = of_interest(total, mask)
    return clipped_surrogate(total, torch.zeros_like(total), advantages, clip_range, weights)


def dpo_loss(log_ratio: Tensor, advantages: Tensor, group_size: int, beta: float) -> Tensor:
    """Online DPO (arXiv 2305.18290 Eq. 7, 2402.04792): -log sigmoid(beta (log-ratio of the better - of the
    worse)), step by step (arXiv 2311.12908), the mean over pairs.

    log_ratio: log p_theta / p_ref (B,); advantages (B,), in whole groups. The best of a group is paired with
    its worst, the second best with the second worst and so on; pairs of equals count 0. Returns ().
    """
    A, r = advantages.view(-1, group_size), log_ratio.view(-1, group_size)
    order = A.argsort(dim=1, descending=True, stable=True)
    better, worse = order[:, : group_size // 2], order.flip(1)[:, : group_size // 2]
    differ = A.gather(1, better) > A.gather(1, worse)
    return -(logsigmoid(beta * (r.gather(1, better) - r.gather(1, worse))) * differ).mean()


def step_loss(
    policy, trajectory: TokenRollout, k: int, cond: dict, times: Tensor, advantages: Tensor, args: Args
):
    """The objective at step k of B trajectories, as a loss: the mean over the trajectories.

        loss = mean( max(-A ratio, -A clip(ratio)) + beta KL(policy || reference) ),  or DPO's

    times: (K+1,); advantages: (B,). Returns the loss () with its gradient, and metrics as floats or None.
    """
    if args.ratio in AGGREGATION:  # mean field: from the source to the final tokens in one last step
        k, times, states = 0, times[[0, -1]], trajectory.states[:, [0, -1]]
    else:
        states = trajectory.states
    path, mask, last = policy.path, cond["mask"], k == len(times) - 2
    x, x_next, t, h = states[:, k], states[:, k + 1], float(times[k]), float(times[k + 1] - times[k])

    def log_ratio_to_old(logits: Tensor) -> Tensor:  # (B, D)
        if trajectory.draws is None:
            new = transition_log_prob(path, logits, x, x_next, t, h, jump=args.jump, last=last)
            return (new - trajectory.log_prob[:, k]).masked_fill(~mask, 0.0)
        stored = (trajectory.draws, trajectory.log_prob, trajectory.log_weight)
        draws, old, log_weight = (values[:, k].movedim(1, 0) for values in stored)  # (n, B, D)
        return draws_log_ratio(at_draws(logits.log_softmax(-1), draws), old, log_weight)

    logits = policy.posterior_logits(x, t, cond)  # (B, D, V)
    log_ratio = log_ratio_to_old(logits)
    if args.beta > 0 or args.loss == "dpo":
        with torch.no_grad(), policy.reference():
            logits_ref = policy.posterior_logits(x, t, cond)
    if args.loss == "dpo" or (args.beta > 0 and args.kl == "k3"):
        change = log_ratio - log_ratio_to_old(logits_ref)  # log p_theta / p_ref
    loss, metrics = surrogate(log_ratio, mask, advantages, args.aggregation, args.clip_range)
    if args.loss == "dpo":  # and only the metrics of the surrogate
        total = aggregate(change, mask, args.aggregation)
        loss, metrics["clip_fraction"] = dpo_loss(total, advantages, args.group_size, args.dpo_beta), None
    metrics["kl"] = None
    if args.beta > 0:
        if args.kl == "posterior":
            kl = posterior_kl(logits, logits_ref)
        elif args.kl == "transition":
            kl = transition_kl(path, logits, logits_ref, x, t, h, jump=args.jump, last=last)
        else:
            kl = torch.expm1(-change) + change
        kl = aggregate(kl, mask, "product" if args.aggregation == "product" else "geometric").mean()
        loss = loss + args.beta * kl
        metrics["kl"] = kl.item()
    return loss, metrics | {"loss": loss.item()}


def trained_steps(path, times: Tensor, args: Args) -> list[int]:
    """The steps of a grid (K+1,) that are trained: those that are no identity, the last included. Mean field
    has one; the authors' code trains all but the last."""
    if args.ratio in AGGREGATION:
        return [0]
    K = len(times) - 1
    if args.sampler == "released":
        return list(range(K - 1))
    return [k for k in range(K) if k == K - 1 or not path.is_identity(times[k])]


def resolve(args: Args) -> Args:
    """The settings with their defaults filled in. Raises InputError for settings that cannot be run."""
    understanding, decided = args.task == "understanding", AGGREGATION.get(args.ratio)
    released, dpo, size = args.sampler == "released", args.loss == "dpo", args.micro_batch_size
    aggregation = args.aggregation or decided or ("product" if dpo else "geometric")
    defaults = {
        "prompts": "digit-images" if understanding else "digits",
        "reward": "answer" if understanding else "label",
        "eval_top_k": 1 if understanding else 0,
        "aggregation": aggregation,
        "clip_range": CLIP_RANGES[aggregation],
    }
    args = replace(args, **{name: value for name, value in defaults.items() if getattr(args, name) is None})
    if args.prompts == "digit-images" and args.eval_prompts is None:
        args.eval_prompts = "digit-images-test"
    bounds = {
        "eval_top_k": (args.eval_top_k >= 0, "0 or more"),
        "num_steps": (args.num_steps >= (2 if released else 1), "at least 1, or 2 with --sampler released"),
        "num_draws": (args.num_draws >= 1, "at least 1"),
        "clip_range": (all(0 < side < float("inf") for side in args.clip_range), "above 0, both"),
        "dpo_beta": (0 < args.dpo_beta < float("inf"), "above 0"),
        "aggregation": (decided in (None, args.aggregation), f"{decided} with --ratio {args.ratio}"),
        "sampler": (
            not released or (args.ratio, args.jump) == ("mc", "exp"),
            "conditional, unless --ratio is mc and --jump exp",
        ),
        "loss": (not dpo or args.aggregation != "token", "grpo where tokens are clipped one by one"),
    }
    check_args(args, **bounds)
    if dpo and size is not None and size % args.group_size:
        raise InputError(f"--micro-batch-size {size}: --loss dpo needs whole groups of {args.group_size}")
    return args


def train(args: Args) -> list[dict]:
    """Train and leave a run folder behind. Returns the metrics of every iteration, as in metrics.jsonl."""
    args = resolve(args)
    accelerator, prompts, eval_prompts, share, policy, rewards = set_up(args, args.task)
    run = Run(args, accelerator)

    times = policy.times(args.num_steps)
    steps = trained_steps(policy.path, times, args)
    num_draws = args.num_draws if args.ratio == "mc" else 1
    sampling = {"jump": args.jump, "sampler": args.sampler, "keep": KEPT.get(args.ratio, "ends")}
    optimizer, ema = prepare(accelerator, policy, args)
    evaluation = token_evaluation(policy, eval_prompts, args)
    run.start(policy, rewards, optimizer, ema, evaluation)

    size = len(share) * args.group_size  # trajectories of this process in an iteration
    first = share[0] * args.group_size  # place of the first of them among those of all processes
    chunks = micro_batches(size, args.micro_batch_size)
    for iteration in run.iterations():
        seconds: dict[str, float] = {}
        groups = sample_groups(len(prompts), args.num_prompts, args.seed, iteration - 1)
        texts = [prompts[groups[p]] for p in share for _ in range(args.group_size)]  # (size,)

        with timed(seconds, "rollout"):
            trajectories, samples = [], []
            for rows in chunks:
                cond = policy.encode(texts[rows])
                numbers = range(first, first + size)[rows]
                noise = sample_uniforms(policy, args.seed, iteration, numbers, args.num_steps, num_draws)
                trajectory = token_rollout(policy, *noise, cond, times, **sampling)
                trajectories.append((rows, cond, trajectory))
                samples.append(policy.decode(trajectory.states[:, -1], cond))

        with timed(seconds, "reward"):
            scores = score(rewards, join_samples(samples), texts, args.reward_batch_size)
            all_rewards = gather(accelerator, scores.total).view(-1, args.group_size)  # (P, G)

        advantages = group_advantages(all_rewards, args.advantage_std)  # (P, G)
        trained = int((advantages != 0).sum()) * len(steps) * args.updates_per_rollout  # steps with a signal
        advantages = advantages[share].flatten().to(accelerator.device)  # (size,), of this process

        if iteration == args.num_iterations:
            old = swapped(ema.parameters, [p.detach().clone() for p in ema.parameters])  # for a picture
        with timed(seconds, "update"):
            step_metrics, grad_norms = [], []
            for update in range(args.updates_per_rollout):
                for rows, cond, trajectory in trajectories:
                    for k in steps:
                        A = advantages[rows]  # (B,)
                        part = len(A) / (size * len(steps))  # a mean over trajectories and steps
                        last = rows is chunks[-1] and k == steps[-1]
                        if args.beta == 0 and not last and not A.any():
                            continue  # no gradient here; the last one runs always: processes meet there
                        with nullcontext() if last else accelerator.no_sync(policy.module):
                            loss, metrics = step_loss(policy, trajectory, k, cond, times, A, args)
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
        if iteration == args.num_iterations and len(steps) > 1 and args.sampler == "conditional":
            _, cond, trajectory = trajectories[0]
            noise = ratio_noise(
                policy, trajectory.states, steps[len(steps) // 2 - 1], cond, times, old, jump=args.jump,
                counts=DRAWS, repeats=50, generator=torch.Generator().manual_seed(args.seed),
                estimate=draws_log_ratio,
                reduce=lambda r, mask: of_interest(aggregate(r, mask, args.aggregation), mask),
            )  # fmt: skip
            if accelerator.is_main_process:
                save_ratio_noise(run.folder / "ratio_noise.png", *noise, DRAWS, args.clip_range)

    with ema.applied():
        states = decoded_states(policy, evaluation.prompts[:4], times, args.jump)
    if accelerator.is_main_process:
        save_filmstrip(run.folder / "filmstrip.png", states, evaluation.prompts[:4], times)
    run.finish()
    return run.history


if __name__ == "__main__":
    run_command(train, Args)
