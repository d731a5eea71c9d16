"""OP-GRPO: the buffer, hybrid groups, and the correction against closed forms and quadrature; whole runs."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_training import SMALL, run, without_times
from torch.testing import assert_close

from algos import flow_grpo, op_grpo
from algos.op_grpo import (
    Args,
    Batch,
    Replay,
    ReplayBuffer,
    hybrid_groups,
    hybrid_rollout,
    sequence_weight,
    step_loss,
)
from oracle import gaussian
from shared.command import saved_args
from shared.policies.digits import DigitsPolicy
from shared.prompts import load_prompts
from shared.rewards import REWARDS
from shared.rollout import rollout, sample_noise
from shared.sde import shifted_sigmas


def replay(prompt=0, reward=1.0, iteration=0, latents=None, log_prob=None):
    latents = torch.zeros(3, 1) if latents is None else latents
    return Replay(prompt, reward, iteration, latents, torch.zeros(2) if log_prob is None else log_prob)


# ---- the weight


def test_sequence_weight_is_the_product_of_the_steps_ratios():
    old = torch.tensor([[-1.0, -2.0, 0.5], [3.0, -0.25, -7.0]], dtype=torch.float64)
    off = torch.tensor([[-1.5, 0.5, 1.0], [2.0, 0.75, -12.0]], dtype=torch.float64)
    expected = [
        math.exp(0.5) * math.exp(-2.5) * math.exp(-0.5),
        math.exp(1.0) * math.exp(-1.0) * math.exp(5.0),
    ]
    assert_close(sequence_weight(old, off), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    assert torch.equal(sequence_weight(old * 100, old * 100), torch.ones(2, dtype=torch.float64))


# ---- the buffer


def test_the_buffer_keeps_the_better_of_two_after_decay():
    buffer = ReplayBuffer(9, 0.5)
    buffer.offer(replay(reward=1.0, iteration=3))
    buffer.offer(replay(reward=1.0, iteration=3))  # no better
    buffer.offer(replay(reward=0.25, iteration=5))  # 1.0 is worth 0.25 after two iterations: no better
    assert buffer.entries[0].iteration == 3 and buffer.age(5) == 2
    buffer.offer(replay(reward=0.2501, iteration=5))
    assert buffer.entries[0].iteration == 5 and buffer.entries[0].reward == 0.2501
    forever = ReplayBuffer(9, 1.0)
    for iteration in (0, 50):
        forever.offer(replay(reward=1.0, iteration=iteration))
    assert forever.entries[0].iteration == 0


def test_a_negative_reward_decays_downwards():
    buffer = ReplayBuffer(9, 0.5)
    buffer.offer(replay(reward=-2.0, iteration=0))
    assert [buffer.worth(buffer.entries[0], i) for i in (0, 1, 2)] == [-2.0, -3.0, -3.5]
    buffer.offer(replay(reward=-2.5, iteration=1))
    assert buffer.entries[0].reward == -2.5


def test_of_too_many_the_one_of_lowest_decayed_reward_leaves():
    buffer = ReplayBuffer(2, 0.5)
    buffer.offer(replay(prompt=7, reward=1.0, iteration=0))
    buffer.offer(replay(prompt=3, reward=0.5, iteration=2))
    buffer.offer(replay(prompt=5, reward=0.75, iteration=2))  # prompt 7's is worth 0.25 now
    assert set(buffer.entries) == {3, 5}
    buffer.offer(replay(prompt=1, reward=0.1, iteration=2))  # the newcomer is worth least
    assert set(buffer.entries) == {3, 5}


offers = st.lists(
    st.tuples(st.integers(0, 3), st.integers(-4, 4), st.integers(0, 3)), min_size=1, max_size=20
)


@given(offers, st.integers(1, 4), st.sampled_from([0.5, 0.75, 1.0]))
def test_the_buffer_is_its_rule_read_literally(sequence, capacity, decay):
    buffer, stored, now = ReplayBuffer(capacity, decay), {}, 0

    def worth(entry):
        size = abs(entry.reward)
        for _ in range(now - entry.iteration):
            size *= decay
        return size if entry.reward >= 0 else entry.reward - (abs(entry.reward) - size)

    for prompt, reward, later in sequence:
        now += later
        new = replay(prompt, float(reward), now)
        buffer.offer(new)
        if prompt not in stored or new.reward > worth(stored[prompt]):
            stored[prompt] = new
        if len(stored) > capacity:
            del stored[min(stored, key=lambda p: worth(stored[p]))]
        assert buffer.entries == stored and len(stored) <= capacity


def test_samples_of_the_buffer_are_different_and_every_entry_can_be_drawn():
    buffer, generator = ReplayBuffer(9, 0.9), torch.Generator().manual_seed(0)
    for prompt in range(5):
        buffer.offer(replay(prompt))
    drawn = [[r.prompt for r in buffer.sample(3, generator)] for _ in range(60)]
    assert all(len(set(prompts)) == 3 for prompts in drawn)
    counts = torch.bincount(torch.tensor(drawn).flatten(), minlength=5)
    assert counts.min() >= 20  # of 36 expected; a sixth of the draws miss a uniform one: 4.2 sigma
    assert len(buffer.sample(8, generator)) == 5


def test_the_buffer_survives_a_checkpoint_bit_for_bit(tmp_path):
    buffer = ReplayBuffer(9, 0.9)
    for prompt, dtype in [(4, torch.bfloat16), (2, torch.float32)]:
        buffer.offer(replay(prompt, 0.3, 5, torch.randn(3, 2, 2).to(dtype), torch.randn(2)))
    torch.save(buffer.state_dict(), tmp_path / "buffer.pt")
    again = ReplayBuffer(9, 0.9)
    again.load_state_dict(torch.load(tmp_path / "buffer.pt", weights_only=True))
    assert list(again.entries) == list(buffer.entries) == [4, 2]
    for a, b in zip(again.entries.values(), buffer.entries.values(), strict=True):
        assert a[:3] == b[:3] and torch.equal(a.latents, b.latents) and torch.equal(a.log_prob, b.log_prob)
        assert a.latents.dtype == b.latents.dtype


def test_the_state_of_the_buffer_is_all_of_it():
    buffer, again = ReplayBuffer(9, 0.9), ReplayBuffer(9, 0.9)
    for prompt in (4, 2):
        buffer.offer(replay(prompt, 0.3, 5))
    again.load_state_dict(buffer.state_dict())
    assert again.entries == buffer.entries and list(again.entries) == [4, 2]


def test_ages_are_averaged():
    buffer = ReplayBuffer(9, 0.9)
    for prompt, iteration in [(0, 1), (1, 4), (2, 5)]:
        buffer.offer(replay(prompt, iteration=iteration))
    assert buffer.age(7) == pytest.approx(11 / 3)


def test_hybrid_groups_of_the_dataset():
    buffer, generator = ReplayBuffer(9, 0.9), torch.Generator()
    for prompt in (5, 2, 8):
        buffer.offer(replay(prompt))
    groups = [1, 5, 8, 2]

    def places(most):
        prompts, stored = hybrid_groups(groups, buffer, most, "dataset", generator)
        assert prompts == groups and all(
            r is None or r.prompt == g for g, r in zip(groups, stored, strict=True)
        )
        return [r is not None for r in stored]

    assert places(4) == [False, True, True, True] and places(2) == [False, True, True, False]
    assert places(1) == [False, True, False, False] and places(0) == [False] * 4


def test_hybrid_groups_of_the_buffer():
    buffer = ReplayBuffer(9, 0.9)
    for prompt in (5, 2, 8):
        buffer.offer(replay(prompt))
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        prompts, stored = hybrid_groups([1, 5, 8, 2], buffer, 2, "buffer", generator)
        assert len(set(prompts)) == 4 and [r is not None for r in stored] == [True, True, False, False]
        assert all(r.prompt == g for g, r in zip(prompts[:2], stored[:2], strict=True))
        assert prompts[2:] == [g for g in [1, 5, 8, 2] if g not in prompts[:2]][:2]
    assert hybrid_groups([1, 5], buffer, 0, "buffer", generator) == ([1, 5], [None, None])


# ---- the correction, exactly: one dimension, three stochastic steps and an ODE step, by quadrature


class ScalarPolicy:
    """v = weight x + bias in one dimension, float64."""

    def __init__(self, weight, bias):
        self.module = torch.nn.Linear(1, 1, dtype=torch.float64)
        self.module.weight.data.fill_(weight)
        self.module.bias.data.fill_(bias)

    def velocity(self, x, sigma, cond):
        return self.module(x)

    def closed_form(self, sigmas):
        N = len(sigmas) - 1
        A, b = self.module.weight.detach(), self.module.bias.detach()
        return gaussian.Policy(A.expand(N, 1, 1).clone(), b.expand(N, 1).clone(), sigmas)


SIGMAS, WINDOW, START = shifted_sigmas(4).double(), (0, 3), 0.4
REWARD = gaussian.Reward(torch.tensor([1.0]).double(), torch.tensor([[-0.5]]).double())
EXACT = Args(storage_dtype="float64", clip_range=50.0)  # a clip that never acts
OFF, OLD = ScalarPolicy(0.6, -0.3), ScalarPolicy(0.75, -0.1)


def replayed_everywhere(prefix, nodes=24, args=EXACT):
    """Every trajectory of a quadrature rule, drawn from OFF for `prefix` steps and from OLD after them."""
    noise, mass = gaussian.quadrature(3, nodes)
    noise = torch.cat([torch.full((len(noise), 1), START).double(), noise], dim=1)[..., None]
    drawn = rollout(OFF, noise, {}, SIGMAS, WINDOW, noise_level=0.7)
    stored = [
        Replay(0, 1.0, 0, x[: prefix + 1], lp[:prefix])
        for x, lp in zip(drawn.latents, drawn.log_prob, strict=True)
    ]
    rows = slice(0, len(stored))
    return hybrid_rollout(OLD, stored, rows, noise, {}, SIGMAS, WINDOW, prefix, args), mass


def exact_chain(policy):
    return gaussian.chain(policy.closed_form(SIGMAS), gaussian.Sampler("flow", 0.7, WINDOW))


@pytest.mark.parametrize("prefix", [1, 2, 3])
def test_weighted_expectations_are_those_of_the_old_policy(prefix):
    """E_off[w f] = E_old[f], with truncation (1, 2 of 3 steps) and without; unweighted it is not."""
    batch, mass = replayed_everywhere(prefix)
    still = torch.zeros(1, 1).double()
    means, covs = gaussian.moments(exact_chain(OLD), torch.tensor([START]).double(), still)
    expected = gaussian.expected_reward(REWARD, means[-1], covs[-1])
    values = REWARD(batch.trajectory.final)
    assert_close(mass @ (batch.weights * values), expected, rtol=1e-9, atol=0)
    assert_close(mass @ batch.weights, torch.ones(()).double(), rtol=1e-9, atol=0)
    assert abs(mass @ values - expected) > 0.01


@pytest.mark.parametrize("prefix", [1, 2, 3])
def test_the_corrected_gradient_is_exact_and_the_naive_one_is_not(prefix):
    """At theta = old, the steps' losses with A = r have the gradient of -E_old[r]; of the naive ratio, which
    corrects a replayed step by its own p_old / p_off alone, and without a weight they have not."""
    batch, mass = replayed_everywhere(prefix)
    A, w = REWARD(batch.trajectory.final) * mass * len(mass), batch.weights

    def gradient(weights, args):
        losses = [step_loss(OLD, batch, j, j, SIGMAS, A, weights, args)[0] for j in range(3)]
        return -torch.cat([g.flatten() for g in torch.autograd.grad(sum(losses), [*OLD.module.parameters()])])

    start, still = torch.tensor([START]).double(), torch.zeros(1, 1).double()
    sampler = gaussian.Sampler("flow", 0.7, WINDOW)
    in_A, in_b = gaussian.reward_gradient(OLD.closed_form(SIGMAS), sampler, REWARD, start, still)
    expected = torch.stack([in_A[:3].sum(), in_b[:3].sum()])  # the stochastic steps
    assert_close(gradient(w, EXACT), expected, rtol=1e-8, atol=0)
    ones = torch.ones_like(w)
    naive = Args(storage_dtype="float64", clip_range=50.0, naive_ratio=True)
    for wrong in (gradient(ones, EXACT), gradient(ones, naive)):
        assert ((wrong - expected).abs() / expected.abs()).max() > 0.05


def test_storing_the_best_of_a_group_breaks_the_identity():
    """With two draws from OFF of which the better is stored, E[w f] is not E_old[f]: max_weight is no
    detail."""
    batch, mass = replayed_everywhere(3, nodes=12)
    values = REWARD(batch.trajectory.final)
    better = (values[:, None] > values[None, :]).double() + 0.5 * (values[:, None] == values[None, :])
    chosen = 2 * mass * (better @ mass)  # the probability of each trajectory as the better of two
    assert_close(chosen.sum(), torch.ones(()).double())
    assert (chosen @ (batch.weights * values) - mass @ (batch.weights * values)) > 0.1


def test_a_trajectory_of_the_current_policy_has_weight_one_exactly():
    """Stored and replayed by the same weights, in the same places: bit for bit."""
    policy, sigmas, args = DigitsPolicy(), shifted_sigmas(10), Args(storage_dtype="bfloat16")
    cond = policy.encode(load_prompts("digits")[:6])
    noise = sample_noise(policy, 0, 1, range(6), 10)
    first = hybrid_rollout(policy, [None] * 6, slice(0, 6), noise, cond, sigmas, (0, 9), 5, args)
    assert torch.equal(first.weights, torch.ones(6).double()) and not first.replayed.any()
    x, log_prob = first.trajectory.latents[:, :6], first.trajectory.log_prob[:, :5]
    stored = [None, *(Replay(i, 1.0, 0, x[i], log_prob[i]) for i in range(1, 6))]
    other = sample_noise(policy, 0, 2, range(6), 10)
    second = hybrid_rollout(policy, stored, slice(0, 6), other, cond, sigmas, (0, 9), 5, args)
    assert torch.equal(second.weights, torch.ones(6).double())
    assert second.replayed.tolist() == [False] + [True] * 5
    assert torch.equal(second.trajectory.latents[1:, :6], x[1:])
    assert not torch.equal(second.trajectory.latents[1:, 6], first.trajectory.latents[1:, 6])  # a new end


def test_weights_of_averaged_log_probabilities():
    """per_dim: the exponent of each step is divided by the number of entries, as the ratio's is."""
    policy, sigmas = DigitsPolicy(), shifted_sigmas(10)
    cond, noise = policy.encode(load_prompts("digits")[:2]), sample_noise(policy, 0, 1, range(2), 10)
    args = Args(ratio="per_dim")
    first = hybrid_rollout(policy, [None] * 2, slice(0, 2), noise, cond, sigmas, (0, 9), 5, args).trajectory
    gap = torch.tensor([1.0, -2.0, 4.0, 0.5, 3.0])
    stored = [None, Replay(1, 1.0, 0, first.latents[1, :6], first.log_prob[1, :5] - gap)]
    batch = hybrid_rollout(policy, stored, slice(0, 2), noise, cond, sigmas, (0, 9), 5, args)
    assert_close(batch.weights, torch.tensor([1.0, math.exp(6.5 / 64)]).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize("ratio", ["exact", "per_dim"])
@pytest.mark.parametrize("j", [2, 6])  # a replayed step, and one after them
def test_step_loss_off_policy(ratio, naive, j):
    """Value and gradient against the objective written out with torch.distributions: weights, KL, clip
    counts."""
    policy, sigmas = DigitsPolicy(), shifted_sigmas(10)
    cond = policy.encode(load_prompts("digits")[:4])
    result = rollout(policy, sample_noise(policy, 0, 1, range(4), 10), cond, sigmas, (0, 9), noise_level=0.7)
    per = 1 if ratio == "exact" else 64
    replayed = torch.tensor([False, True, True, False])
    shift = torch.tensor([0.0, 0.15, -0.3, 0.0])[:, None] * per
    off = result.log_prob[:, :5] - shift
    w = torch.tensor([1.0, 0.5, 0.25, 1.0])
    batch = Batch(slice(0, 4), cond, result, off, w, replayed)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        policy.module.outputs[1].weight += 0.02 * torch.randn(64, 256, generator=generator)
    A = torch.tensor([1.0, -1.0, 0.5, 0.0])
    args = Args(ratio=ratio, beta=0.3, clip_range=0.05, naive_ratio=naive)
    loss, metrics, counts = step_loss(policy, batch, j, j, sigmas, A, w, args)
    gradient = torch.autograd.grad(loss, policy.module.outputs[1].bias)[0]

    sigma = 1 - j / 10
    x, x_next, std = result.latents[:, j], result.latents[:, j + 1], 0.7 * (sigma / (1 - sigma) * 0.1) ** 0.5
    v = policy.velocity(x, sigma, cond)
    with policy.reference():
        v_ref = policy.velocity(x, sigma, cond)
    mean, mean_ref = (x - u * 0.1 - std**2 / (2 * sigma) * (x + (1 - sigma) * u) for u in (v, v_ref))
    step, reference = (
        torch.distributions.Independent(torch.distributions.Normal(m, std), 3) for m in (mean, mean_ref)
    )
    log_ratio = (step.log_prob(x_next) - reference.log_prob(x_next)) / per  # the rollout was the reference's
    behind = log_ratio + (shift[:, 0] / per if j < 5 else 0)  # log p_theta / p_off
    r = (behind if naive else log_ratio).exp()
    kl = torch.distributions.kl_divergence(step, reference) / per
    expected = (w * (-torch.minimum(A * r, A * r.clamp(0.95, 1.05)) + 0.3 * kl)).mean()
    expected_gradient = torch.autograd.grad(expected, policy.module.outputs[1].bias)[0]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-4 * float(expected_gradient.abs().max()))
    assert metrics["kl"] == pytest.approx(kl.mean().item(), rel=1e-4)

    def count(log, rows):  # outside the clip range, of those that have an advantage
        return [int(((log.exp() - 1).abs()[rows] > 0.05).sum()), len(rows)]

    if j < 5:
        expected = [count(log_ratio, [0]), count(log_ratio, [1, 2]), count(behind, [1, 2])]
        assert expected[2] == [2, 2] and counts.tolist() == expected
    else:
        assert counts.tolist() == [count(log_ratio, [0, 1, 2]), [0, 0], [0, 0]]


