"""Discrete flows: every symbol enumerated, against definitions written out with loops, and golden values."""

import json
import math
from fractions import Fraction
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from shared import distances, paths
from shared.ctmc import (
    JUMPS,
    MetricPath,
    MixturePath,
    draw_symbols,
    sample_step,
    transition_law,
    transition_log_prob,
)
from shared.distances import DistanceMatrix, EmbeddingDistance, embedding_distance, in_chunks

GOLDEN = json.loads((Path(__file__).parent / "data" / "discrete_golden.json").read_text())["cases"]
GOLDEN = {case["id"]: (case["inputs"], case["expected"]) for case in GOLDEN}
V = 5
FALSE_ALARM = 1e-6  # of every test with a random outcome


def random(*shape, seed=0, dtype=torch.float64):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def embeddings(size=V, width=2, seed=3):
    return random(size, width, seed=seed) * 2 - 0.7


# makers of paths: a path remembers tables, which must not outlive a mutant
PATHS = {
    "uniform": lambda: MixturePath(V, power=2.0),
    "uniform, corrected": lambda: MixturePath(V, power=1.5, corrector=0.7),
    "mask": lambda: MixturePath(V, "mask", mask_id=3),
    "mask, corrected": lambda: MixturePath(V, "mask", mask_id=1, power=0.8, corrector=0.4),
    "metric": lambda: MetricPath((random(V, V) * 3).fill_diagonal_(0)),  # not symmetric
    "metric, a > 1": lambda: MetricPath((random(V, V, seed=1)).fill_diagonal_(0), c=2.0, a=1.4),
    "embeddings": lambda: MetricPath.from_embeddings(embeddings()),
}
EXACT = sorted(PATHS)
STEPS = [(0.05, 0.1), (0.5, 0.25), (0.875, 0.125)]
X, X_NEXT = torch.meshgrid(torch.arange(V), torch.arange(V), indexing="ij")  # every transition
LOGITS = random(V, V, V, seed=5) * 4


def textbook(name):
    """The functions p(t, x, x1) and rate(t, x, y, x1) of a path, as its paper writes them."""
    path = PATHS[name]()
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
    path, (law, _) = PATHS[name](), textbook(name)
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
    path, rate = PATHS[name](), textbook(name)[1]
    for t, dt in [(0.1, 2e-4), (0.45, 1e-3), (0.8, 5e-4)]:
        largest = 0.0
        for x1 in torch.arange(V):
            rates = path.rates(torch.arange(V), x1, t)  # (z, y)
            expected = table(lambda z, y, t=t, x1=int(x1): rate(t, z, y, x1) if z != y else 0.0)
            assert_close(rates, expected, rtol=1e-9, atol=1e-12)
            p = path.marginal(x1, t)
            far, near = (path.marginal(x1, t + k * dt) - path.marginal(x1, t - k * dt) for k in (2, 1))
            derivative = (8 * near - far) / (12 * dt)
            assert_close(p @ rates - p * rates.sum(-1), derivative, rtol=1e-6, atol=1e-8)
            assert (rates >= 0).all()
            largest = max(largest, float(derivative.abs().max()))
        assert largest > 0.1


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("jump", JUMPS)
def test_kernel_is_its_definition(name, jump):
    path = PATHS[name]()
    for t, h in STEPS:
        q = path.kernel(X, X_NEXT, t, h, jump)
        assert_close(q, textbook_kernel(name, jump, t, h), rtol=1e-9, atol=1e-12)
        assert_close(q.sum(-1), torch.ones(V, V, dtype=torch.float64), rtol=1e-14, atol=0)
        last = path.kernel(X, X_NEXT, t, h, jump, last=True)
        assert torch.equal(last, torch.eye(V, dtype=torch.float64).expand(V, V, V))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("jump", JUMPS)
