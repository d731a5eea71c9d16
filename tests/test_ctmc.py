"""Discrete flows by enumeration of all symbols, against definitions written out with loops, and golden values."""

import json
import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from shared import distances
from shared.ctmc import JUMPS, MetricPath, MixturePath, sample_step, transition_log_prob
from shared.distances import DistanceMatrix, EmbeddingDistance, embedding_distance, in_chunks

GOLDEN = json.loads((Path(__file__).parent / "data" / "discrete_golden.json").read_text())["cases"]
GOLDEN = {case["id"]: (case["inputs"], case["expected"]) for case in GOLDEN}
V = 5
FALSE_ALARM = 1e-6  # of every test with a random outcome


def random(*shape, seed=0, dtype=torch.float64):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def embeddings(size=V, width=2, seed=3):
    return random(size, width, seed=seed) * 2 - 0.7


PATHS = {
    "uniform": MixturePath(V, power=2.0),
    "uniform, corrected": MixturePath(V, power=1.5, corrector=0.7),
    "mask": MixturePath(V, "mask", mask_id=3),
    "mask, corrected": MixturePath(V, "mask", mask_id=1, power=0.8, corrector=0.4),
    "metric": MetricPath((random(V, V) * 3).fill_diagonal_(0)),  # not symmetric
    "metric, a > 1": MetricPath((random(V, V, seed=1)).fill_diagonal_(0), c=2.0, a=1.4),
    "embeddings": MetricPath.from_embeddings(embeddings()),
}
EXACT = sorted(PATHS)
STEPS = [(0.05, 0.1), (0.5, 0.25), (0.875, 0.125)]
X, X_NEXT = torch.meshgrid(torch.arange(V), torch.arange(V), indexing="ij")  # every transition
LOGITS = random(V, V, V, seed=5) * 4


def textbook(name):
    """The functions p(t, x, x1) and rate(t, x, y, x1) of a path, as its paper writes them."""
    path = PATHS[name]
    if isinstance(path, MixturePath):
        c, n = path.corrector, path.power
        p0 = [1 / V if path.mask_id is None else float(y == path.mask_id) for y in range(V)]

        def law(t, x, x1):
            return t**n * (x == x1) + (1 - t**n) * p0[x]

        def rate(t, x, y, x1):
            slope = n * t ** (n - 1)
            return (1 + c) * slope / (1 - t**n) * (y == x1) + c * slope / t**n * p0[y]

        return law, rate
    d = path.distance.tensor.tolist()
    if name == "embeddings":
        unit = [[e / math.hypot(*row) for e in row] for row in embeddings().tolist()]
        d = [[math.dist(u, w) ** 4 for w in unit] for u in unit]

    def law(t, x, x1):
        weights = [math.exp(-path.c * (t / (1 - t)) ** path.a * d[y][x1]) for y in range(V)]
        return weights[x] / sum(weights)

    def rate(t, x, y, x1):
        speed = path.c * path.a * (t / (1 - t)) ** (path.a - 1) / (1 - t) ** 2
        return law(t, y, x1) * speed * max(d[x][x1] - d[y][x1], 0.0)

    return law, rate


def table(function):
    """The (V, V) tensor of function(i, j)."""
    return torch.tensor([[function(i, j) for j in range(V)] for i in range(V)], dtype=torch.float64)


def textbook_kernel(name, jump, t, h):
    """q(y | x, x1) as [x, x1, y]."""
    _, rate = textbook(name)
    q = torch.zeros(V, V, V, dtype=torch.float64)
    for x in range(V):
        for x1 in range(V):
            rates = [rate(t, x, y, x1) if y != x else 0.0 for y in range(V)]
            total = sum(rates)
            chance = 1 - math.exp(-h * total) if jump == "exp" else min(1.0, h * total)
            for y in range(V):
                q[x, x1, y] = 1 - chance if y == x else rates[y] / total * chance if total else 0.0
    return q