# ---- whole runs


def test_without_hybrid_groups_it_is_flow_grpo_bit_for_bit(tmp_path):
    options = {"num_iterations": 4, "updates_per_rollout": 2, "ema_decay": 0.5, "beta": 0.1}
    flow, flow_weights = run(flow_grpo, tmp_path / "flow", **options)
    op, op_weights = run(op_grpo, tmp_path / "op", hybrid_fraction=0.0, **options)
    for a, b in zip(without_times(flow), without_times(op), strict=True):
        assert a == {key: b[key] for key in a}
    assert all(torch.equal(flow_weights[key], op_weights[key]) for key in flow_weights)
    assert all(m["replays"] == 0 and m["weight_mean"] is None for m in op)


def spied(monkeypatch, tmp_path, **options):
    """A run of three iterations on three prompts, and what its parts were called with."""
    seen = SimpleNamespace(losses=[], offers=[], batches=[])
    loss, offer, sampled = op_grpo.step_loss, ReplayBuffer.offer, op_grpo.hybrid_rollout
    monkeypatch.setattr(op_grpo, "step_loss", lambda *a: seen.losses.append(a) or loss(*a))
    monkeypatch.setattr(ReplayBuffer, "offer", lambda self, new: seen.offers.append(new) or offer(self, new))
    monkeypatch.setattr(
        op_grpo, "hybrid_rollout", lambda *a: seen.batches.append((a[1], sampled(*a))) or seen.batches[-1][1]
    )
    options = {"num_iterations": 3, "learning_rate": 2e-3} | options
    seen.history, _ = run(op_grpo, tmp_path / "run", **options)
    return seen