def test_log_kernel_column_is_the_kernel(name, jump):
    path, (x, v, x_next) = PATHS[name](), torch.meshgrid(*[torch.arange(V)] * 3, indexing="ij")
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
    path = PATHS[name]()
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
    path, (t, h) = PATHS[name](), (0.5, 0.2)
    q = torch.eye(V).double().expand(V, V, V) if last else textbook_kernel(name, jump, t, h)
    logits, weights = LOGITS.clone().requires_grad_(), random(V, V, seed=6)
    log_prob = transition_log_prob(path, logits, X, X_NEXT, t, h, jump=jump, last=last)
    (gradient,) = torch.autograd.grad((log_prob * weights).where(log_prob > -math.inf, 0.0).sum(), logits)
    p = LOGITS.softmax(-1)
    joint = p * q.transpose(1, 2)  # (x, x_next, v)
    expected = (joint / joint.sum(-1, keepdim=True) - p) * weights[..., None]
    assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [*EXACT, "one-hot"])
@pytest.mark.parametrize("jump", JUMPS)
@pytest.mark.parametrize("last", [False, True])
def test_the_law_is_that_of_every_transition(name, jump, last):
    """Values and gradients, with a posterior that has symbols of probability 0."""
    path, (t, h) = PATHS["metric" if name == "one-hot" else name](), (0.5, 0.2)
    logits = LOGITS[:, 0].clone()
    logits[0, 1:] = logits[1, 3] = -math.inf
    if name == "one-hot":
        logits = torch.eye(V).double().log()
    logits.requires_grad_()
    x = torch.arange(V)
    law = transition_law(path, logits, x, t, h, jump=jump, last=last)
    log_prob = transition_log_prob(
        path, logits[:, None].expand(V, V, V), X, X_NEXT, t, h, jump=jump, last=last
    )
    assert_close(law, log_prob.exp(), rtol=1e-12, atol=1e-15)
    assert_close(law.sum(-1), torch.ones(V, dtype=torch.float64), rtol=1e-13, atol=0)
    weights = random(V, V, seed=11)
    gradients = [torch.autograd.grad((p * weights).sum(), logits)[0] for p in (law, log_prob.exp())]
    assert_close(*gradients, rtol=1e-10, atol=1e-14)
    assert bool(gradients[0].any()) == (name != "one-hot")
    half = transition_law(path, logits[None].bfloat16(), x[None], t, h, jump=jump, last=last)
    assert half.shape == (1, V, V) and half.dtype == torch.float32
    with patch.object(distances, "CHUNK", 2 * V * V):
        assert_close(transition_law(path, logits, x, t, h, jump=jump, last=last), law, rtol=1e-14, atol=1e-18)


@pytest.mark.parametrize("name", EXACT)
def test_tables_of_a_small_vocabulary_change_nothing(name):
    for t, h in [*STEPS, STEPS[0]]:
        for jump in JUMPS:
            path = PATHS[name]()
            found = [f(X, X_NEXT, t, h, jump) for _ in (0, 1) for f in (path.kernel, path.log_kernel_column)]
            with patch.object(paths, "SMALL_VOCABULARY", V - 1):
                direct = [f(X, X_NEXT, t, h, jump) for f in (path.kernel, path.log_kernel_column)]
            for one, other in zip(found, direct * 2, strict=True):
                assert_close(one, other, rtol=1e-13, atol=0)
    one, other = (path.kernel(X, X_NEXT, 0.5, h, jump) for h, jump in [(0.1, "exp"), (0.2, "exp")])
    assert not torch.equal(one, other) and not torch.equal(one, path.kernel(X, X_NEXT, 0.5, 0.1, "euler"))
    with (
        patch.object(path, "rates", None)
        if isinstance(path, MetricPath)
        else patch.object(MixturePath, "rates", None)
    ):
        assert torch.equal(path.kernel(X, X_NEXT, 0.5, 0.1), one)  # remembered


