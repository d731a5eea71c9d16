"""Evaluations: fixed prompts and noise, the same in every run, sampled without training noise."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shared.prompts import Prompt
from shared.rewards import Reward, score
from shared.rollout import ode_sample, sample_noise
from shared.token_rollout import sample_uniforms, token_rollout
from shared.training import micro_batches

EVALUATION = 2**31  # the "iteration" whose noise evaluations use; training never gets there


class Evaluated(NamedTuple):
    """The samples of one evaluation."""

    samples: Tensor | list[str]  # images (B, 3, H, W) in [0, 1], or B answers
    rewards: Tensor  # (B,)
    prompts: list[Prompt]


class Evaluation:
    """Fixed prompts and fixed noise, the same in every run and for every seed."""

    def __init__(self, policy, prompts: list[Prompt], args, noise: tuple[Tensor, ...], sample: Callable):
        """noise: tensors (B, ...) for B = args.eval_samples; sample(*noise, cond), without gradient, gives
        what `policy.decode` makes of the samples."""
        self.prompts = [prompts[i % len(prompts)] for i in range(args.eval_samples)]
        self.cond = policy.encode(self.prompts)
        self.noise, self.sample = noise, sample
        self.batches = micro_batches(args.eval_samples, args.micro_batch_size)
        self.reward_batch_size = args.reward_batch_size

    def run(self, rewards: list[Reward]) -> Evaluated:
        """What the policy's present weights make of the prompts and the noise. Every process computes all of
        it."""
        parts = []
        for rows in self.batches:
            cond = {name: value[rows] for name, value in self.cond.items()}
            parts.append(self.sample(*(noise[rows] for noise in self.noise), cond))
        samples = join_samples(parts)
        return Evaluated(
            samples, score(rewards, samples, self.prompts, self.reward_batch_size).total, self.prompts
        )


def ode_evaluation(policy, prompts: list[Prompt], args) -> Evaluation:
    """The evaluation of a continuous flow: the ODE, in args.eval_steps steps."""
    noise, sigmas = (
        sample_noise(policy, 0, EVALUATION, range(args.eval_samples), 1)[:, 0],
        policy.sigmas(args.eval_steps),
    )
    return Evaluation(
        policy, prompts, args, (noise,), lambda x, cond: policy.decode(ode_sample(policy, x, cond, sigmas))
    )


def token_evaluation(policy, prompts: list[Prompt], args) -> Evaluation:
    """The evaluation of a discrete flow: its sampler, in args.eval_steps steps."""
    noise = sample_uniforms(policy, 0, EVALUATION, range(args.eval_samples), args.eval_steps)
    times, options = policy.times(args.eval_steps), {"jump": args.jump, "top_k": args.eval_top_k or None}

    def sample(source: Tensor, uniforms: Tensor, cond: dict[str, Tensor]) -> Tensor | list[str]:
        states = token_rollout(policy, source, uniforms, cond, times, **options).states
        return policy.decode(states[:, -1], cond)

    return Evaluation(policy, prompts, args, noise, sample)


def join_samples(parts: list[Tensor] | list[list[str]]) -> Tensor | list[str]:
    """Images (B, ...) of several batches as one tensor on the CPU, or their answers as one list."""
    if isinstance(parts[0], list):
        return [answer for part in parts for answer in part]
    return torch.cat([part.cpu() for part in parts])


def decoded_states(policy, prompts: list[Prompt], times: Tensor, jump: str) -> list[Tensor | list[str]]:
    """For a picture: what a discrete flow's sampler shows at each of the times (K+1,) for each prompt."""
    cond = policy.encode(prompts)
    noise = sample_uniforms(policy, 0, EVALUATION, range(len(prompts)), len(times) - 1)
    states = token_rollout(policy, *noise, cond, times, jump=jump).states
    return [join_samples([policy.decode(x, cond)]) for x in states.unbind(1)]