def test_groups_are_hybrid_from_the_second_time_on(monkeypatch, tmp_path):
    """G - m fresh trajectories, then m that follow the stored one to the truncation step; the best fresh one
    of each group is offered."""
    seen = spied(monkeypatch, tmp_path, replays_per_group=2, reward="ink", micro_batch_size=5)
    assert [m["replays"] for m in seen.history] == [0, 6, 6]
    batches = seen.batches[3:6]  # the second iteration
    replays = [r for stored, _ in batches for r in stored]  # (12,)
    assert [r is not None for r in replays] == [False, False, True, True] * 3
    latents = torch.cat([b.trajectory.latents for _, b in batches])
    log_prob = torch.cat([b.trajectory.log_prob for _, b in batches])
    for i, r in enumerate(replays):
        if r is not None:
            assert torch.equal(latents[i, :6], r.latents) and r.log_prob.shape == (5,) and r.iteration == 1
            assert not torch.equal(latents[i, 6], latents[i ^ 1, 6])  # two different ends
    for p, offered in enumerate(seen.offers[3:6]):
        fresh = [i for i in range(4 * p, 4 * p + 4) if replays[i] is None]
        best = [i for i in fresh if torch.equal(latents[i, :6], offered.latents)]
        assert len(best) == 1 and torch.equal(log_prob[best[0], :5], offered.log_prob)
        assert offered.iteration == 2 and offered.latents.device.type == "cpu"
    assert seen.offers[0].latents.untyped_storage().nbytes() == 6 * 64 * 4  # not a view of the whole batch