def test_a_hand_computed_mixture_step():
    """kappa = t at t = 0.5, h = 0.125: the rate is 2, the exact chance of a jump 1/4; exp has 0.2212."""
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
    path, t = PATHS[name](), 0.4
    z = path.rates(X, X_NEXT, t).sum(-1)
    for h in (1e-4, 1e-5):
        exp, euler = (path.kernel(X, X_NEXT, t, h, jump) for jump in ("exp", "euler"))
        stay = (exp - euler).gather(-1, X[..., None])[..., 0]
        assert_close(stay, (h * z) ** 2 / 2, rtol=0.02, atol=1e-15)
    euler = path.kernel(X, X_NEXT, t, 1e6, "euler").gather(-1, X[..., None])[..., 0]
    assert torch.equal(euler, (z == 0).double()) and (z > 0).sum() > V


def test_the_last_step_is_needed():
    """kappa = t: the euler step from 0.75 to 1 has the path's marginal, exp leaves 1/e of the source."""
    path, x1 = MixturePath(V), torch.tensor(1)
    p = path.marginal(x1, 0.75)
    for jump, left in [("euler", 0.0), ("exp", math.exp(-1))]:
        moved = p @ path.kernel(torch.arange(V), x1, 0.75, 0.25, jump)
        assert_close(moved[0], left * p[0], rtol=1e-12, atol=1e-15)


def test_an_identity_step_is_exactly_zero_with_zero_gradient():
    exactly_zero = [
        MixturePath(V, power=2.0),
        PATHS["metric"](),
        PATHS["metric, a > 1"](),
        PATHS["embeddings"](),
    ]
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
    for path in [MixturePath(V), MixturePath(V, "mask", 3), MetricPath(PATHS["metric"]().distance, a=1.0)]:
        assert not path.is_identity(0.0)
        assert (path.rates(torch.tensor(0), torch.tensor(1), 0.0) > 0).any()


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("last", [False, True])
def test_impossible_transitions_are_minus_infinity_and_harm_nothing(name, last):
    """p is 0 but at symbol 0, and a possible transition stands beside impossible ones."""
    path = PATHS[name]()
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
    for path in (make() for make in PATHS.values()):
        logits = torch.full((V, V, V), -1e4, dtype=torch.float64).requires_grad_()
        log_prob = transition_log_prob(
            path, logits + 1e4 * torch.eye(V)[2].double(), X, torch.full_like(X, 2), 0.5, 0.25
        )
        log_prob.sum().backward()
        assert not logits.grad.any() and log_prob.isfinite().all()


def test_masked_tokens_learn_from_the_step_that_reveals_them_only():
    path = PATHS["mask"]()
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
    """At t = 0.999 the weight of symbol 1 is exp(-6,000): the kernel is 0 in float64, not so its log."""
    distance = torch.tensor([[0.0, 1.0, 4.0], [4.0, 0.0, 2.0], [16.0, 9.0, 0.0]])
    path, t, h = MetricPath(distance), 0.999, 1e-3
    beta, speed = 3 * 999**0.9, 2.7 * 999**-0.1 * 1e6
    logits = torch.tensor([0.0, -math.inf, -math.inf], dtype=torch.float64, requires_grad=True)
    log_prob = transition_log_prob(path, logits, torch.tensor(2), torch.tensor(1), t, h)
    expected = -4 * beta + math.log(12) - math.log(16) + math.log(-math.expm1(-h * speed * 16))
    assert log_prob.item() == pytest.approx(expected, rel=1e-9) and expected < -6000
    stay = transition_log_prob(path, logits, torch.tensor(2), torch.tensor(2), t, h)
    assert stay.item() == pytest.approx(-h * speed * 16, rel=1e-9)
    assert path.kernel(torch.tensor(2), torch.tensor(0), t, h)[1] == 0
    distance = torch.tensor([[1.0, 1.0, 1.0], [1 + 2**-40, 0.0, 1.0], [2.0, 1.0, 0.0]], dtype=torch.float64)
    close = MetricPath(distance)  # symbol 1 is hardly farther from 0 than 0 itself: its rate does not cancel
    table = close.distance.log_z_and_table(3.0)[1]
    x, mu = torch.tensor([1]), close.marginal(torch.tensor(0), 0.5)[0] * 2**-40
    assert float(close.distance.look_up(table, x, distance[x])[0, 0]) == pytest.approx(
        float(mu), rel=1e-9, abs=0
    )
    move = close.log_kernel_column(x, torch.tensor([0]), 0.5, 0.1)[0, 0].exp()
    assert float(move) == pytest.approx(0.1 * float(mu) * 10.8, rel=1e-9, abs=0)