@pytest.mark.parametrize("name", EXACT)
def test_marginal_is_the_definition(name):
    path, (law, _) = PATHS[name], textbook(name)
    for t in (0.1, 0.5, 0.9):
        assert_close(path.marginal(torch.arange(V), t), table(lambda x1, x, t=t: law(t, x, x1)))
    times = torch.tensor([[0.0], [0.3], [1.0]])
    rows = path.marginal(torch.arange(V).expand(3, V), times)  # a time for each row of tokens
    assert_close(rows[1], path.marginal(torch.arange(V), times[1]))
    assert torch.equal(rows[2], torch.eye(V, dtype=torch.float64))
    masked = getattr(path, "mask_id", None)
    source = torch.full((V,), 1 / V).double() if masked is None else torch.eye(V).double()[masked]
    assert_close(rows[0], source.expand(V, V))


@pytest.mark.parametrize("name", EXACT)
def test_rates_carry_their_path(name):
    """d p_t(y) / dt = sum_z p_t(z) Q(z -> y) - p_t(y) lambda(y), by a five-point difference of p_t."""
    path, (law, rate) = PATHS[name], textbook(name)
    for t, dt in [(0.1, 2e-4), (0.45, 1e-3), (0.8, 5e-4)]:
        for x1 in range(V):
            x1 = torch.tensor(x1)
            rates = path.rates(torch.arange(V), x1, t)  # (z, y)
            expected = table(lambda z, y, t=t, x1=int(x1): rate(t, z, y, x1) if z != y else 0.0)
            assert_close(rates, expected, rtol=1e-9, atol=1e-12)
            p = path.marginal(x1, t)
            far, near = (path.marginal(x1, t + k * dt) - path.marginal(x1, t - k * dt) for k in (2, 1))
            derivative = (8 * near - far) / (12 * dt)
            assert_close(p @ rates - p * rates.sum(-1), derivative, rtol=1e-6, atol=1e-8)
            assert derivative.abs().max() > 0.05 and (rates >= 0).all()


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("jump", JUMPS)
def test_kernel_is_its_definition(name, jump):
    path = PATHS[name]
    for t, h in STEPS:
        q = path.kernel(X, X_NEXT, t, h, jump)
        assert_close(q, textbook_kernel(name, jump, t, h), rtol=1e-9, atol=1e-12)
        assert_close(q.sum(-1), torch.ones(V, V, dtype=torch.float64), rtol=1e-14, atol=0)
        last = path.kernel(X, X_NEXT, t, h, jump, last=True)
        assert torch.equal(last, torch.eye(V, dtype=torch.float64).expand(V, V, V))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("jump", JUMPS)
def test_log_kernel_column_is_the_kernel(name, jump):
    path, (x, v, x_next) = PATHS[name], torch.meshgrid(*[torch.arange(V)] * 3, indexing="ij")
    for t, h in STEPS:
        for last in (False, True):
            column = path.log_kernel_column(X, X_NEXT, t, h, jump, last)
            q = path.kernel(x, v, t, h, jump, last)  # (x, v, x_next, y)
            expected = q.gather(-1, x_next[..., None])[..., 0].transpose(1, 2)  # (x, x_next, v)
            assert_close(column.exp(), expected, rtol=1e-9, atol=1e-13)
            assert torch.equal(column == -math.inf, expected == 0)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("jump", JUMPS)