def test_the_best_fresh_trajectory_is_offered(monkeypatch, tmp_path):
    seen, scored = [], []
    offer, advantages = ReplayBuffer.offer, op_grpo.group_advantages
    monkeypatch.setattr(ReplayBuffer, "offer", lambda self, new: seen.append(new) or offer(self, new))
    monkeypatch.setattr(op_grpo, "group_advantages", lambda r, std: scored.append(r) or advantages(r, std))
    run(op_grpo, tmp_path / "run", num_iterations=3)
    for iteration, rewards in enumerate(scored, 1):
        fresh = rewards if iteration == 1 else rewards[:, :3]  # m = 1 of G = 4
        assert [o.reward for o in seen if o.iteration == iteration] == fresh.amax(1).tolist()


@pytest.mark.parametrize("options, largest", [
    ({}, 1.0), ({"max_weight": 0.9}, 0.9), ({"max_weight": math.inf}, math.inf),
    ({"ratio": "per_dim"}, math.inf), ({"correction": False}, None),
    ({"naive_ratio": True, "max_weight": 0.5}, None),
], ids=str)  # fmt: skip
def test_weights_reach_every_loss_capped(options, largest, monkeypatch, tmp_path):
    """All steps of all updates, prefix and new ends: the weight of a fresh trajectory is 1, of a replayed one
    its sequence weight up to the cap; there are some on both sides of 1. The advantage is that of its new
    image."""
    scored, advantages = [], op_grpo.group_advantages
    monkeypatch.setattr(op_grpo, "group_advantages", lambda r, std: scored.append(r) or advantages(r, std))
    options = {
        "group_size": 6,
        "replays_per_group": 3,
        "updates_per_rollout": 2,
        "micro_batch_size": 7,
    } | options
    seen = spied(monkeypatch, tmp_path, **options)
    judge, policy = REWARDS["label"]("cpu"), DigitsPolicy()
    raws = torch.cat([batch.weights[batch.replayed] for _, batch in seen.batches])
    assert (raws > 1.001).any() and (
        (raws < 0.999).any() or options.get("ratio") or options.get("naive_ratio")
    )
    assert len(seen.losses) == 3 * 2 * 3 * 9  # iterations, updates, micro-batches, steps
    for i, (_, batch, j, k, _, A, weights, _) in enumerate(seen.losses):
        assert j == k == i % 9
        expected = torch.ones(len(weights))
        if largest is not None:
            expected[batch.replayed] = batch.weights[batch.replayed].float().clamp(max=largest)
        assert torch.equal(weights, expected)
        assert torch.equal(A, advantages(scored[i // 54]).flatten()[batch.rows])
        prompts = load_prompts(SMALL["prompts"])
        names = {1: prompts[0], 4: prompts[1], 7: prompts[2]}
        own = judge(policy.decode(batch.trajectory.final), [names[c] for c in batch.cond["label"].tolist()])
        assert_close(own, scored[i // 54].flatten()[batch.rows], rtol=1e-4, atol=1e-5)
    entries = 64 if options.get("ratio") == "per_dim" else 1
    replayed = torch.tensor([[False] * 3 + [True] * 3] * 3)
    for iteration, m in enumerate(seen.history):
        batches = [batch for _, batch in seen.batches[3 * iteration : 3 * iteration + 3]]
        assert m["fresh_reward"] == pytest.approx(
            scored[iteration][~replayed if iteration else slice(None)].mean().item()
        )
        if iteration == 0:
            assert m["replayed_reward"] is m["weight_mean"] is m["log_weight_mean"] is None
            continue
        raw = torch.cat([batch.weights for batch in batches]).view(3, 6)[replayed]
        gaps = (
            torch.cat([b.trajectory.log_prob[:, :5] - b.log_prob_off for b in batches]).double().sum(1)
            / entries
        )
        assert_close(raw, gaps.exp().view(3, 6)[replayed])
        used = torch.ones_like(raw) if largest is None else raw.clamp(max=largest)
        assert m["replayed_reward"] == pytest.approx(scored[iteration][replayed].mean().item())
        assert m["weight_mean"] == pytest.approx(used.mean().item()) and m["weight_max"] == pytest.approx(
            used.max().item()
        )
        assert m["log_weight_mean"] == pytest.approx(raw.log().mean().item(), rel=1e-4, abs=1e-6)
        assert m["buffer_size"] == 3 and m["replays"] == 9


def test_groups_from_the_buffer_keep_their_prompts(monkeypatch, tmp_path):
    """Two of four groups are drawn: images are made, scored, trained and offered under the drawn prompts."""
    seen = spied(monkeypatch, tmp_path, prompts="digits", num_prompts=4, hybrid_source="buffer")
    for iteration, (stored, batch) in enumerate(seen.batches):
        labels = batch.cond["label"].view(4, 4)
        offered = [o.prompt for o in seen.offers[4 * iteration : 4 * iteration + 4]]
        assert labels.tolist() == [[prompt] * 4 for prompt in offered] and len(set(offered)) == 4
        assert [r is not None for r in stored] == (
            [False, False, False, True] * 2 + [False] * 8 if iteration else [False] * 16
        )
        assert all(r is None or r.prompt == labels.flatten()[i] for i, r in enumerate(stored))


def test_clip_fractions_do_not_depend_on_micro_batches(tmp_path):
    options = {"num_iterations": 3, "updates_per_rollout": 3, "learning_rate": 2e-3, "group_size": 5}
    keys = [f"clip_fraction_{name}" for name in ("fresh", "replayed", "naive")]
    runs = [run(op_grpo, tmp_path / str(size), micro_batch_size=size, **options)[0] for size in (None, 4)]
    for whole, parts in zip(*runs, strict=True):
        assert [whole[key] for key in keys] == [pytest.approx(parts[key]) for key in keys]
    assert [m["clip_fraction_naive"] is None for m in runs[0]] == [True, False, False]
    assert 0 < runs[0][-1]["clip_fraction_fresh"] < 1


def test_resume_is_exact_with_everything(tmp_path):
    """A buffer that is too small, drawn from, in bfloat16."""
    options = {"prompts": "digits", "num_prompts": 4, "hybrid_source": "buffer", "buffer_capacity": 3}
    options |= {"storage_dtype": "bfloat16", "checkpoint_every": 2, "updates_per_rollout": 2}
    straight, weights = run(op_grpo, tmp_path / "straight", num_iterations=6, **options)
    run(op_grpo, tmp_path / "resumed", num_iterations=4, **options)
    args = saved_args(Args, str(tmp_path / "resumed"))
    args.num_iterations = 6
    assert without_times(op_grpo.train(args)) == without_times(straight)
    again = load_file(tmp_path / "resumed" / "digits.safetensors")
    assert all(torch.equal(again[key], weights[key]) for key in weights)
    state = torch.load(tmp_path / "resumed" / "checkpoints" / "000006.pt", weights_only=True)
    assert [e["latents"].dtype for e in state["buffer"]["entries"]] == [torch.bfloat16] * 3


def test_the_picture_shows_what_the_updates_changed(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(op_grpo, "save_replay", lambda *a: drawn.append(a))
    history, _ = run(op_grpo, tmp_path / "run", learning_rate=2e-3)
    path, shown, measured, expected, sigmas, prefix = drawn[0]
    assert len(drawn) == 1 and path.name == "replay.png" and shown == history and prefix == 5
    assert (expected > 0).all() and (measured > 0).all()
    assert_close(sigmas, torch.linspace(1, 0.2, 9).to(sigmas), rtol=1e-6, atol=1e-6)
    assert 0.2 < (measured.sum() / expected.sum()) < 5  # twelve trajectories that were not trained on


def test_exact_weights_without_a_cap_are_warned_about(tmp_path, capsys):
    for i, options in enumerate([{"max_weight": math.inf}, {}, {"ratio": "per_dim"}]):
        run(op_grpo, tmp_path / str(i), num_iterations=1, **options)
        assert ("warning: --max-weight inf" in capsys.readouterr().err) == (i == 0)


@pytest.mark.parametrize("options, prefix", [
    ({}, 5), ({"truncation": False}, 9), ({"truncate_at": 0.01}, 1), ({"sde_window": (0, 4)}, 2),
    ({"sde_window": (3, 7), "correction": False}, 2),
], ids=str)  # fmt: skip
def test_truncation(options, prefix, monkeypatch, tmp_path):
    seen = spied(monkeypatch, tmp_path, **options)
    assert all(offered.latents.shape == (prefix + 1, 1, 8, 8) for offered in seen.offers)
    assert all(m["ratio_deviation"] == 0.0 for m in seen.history)
    for stored, batch in seen.batches[1:]:
        for i, r in enumerate(stored):
            assert r is None or torch.equal(batch.trajectory.latents[i, : prefix + 1], r.latents)


@pytest.mark.parametrize("options", [
    {"hybrid_fraction": 0.5}, {"hybrid_source": "buffer", "num_prompts": 2}, {"replays_per_group": 2},
    {"reward_decay": 0.01}, {"truncate_at": 0.2}, {"truncation": False}, {"naive_ratio": True},
    {"max_weight": 0.5}, {"beta": 5.0}, {"buffer_capacity": 1},
], ids=str)  # fmt: skip
def test_options_change_the_run(options, tmp_path):
    common = {"num_iterations": 7, "learning_rate": 2e-3, "updates_per_rollout": 2, "reward": "ink"}
    base = common | {"num_prompts": options.get("num_prompts", 3)}
    default, _ = run(op_grpo, tmp_path / "default", **base)
    changed, _ = run(op_grpo, tmp_path / "changed", **common | options)
    assert default[-1]["grad_norm"] != changed[-1]["grad_norm"]


def test_without_decay_the_first_success_stays(monkeypatch, tmp_path):
    ages = {}
    for decay in (True, False):
        history, _ = run(op_grpo, tmp_path / str(decay), num_iterations=5, decay=decay, reward_decay=0.01)
        ages[decay] = history[-1]["buffer_age"]
    assert ages[True] < ages[False]


def test_op_grpo_teaches_what_the_base_model_hardly_does(tmp_path):
    """Thirty iterations with the defaults gain at least half of what they gained: 0.12."""
    history = op_grpo.train(Args(num_iterations=30, eval_every=30, output_dir=str(tmp_path / "run")))
    before = json.loads((tmp_path / "run" / "summary.json").read_text())["eval_reward_before"]
    assert before < 0.03 and history[-1]["eval_reward"] > before + 0.06