def allowed(p, draws, cells):
    """How far frequencies may be from p, FALSE_ALARM over all cells together: Bernstein's inequality."""
    log = math.log(2 * cells / FALSE_ALARM) / draws
    return log / 3 + (log**2 / 9 + 2 * p * (1 - p) * log).sqrt()


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("jump", JUMPS)
def test_sampling_frequencies_are_the_transition(name, jump):
    """The pair (x1, x_next) has the law p(x1) q(x_next | x, x1); a jump by another draw is off by > 0.05."""
    path, (t, h), draws = PATHS[name](), (0.5, 0.25), 20_000
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


def test_a_drawn_symbol_is_the_first_beyond_its_uniform_number():
    """Of laws with zeros at both ends and in between, whatever their total; four draws from each."""
    laws = random(6, 3, 7) * 10.0 ** torch.arange(-9, 9, 3)[:, None, None]
    laws[..., [0, 1, 3, 6]] = 0.0
    laws[1, 1] = torch.tensor([0, 0, 1.0, 0, 0, 0, 0])
    laws[2, 2] = torch.tensor([1.0, 0, 0, 0, 0, 0, 3.0])
    numbers = random(4, 6, 3, seed=1)
    numbers[0], numbers[1, :, 1], numbers[1, :, 2] = 0.0, 1 - 2**-53, 1 / 4
    drawn = draw_symbols(laws, numbers)
    assert drawn.shape == (4, 6, 3) and drawn.dtype == torch.long
    for n in range(4):
        assert torch.equal(draw_symbols(laws, numbers[n]), drawn[n])
        for i in range(6):
            for j in range(3):
                law, u = [Fraction(p) for p in laws[i, j].tolist()], Fraction(float(numbers[n, i, j]))
                symbol = next(v for v in range(7) if sum(law[: v + 1]) > u * sum(law))
                assert drawn[n, i, j] == symbol and law[symbol] > 0
    assert draw_symbols(torch.ones(4), torch.arange(8) / 8.0).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    wide = torch.tensor([2.0**24, 1.0, 1.0])  # float32 loses the last two
    numbers = torch.tensor([2.0**24, 2.0**24 + 1], dtype=torch.float64) / (2**24 + 2)
    assert draw_symbols(wide, numbers + 1e-9).tolist() == [1, 2]
    smallest = torch.tensor([0.0, 5e-324, 0.0], dtype=torch.float64)  # 0.9 times it rounds to it
    assert draw_symbols(smallest, torch.tensor(0.9)) == 1
    assert draw_symbols(torch.ones(2, 0, 3), torch.zeros(5, 2, 0)).shape == (5, 2, 0)


@pytest.mark.parametrize("name", [*EXACT, "codebook"])
def test_a_token_draws_the_same_whatever_the_batch(name):
    """To the last bit: alone, in a batch, in chunks; and a generator stands for its float64 numbers."""
    codebook = name == "codebook"
    path = MetricPath.from_embeddings(embeddings(80, 8).float(), exact=False) if codebook else PATHS[name]()
    size, tokens = path.vocab_size, 200
    logits, uniforms = random(tokens, size, seed=2) * 4, random(2, tokens, seed=3)
    x = torch.arange(tokens) % size
    for t, h in STEPS:
        drawn = torch.stack(sample_step(path, logits, x, t, h, uniforms=uniforms))
        for part in (slice(0, 1), slice(7, 9), slice(50, 150)):
            alone = sample_step(path, logits[part], x[part], t, h, uniforms=uniforms[:, part])
            assert torch.equal(torch.stack(alone), drawn[:, part])
            kernels = (path.kernel(x[rows], drawn[1, rows], t, h) for rows in (part, slice(None)))
            assert torch.equal(next(kernels), next(kernels)[part])
        with patch.object(distances, "CHUNK", 3 * size):
            assert torch.equal(torch.stack(sample_step(path, logits, x, t, h, uniforms=uniforms)), drawn)
    seeded = sample_step(path, logits, x, t, h, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.stack(seeded), drawn)
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], x)