def test_closed_forms_are_the_sum_over_the_vocabulary(name, jump):
    path = PATHS[name]
    for t, h in STEPS:
        logits = LOGITS[:, :1].expand(V, V, V)  # one posterior for each x
        kernel = textbook_kernel(name, jump, t, h)
        expected = torch.einsum("xv,xvy->xy", logits[:, 0].softmax(-1), kernel)
        log_prob = transition_log_prob(path, logits, X, X_NEXT, t, h, jump=jump)
        assert_close(log_prob.exp(), expected, rtol=1e-9, atol=1e-14)
        assert_close(log_prob.exp().sum(-1), torch.ones(V, dtype=torch.float64), rtol=1e-13, atol=0)
        last = transition_log_prob(path, logits, X, X_NEXT, t, h, jump=jump, last=True)
        assert_close(last, logits.log_softmax(-1)[:, 0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("jump", JUMPS)
@pytest.mark.parametrize("last", [False, True])
def test_gradient_is_responsibility_minus_posterior(name, jump, last):
    path, (t, h) = PATHS[name], (0.5, 0.2)
    q = torch.eye(V).double().expand(V, V, V) if last else textbook_kernel(name, jump, t, h)
    logits, weights = LOGITS.clone().requires_grad_(), random(V, V, seed=6)
    log_prob = transition_log_prob(path, logits, X, X_NEXT, t, h, jump=jump, last=last)
    (gradient,) = torch.autograd.grad((log_prob * weights).where(log_prob > -math.inf, 0.0).sum(), logits)
    p = LOGITS.softmax(-1)
    joint = p * q.transpose(1, 2)  # (x, x_next, v)
    expected = (joint / joint.sum(-1, keepdim=True) - p) * weights[..., None]
    assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_a_hand_computed_mixture_step():
    """kappa = t at t = 0.5, h = 0.125: the rate is 2, the exact chance of a jump 1/4, of which exp has 0.2212."""
    path, logits = MixturePath(V, "mask", mask_id=3), LOGITS[0, 0]
    p = logits.softmax(-1)
    for jump, chance in [("euler", 0.25), ("exp", 0.22119921692859512)]:
        x, x_next = torch.tensor([3, 3, 0]), torch.tensor([2, 3, 0])
        log_prob = transition_log_prob(path, logits.expand(3, V), x, x_next, 0.5, 0.125, jump=jump)
        expected = torch.stack([chance * p[2], 1 - chance + chance * p[3], 1 - chance + chance * p[0]])
        assert_close(log_prob.exp(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", EXACT)
def test_euler_is_the_first_order_of_exp(name):
    """Chances differ by z^2 / 2 for small z; from z = 1 on an euler step always jumps."""
    path, t = PATHS[name], 0.4
    z = path.rates(X, X_NEXT, t).sum(-1)
    for h in (1e-3, 1e-4):
        exp, euler = (path.kernel(X, X_NEXT, t, h, jump) for jump in ("exp", "euler"))
        stay = (exp - euler).gather(-1, X[..., None])[..., 0]
        assert_close(stay, (h * z) ** 2 / 2, rtol=0.02, atol=1e-15)
    euler = path.kernel(X, X_NEXT, t, 1e6, "euler").gather(-1, X[..., None])[..., 0]
    assert torch.equal(euler, (z == 0).double()) and (z > 0).sum() > V


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_last_step_is_needed_and_exact(power):
    """kappa = t: euler steps have the path's marginals exactly, and the exp step to t = 1 moves 1 - 1/e only."""
    path = MixturePath(V, power=power)
    p, x1 = path.marginal(torch.tensor(1), 0.75), torch.tensor(1)
    for jump, left in [("euler", 0.0), ("exp", math.exp(-1))]:
        if power == 1:
            moved = p @ path.kernel(torch.arange(V), x1, 0.75, 0.25, jump)
            assert_close(moved[0], left * p[0], rtol=1e-12, atol=1e-15)
    assert torch.equal(path.kernel(torch.arange(V), x1, 0.75, 0.25, last=True)[:, 1], torch.ones(V).double())


def test_an_identity_step_is_exactly_zero_with_zero_gradient():
    exactly_zero = [MixturePath(V, power=2.0), PATHS["metric"], PATHS["metric, a > 1"], PATHS["embeddings"]]
    for path in [*exactly_zero, MetricPath.from_embeddings(embeddings(), exact=False)]:
        assert path.is_identity(0.0) and not path.is_identity(1e-3)
        logits, x = LOGITS[0].clone().requires_grad_(), torch.arange(V)
        log_prob = transition_log_prob(path, logits, x, x, 0.0, 0.125)
        log_prob.sum().backward()
        assert torch.equal(log_prob, torch.zeros_like(log_prob)) and not logits.grad.any()
        moved = transition_log_prob(path, logits, x, (x + 1) % V, 0.0, 0.125)
        assert (moved == -math.inf).all()
        assert torch.equal(sample_step(path, logits, x, 0.0, 0.125)[0], x)
        assert torch.equal(path.kernel(x, x.flip(0), 0.0, 0.125), torch.eye(V).to(path.kernel(x, x, 0.0, 1)))
        only = transition_log_prob(path, logits, x, x, 0.0, 1.0, last=True)  # a grid of one step
        assert_close(only, logits.log_softmax(-1).diagonal())
    for path in [MixturePath(V), MixturePath(V, "mask", 3), MetricPath(PATHS["metric"].distance, a=1.0)]:
        assert not path.is_identity(0.0)
        assert (path.rates(torch.tensor(0), torch.tensor(1), 0.0) > 0).any()


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("last", [False, True])
def test_impossible_transitions_are_minus_infinity_and_harm_nothing(name, last):
    """p is 0 but at symbol 0, and a possible transition stands beside impossible ones."""
    path = PATHS[name]
    logits = torch.full((V, V, V), -math.inf, dtype=torch.float64)
    logits[..., 0], logits[2, 0] = 1.0, LOGITS[2, 0]
    logits.requires_grad_()
    log_prob = transition_log_prob(path, logits, X, X_NEXT, 0.5, 0.25, last=last)
    q = path.kernel(X, torch.zeros_like(X), 0.5, 0.25, last=last)[:, 0]  # (x, x_next), for v = 0
    expected = q.log()
    expected[2, 0] = transition_log_prob(path, LOGITS[2, 0], X[2, 0], X_NEXT[2, 0], 0.5, 0.25, last=last)
    assert_close(log_prob, expected, rtol=1e-9, atol=1e-12)
    assert (log_prob == -math.inf).any() or name == "uniform, corrected"
    log_prob.sum().backward()
    assert logits.grad.isfinite().all()
    one_hot = torch.ones(V, V, dtype=torch.bool)
    one_hot[2, 0] = False
    assert not logits.grad[one_hot].any() and logits.grad[2, 0].abs().min() > 1e-4


def test_a_one_hot_posterior_has_no_gradient_even_without_infinities():
    """Top-k with k = 1, as FUDOKI's understanding samples: nothing to learn from."""
    for path in PATHS.values():
        logits = torch.full((V, V, V), -1e4, dtype=torch.float64).requires_grad_()
        log_prob = transition_log_prob(
            path, logits + 1e4 * torch.eye(V)[2].double(), X, torch.full_like(X, 2), 0.5, 0.25
        )
        log_prob.sum().backward()
        assert not logits.grad.any() and log_prob.isfinite().all()


def test_masked_tokens_learn_from_the_step_that_reveals_them_only():
    path = PATHS["mask"]
    logits = LOGITS[:4, 0].clone()
    logits[:, 3] = -math.inf  # the model never predicts the mask
    logits[2] = torch.tensor([0.0, -math.inf, -math.inf, -math.inf, -math.inf])  # revealed, and carried over
    old, new = logits, (logits * 1.5).requires_grad_()
    x, x_next = torch.tensor([3, 3, 0, 3]), torch.tensor([3, 1, 0, 4])
    log_ratio = transition_log_prob(path, new, x, x_next, 0.5, 0.2)
    log_ratio = log_ratio - transition_log_prob(path, old, x, x_next, 0.5, 0.2)
    posterior = (new.log_softmax(-1) - old.log_softmax(-1)).gather(-1, x_next[:, None])[:, 0]
    assert log_ratio[0] == 0 and log_ratio[2] == 0
    assert_close(log_ratio[[1, 3]], posterior[[1, 3]], rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(log_ratio.sum(), new)
    assert not gradient[[0, 2]].any() and gradient[[1, 3]][:, :3].abs().min() > 1e-4


def test_nothing_underflows():
    """At t = 0.999 the weight of symbol 1 is exp(-6,000): the kernel is 0 in float64, its logarithm is not."""
    distance = torch.tensor([[0.0, 1.0, 4.0], [4.0, 0.0, 2.0], [16.0, 9.0, 0.0]])
    path, t, h = MetricPath(distance), 0.999, 1e-3
    beta, speed = 3 * 999**0.9, 2.7 * 999**-0.1 * 1e6
    logits = torch.tensor([0.0, -math.inf, -math.inf], dtype=torch.float64, requires_grad=True)
    log_prob = transition_log_prob(path, logits, torch.tensor(2), torch.tensor(1), t, h)
    expected = -4 * beta + math.log(12) - math.log(16) + math.log(-math.expm1(-h * speed * 16))
    assert float(log_prob) == pytest.approx(expected, rel=1e-9) and expected < -6000
    stay = transition_log_prob(path, logits, torch.tensor(2), torch.tensor(2), t, h)
    assert float(stay) == pytest.approx(-h * speed * 16, rel=1e-9)
    assert path.kernel(torch.tensor(2), torch.tensor(0), t, h)[1] == 0
    close = MetricPath(torch.tensor([[0.0, 1.0, 1.0], [1e-9, 0.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64))
    column = close.log_kernel_column(torch.tensor(1), torch.tensor(0), 0.5, 0.1)  # rates of 1e-8: no cancellation
    rates = close.rates(torch.tensor(1), torch.tensor(0), 0.5)
    assert float(column[0].exp()) == pytest.approx(0.1 * float(rates[0]), rel=1e-8)


def allowed(p, draws, cells):
    """By Bernstein's inequality frequencies are this close to p, all of `cells` with chance 1 - FALSE_ALARM."""
    log = math.log(2 * cells / FALSE_ALARM) / draws
    return log / 3 + (log**2 / 9 + 2 * p * (1 - p) * log).sqrt()


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("jump", JUMPS)
def test_sampling_frequencies_are_the_transition(name, jump):
    """The pair (x1, x_next) has the law p(x1) q(x_next | x, x1); a jump by another draw is off by > 0.05."""
    path, (t, h), draws = PATHS[name], (0.5, 0.25), 20_000
    x = torch.tensor([0, 1]).repeat(draws, 1)  # two tokens with posteriors of their own
    logits = LOGITS[[0, 1], 0].expand(draws, 2, V)
    generator = torch.Generator().manual_seed(0)
    x_next, x1 = sample_step(path, logits, x, t, h, jump=jump, generator=generator)
    law = logits[0].softmax(-1)[..., None] * path.kernel(
        x[0][:, None], torch.arange(V).expand(2, V), t, h, jump
    )
    for token in range(2):
        counts = torch.bincount(x1[:, token] * V + x_next[:, token], minlength=V * V).reshape(V, V)
        assert ((counts / draws - law[token]).abs() <= allowed(law[token], draws, 2 * V * V)).all()
        assert not counts[law[token] == 0].any()
    x_next, x1 = sample_step(path, logits, x, t, h, jump=jump, last=True, generator=generator)
    assert torch.equal(x_next, x1) and not torch.equal(x_next, x)


@pytest.mark.parametrize("name", EXACT)
def test_samples_of_the_path_have_its_marginals(name):
    path, draws, generator = PATHS[name], 20_000, torch.Generator().manual_seed(1)
    x1 = torch.tensor([0, 1, 2, 4]).repeat(draws, 1)
    t = torch.tensor([0.0, 0.3, 0.6, 1.0])
    x, source = path.sample(x1, t, generator), path.draw_source((draws,), generator)
    law = torch.cat([path.marginal(x1[0], t), path.marginal(x1[0], 0.0)[:1]])
    assert x.shape == x1.shape and torch.equal(x[:, 3], x1[:, 3])
    for tokens, p in zip([*x.T, source], law, strict=True):
        counts = torch.bincount(tokens, minlength=V)
        assert ((counts / draws - p).abs() <= allowed(p, draws, 5 * V)).all() and not counts[p == 0].any()


@pytest.mark.parametrize("name", EXACT)
def test_other_dtypes_agree(name):
    path = PATHS[name]
    for t, h in STEPS:
        expected = transition_log_prob(path, LOGITS, X, X_NEXT, t, h)
        single = transition_log_prob(path, LOGITS.float(), X.int(), X_NEXT.to(torch.uint8), t, h)
        assert single.dtype == torch.float32 and expected.dtype == torch.float64
        assert_close(single.double(), expected, rtol=2e-6, atol=2e-6)
        half = transition_log_prob(path, LOGITS.bfloat16(), X, X_NEXT, t, h)
        assert_close(half, transition_log_prob(path, LOGITS.bfloat16().float(), X, X_NEXT, t, h))
        as_tensors = transition_log_prob(path, LOGITS, X, X_NEXT, torch.tensor(t).double(), torch.tensor(h))
        assert_close(as_tensors, expected, rtol=1e-6, atol=1e-6)


def golden_path(inputs):
    if inputs["path"] == "mixture":
        power = math.log(inputs["kappa"]) / math.log(inputs["t"])
        assert power * inputs["t"] ** (power - 1) == pytest.approx(inputs["dkappa"], rel=1e-12)
        mask_id = inputs.get("mask_id")
        return MixturePath(inputs["vocab"], inputs["source"], mask_id, round(power, 9), inputs["corrector"])
    if "embeddings" not in inputs:
        return MetricPath(torch.ones(inputs["vocab"], inputs["vocab"]))
    return MetricPath.from_embeddings(
        torch.tensor(inputs["embeddings"], dtype=torch.float64), inputs["c"], inputs["a"]
    )


@pytest.mark.parametrize("case", ["G01_mask_jump", "G03_uniform_stay_euler", "G05_metric_jump", "G08_last_step"])
def test_golden_steps(case):
    inputs, expected = GOLDEN[case]
    path, t, h = golden_path(inputs), inputs["t"], inputs["h"]
    jump, last = inputs.get("variant", "exp"), inputs.get("last_step", False)
    x, x_next, every = torch.tensor(inputs["x"]), torch.tensor(inputs["x_next"]), torch.arange(path.vocab_size)
    close = {"rtol": 1e-9, "atol": 1e-12}
    wanted = {
        key: torch.tensor(value, dtype=torch.float64) for key, value in expected.items() if key != "p_t_index"
    }
    assert_close(path.log_kernel_column(x, x_next, t, h, jump, last).exp(), wanted["q_col"], **close)
    assert_close(path.kernel(x, every, t, h, jump, last)[:, x_next], wanted["q_col"], **close)
    if "lambda_by_v" in wanted:
        assert_close(path.rates(x, every, t).sum(-1), wanted["lambda_by_v"], **close)
    if "p_t_given_v" in wanted:
        assert_close(path.distance.tensor, wanted["distance_matrix"], **close)
        assert_close(path.marginal(every, t), wanted["p_t_given_v"].T, rtol=1e-9, atol=0)
    old, new = (torch.tensor(inputs[key], dtype=torch.float64).log() for key in ("p_old", "p_new"))
    new.requires_grad_()
    log_prob = transition_log_prob(path, new, x, x_next, t, h, jump=jump, last=last)
    log_old = transition_log_prob(path, old, x, x_next, t, h, jump=jump, last=last)
    (gradient,) = torch.autograd.grad(log_prob, new)
    assert_close(log_prob.detach(), wanted["logprob_new"], **close)
    assert_close(log_old.exp(), wanted["p_old_transition"], **close)
    assert_close((log_prob - log_old).exp().detach(), wanted["ratio"], **close)
    assert_close(gradient, wanted["grad_logprob_wrt_logits_new"], **close)


def test_golden_ratio_of_three_tokens():
    inputs, expected = GOLDEN["G09_joint_three_tokens"]
    path, x, x_next = golden_path(inputs), torch.tensor(inputs["x"]), torch.tensor(inputs["x_next"])
    new, old, ref = (
        transition_log_prob(path, torch.tensor(inputs[key]).double().log(), x, x_next, inputs["t"], inputs["h"])
        for key in ("p_new", "p_old", "p_ref")
    )
    for log_ratio, key in [(new - old, "log_ratio_per_token"), (new - ref, "log_ratio_ref_per_token")]:
        assert_close(log_ratio, torch.tensor(expected[key], dtype=torch.float64), rtol=2e-7, atol=1e-12)