@pytest.mark.parametrize("name", EXACT)
def test_samples_of_the_path_have_its_marginals(name):
    path, draws, generator = PATHS[name](), 20_000, torch.Generator().manual_seed(1)
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
    path = PATHS[name]()
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


@pytest.mark.parametrize(
    "case", ["G01_mask_jump", "G03_uniform_stay_euler", "G05_metric_jump", "G08_last_step"]
)
def test_golden_steps(case):
    inputs, expected = GOLDEN[case]
    path, t, h = golden_path(inputs), inputs["t"], inputs["h"]
    jump, last = inputs.get("variant", "exp"), inputs.get("last_step", False)
    x, x_next, every = (
        torch.tensor(inputs["x"]),
        torch.tensor(inputs["x_next"]),
        torch.arange(path.vocab_size),
    )
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
        transition_log_prob(
            path, torch.tensor(inputs[key], dtype=torch.float64).log(), x, x_next, inputs["t"], inputs["h"]
        )
        for key in ("p_new", "p_old", "p_ref")
    )
    for log_ratio, key in [(new - old, "log_ratio_per_token"), (new - ref, "log_ratio_ref_per_token")]:
        assert_close(log_ratio, torch.tensor(expected[key], dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_table_error_is_bounded():
    """lambda from the table is exact at the nodes and too large in between, by at most the proven bound."""
    weight, (t, h) = embeddings(60, 3), (0.5, 0.125)
    exact, path = MetricPath.from_embeddings(weight), MetricPath.from_embeddings(weight, exact=False)
    d, beta, x = exact.distance.tensor, 3.0, torch.arange(60)
    assert_close(path.distance.from_symbol(x), d, rtol=1e-9, atol=1e-14)
    law = (-beta * d).softmax(0)
    mu = torch.stack([(law * (d[i] - d).clamp(min=0)).sum(0) for i in range(60)])  # [x, v], by definition
    log_z, table = exact.distance.log_z_and_table(beta)
    assert_close(log_z, (-beta * d).logsumexp(0))
    assert_close(exact.distance.look_up(table, x, d), mu, rtol=1e-12, atol=0)
    log_z, table = path.distance.log_z_and_table(beta)
    assert_close(log_z, (-beta * d).logsumexp(0)) and table.shape == (60, distances.TABLE_POINTS)
    nodes = (torch.linspace(0, 4, distances.TABLE_POINTS, dtype=torch.float64)) ** 2
    at_nodes = torch.stack([(law * (node - d).clamp(min=0)).sum(0) for node in nodes], 1)
    assert_close(table, at_nodes, rtol=1e-9, atol=1e-12)
    cell = torch.bucketize(d, nodes, right=True) - 1
    mass = torch.stack([(law * (cell == cell[i])).sum(0) for i in range(60)])
    bound = mass * nodes.diff()[cell] / 4
    error = path.distance.look_up(table, x, d) - mu
    assert (error >= -1e-12).all() and (error <= bound + 1e-12).all() and (error > 1e-6).any()
    logits, h_speed = random(60, 60, 60, seed=8) * 8, h * 10.8
    every = torch.meshgrid(x, x, indexing="ij")
    chances = [-torch.expm1(-h_speed * values) for values in (mu, mu + error)]
    assert (chances[0] - chances[1]).abs().max() < 5e-4
    log_prob = [transition_log_prob(p, logits, *every, t, h) for p in (exact, path)]
    assert (log_prob[0] - log_prob[1]).abs().max() < 2e-3 and not torch.equal(*log_prob)


def test_a_table_in_float32_is_accurate():
    """The codebook's setting, smaller: 300 symbols of 8 dimensions, early and late, against the matrix."""
    weight = torch.randn(300, 8, generator=torch.Generator().manual_seed(2))
    exact, path = MetricPath.from_embeddings(weight.double()), MetricPath.from_embeddings(weight, exact=False)
    logits = random(64, 300, seed=9, dtype=torch.float32) * 8
    for t, h in [(0.125, 0.125), (0.5, 0.125), (0.875, 0.1)]:
        x1 = torch.arange(64) * 4
        x = path.sample(x1, t, torch.Generator().manual_seed(0))
        x_next, x1 = sample_step(path, logits, x, t, h, generator=torch.Generator().manual_seed(1))
        assert_close(path.kernel(x, x1, t, h), exact.kernel(x, x1, t, h).float(), rtol=1e-3, atol=1e-5)
        expected = transition_log_prob(exact, logits.double(), x, x_next, t, h)
        log_prob = transition_log_prob(path, logits, x, x_next, t, h)
        assert log_prob.dtype == torch.float32 and path.marginal(x1, t).dtype == torch.float32
        assert_close(log_prob.double(), expected, rtol=0, atol=2e-3)
        assert (x_next != x).any() and (t > 0.5 or (x_next == x).any())


def test_large_vocabularies_get_no_matrix():
    for size, kind in [(2048, DistanceMatrix), (2049, EmbeddingDistance)]:
        with patch.object(DistanceMatrix, "__init__", lambda self, matrix: setattr(self, "tensor", matrix)):
            distance = MetricPath.from_embeddings(embeddings(size)).distance
        assert type(distance) is kind
        assert distance.tensor.shape == ((size, size) if kind is DistanceMatrix else (size, 2))
    assert type(embedding_distance(embeddings(7), exact=False)) is EmbeddingDistance
    assert embedding_distance(embeddings(7).half(), exact=False).tensor.dtype == torch.float32
    with patch.object(distances, "EXACT_VOCABULARY", 6):
        assert type(embedding_distance(embeddings(7), exact=True)) is DistanceMatrix


def test_results_do_not_depend_on_chunks():
    path = MetricPath.from_embeddings(embeddings(), exact=False)
    expected = transition_log_prob(path, LOGITS, X, X_NEXT, 0.5, 0.2)
    sizes = []
    with patch.object(distances, "CHUNK", 3 * V):
        fresh = MetricPath.from_embeddings(embeddings(), exact=False)
        assert_close(transition_log_prob(fresh, LOGITS, X, X_NEXT, 0.5, 0.2), expected, rtol=1e-12, atol=0)
        pairs = in_chunks(lambda a, b: sizes.append(len(a)) or torch.stack([a, 2 * b], -1), V, X, X_NEXT)
        assert torch.equal(pairs, torch.stack([X, 2 * X_NEXT], -1)) and sizes == [3] * 8 + [1]
        logits = torch.full((V, V, V), -1e9, dtype=torch.float64).scatter(-1, X_NEXT[..., None], 0.0)
        x_next, x1 = sample_step(path, logits, X, 0.5, 0.2, last=True)
        assert torch.equal(x_next, X_NEXT) and torch.equal(x1, X_NEXT)
    assert in_chunks(lambda a: a[:, None] * torch.ones(3), V, torch.zeros(0)).shape == (0, 3)


def test_tables_are_remembered_by_time():
    path = MetricPath(PATHS["metric"]().distance.tensor)
    for t in [0.2, 0.7, 0.2, 0.7, *(k / 100 for k in range(1, 60)), 0.2]:
        log_prob = transition_log_prob(path, LOGITS, X, X_NEXT, t, 0.1)
        fresh = transition_log_prob(MetricPath(path.distance.tensor), LOGITS, X, X_NEXT, t, 0.1)
        assert torch.equal(log_prob, fresh)
    assert len(path.distance.remembered) == distances.TABLES_KEPT
    with patch.object(path.distance, "tabulate", None):  # the latest are not computed again
        assert torch.equal(transition_log_prob(path, LOGITS, X, X_NEXT, 0.2, 0.1), log_prob)


@given(order=st.permutations(range(V)), name=st.sampled_from(["uniform", "mask, corrected", "metric"]))
def test_names_of_symbols_do_not_matter(order, name):
    path, order = PATHS[name](), torch.tensor(order)
    inverse = order.argsort()
    if isinstance(path, MetricPath):
        renamed = MetricPath(path.distance.tensor[order][:, order])
    else:
        mask_id = None if path.mask_id is None else int(inverse[path.mask_id])
        renamed = MixturePath(V, path.source, mask_id, path.power, path.corrector)
    log_prob = transition_log_prob(path, LOGITS, X, X_NEXT, 0.4, 0.3)
    other = transition_log_prob(renamed, LOGITS[..., order], inverse[X], inverse[X_NEXT], 0.4, 0.3)
    assert_close(other, log_prob, rtol=1e-10, atol=1e-12)


@given(shift=st.floats(-50, 50), name=st.sampled_from(EXACT), t=st.floats(0.01, 0.99), h=st.floats(1e-3, 1.0))
def test_log_probabilities_are_of_the_posterior_and_normalised(shift, name, t, h):
    path, logits = PATHS[name](), LOGITS[:, :1].expand(V, V, V)
    log_prob = transition_log_prob(path, logits, X, X_NEXT, t, h)
    assert_close(transition_log_prob(path, logits + shift, X, X_NEXT, t, h), log_prob, rtol=1e-9, atol=1e-11)
    assert_close(log_prob.exp().sum(-1), torch.ones(V, dtype=torch.float64), rtol=1e-10, atol=0)


@given(shape=st.lists(st.integers(0, 3), max_size=3), name=st.sampled_from(EXACT), last=st.booleans())
def test_any_shape_of_tokens(shape, name, last):
    path, count = PATHS[name](), math.prod(shape)
    x, x_next = (torch.arange(count).add(k).remainder(V).reshape(shape) for k in (0, 2))
    logits = random(count, V, seed=7)
    log_prob = transition_log_prob(path, logits.reshape(*shape, V), x, x_next, 0.5, 0.2, last=last)
    assert log_prob.shape == x.shape
    for i in range(count):
        alone = transition_log_prob(path, logits[i], x.flatten()[i], x_next.flatten()[i], 0.5, 0.2, last=last)
        assert_close(log_prob.flatten()[i], alone, rtol=1e-12, atol=0)
    generator = torch.Generator().manual_seed(0)
    drawn = sample_step(path, logits.reshape(*shape, V), x, 0.5, 0.2, last=last, generator=generator)
    sampled = (path.sample(x, 0.5, generator), path.draw_source(shape, generator))
    assert all(tokens.shape == x.shape and tokens.dtype == torch.long for tokens in [*drawn, *sampled])
    assert path.kernel(x, x_next, 0.5, 0.2).shape == path.marginal(x, 0.5).shape == (*shape, V)


TOKEN, FLAT = torch.tensor(1), torch.zeros(V)
METRIC, CORRECTED = PATHS["metric"](), PATHS["uniform, corrected"]()
BAD = {
    "source is uniform": [
        lambda: MixturePath(V, "noise"),
        lambda: MixturePath(V, "mask"),
        lambda: MixturePath(V, "uniform", 2),
        lambda: MixturePath(V, "mask", V),
    ],
    "needs vocab_size": [
        lambda: MixturePath(1),
        lambda: MixturePath(V, power=0.0),
        lambda: MixturePath(V, corrector=-0.1),
    ],
    "needs c > 0": [
        lambda: MetricPath(torch.ones(V, V), c=0.0),
        lambda: MetricPath(torch.ones(V, V), a=-1.0),
    ],
    "must be a \\(V, V\\) matrix": [lambda: MetricPath(torch.ones(V, 3)), lambda: MetricPath(torch.ones(V))],
    "distances must be finite": [
        lambda: MetricPath(-torch.ones(V, V)),
        lambda: MetricPath(torch.full((V, V), math.nan)),
    ],
    "embeddings must be": [
        lambda: MetricPath.from_embeddings(torch.zeros(V, 2)),
        lambda: MetricPath.from_embeddings(torch.ones(V)),
        lambda: MetricPath.from_embeddings(torch.full((V, 2), math.inf)),
    ],
    "infinite for corrector": [
        lambda: CORRECTED.rates(TOKEN, TOKEN, 0.0),
        lambda: transition_log_prob(MixturePath(V, power=0.5), FLAT, TOKEN, TOKEN, 0.0, 0.1),
    ],
    "starts at 0 <= t < 1": [
        lambda: METRIC.rates(TOKEN, TOKEN, 1.0),
        lambda: METRIC.kernel(TOKEN, TOKEN, -0.1, 0.1),
        lambda: sample_step(CORRECTED, FLAT, TOKEN, 1.0, 0.1),
        lambda: METRIC.is_identity(1.0),
    ],
    "needs h > 0 and a jump": [
        lambda: METRIC.kernel(TOKEN, TOKEN, 0.5, 0.0),
        lambda: transition_log_prob(METRIC, FLAT, TOKEN, TOKEN, 0.5, -0.1),
        lambda: transition_log_prob(CORRECTED, FLAT, TOKEN, TOKEN, 0.5, 0.1, jump="heun"),
    ],
    "t must lie in": [lambda: METRIC.marginal(TOKEN, 1.1), lambda: CORRECTED.sample(TOKEN, math.nan)],
    "tokens must be integers": [
        lambda: METRIC.marginal(TOKEN + V - 1, 0.5),
        lambda: CORRECTED.rates(TOKEN, TOKEN - 2, 0.5),
        lambda: transition_log_prob(METRIC, FLAT, TOKEN, TOKEN.float(), 0.5, 0.1),
        lambda: sample_step(CORRECTED, FLAT, TOKEN + V - 1, 0.5, 0.1),
    ],
    "ends in": [lambda: draw_symbols(torch.ones(2, V), torch.zeros(3))],
    "uniforms must lie in": [
        lambda: draw_symbols(torch.ones(V), torch.tensor(1.0)),
        lambda: sample_step(METRIC, FLAT, TOKEN, 0.5, 0.1, uniforms=torch.tensor([0.5, -0.1])),
    ],
    "a law to draw from": [
        lambda: draw_symbols(FLAT, torch.tensor(0.5)),
        lambda: draw_symbols(FLAT + math.inf, torch.tensor(0.5)),
        lambda: sample_step(METRIC, FLAT + math.nan, TOKEN, 0.5, 0.1),
    ],
    "too many, V = 2049": [
        lambda: transition_law(
            MetricPath.from_embeddings(embeddings(2049)), torch.zeros(2049), TOKEN, 0.5, 0.1
        )
    ],
    "need the shape": [
        lambda: transition_law(CORRECTED, FLAT.expand(2, V), TOKEN, 0.5, 0.1),
        lambda: sample_step(METRIC, FLAT, TOKEN, 0.5, 0.1, uniforms=torch.zeros(2, 1)),
        lambda: transition_log_prob(METRIC, FLAT[:-1], TOKEN, TOKEN, 0.5, 0.1),
        lambda: transition_log_prob(CORRECTED, FLAT.expand(2, V), TOKEN, TOKEN, 0.5, 0.1),
        lambda: sample_step(METRIC, FLAT, TOKEN[None], 0.5, 0.1),
    ],
}


@pytest.mark.parametrize("message", sorted(BAD))
def test_bad_arguments_are_refused(message):
    for call in BAD[message]:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
