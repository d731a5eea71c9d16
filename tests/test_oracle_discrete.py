"""The discrete half of the oracle against independent means: closed forms, finite differences, sampling,
goldens and another library; and the facts of training that the project rests on, with the variants that break
them.

A sampling test raises a false alarm with probability 1e-6, at any seed. tests/data/discrete_golden.json comes
from two independent enumerations, one of which uses the standard library only (see its meta).
"""

import itertools
import json
import math
from pathlib import Path
from statistics import NormalDist

import pytest
import torch

from oracle import chain, checks
from oracle.chain import Metric, Mixture, Step
from oracle.definitions import DEFINITIONS
from oracle.definitions_discrete import MetricPath, MixturePath, sample_step
from oracle.definitions_discrete import Path as OraclePath
from oracle.properties import CONTRACT, PROPERTIES, WRONGS

torch.set_num_threads(1)
FALSE_ALARM = 1e-6
CASES = json.loads((Path(__file__).parent / "data" / "discrete_golden.json").read_text())["cases"]
GOLDEN = {case["id"][:3]: (case["inputs"], case["expected"]) for case in CASES}


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def metric(seed, V, c=3.0, a=0.9):
    """A metric path of random embeddings in three dimensions."""
    return Metric(chain.fudoki_distance(draw(seed, V, 3).tolist()), c, a)


PATHS = {
    "uniform": Mixture(3),
    "masked": Mixture(3, "mask", 1, power=2.0),
    "corrector": Mixture(3, corrector=0.7),
    "masked, corrector": Mixture(3, "mask", 2, corrector=0.4),
    "metric": metric(0, 3),
    "metric, other c and a": metric(1, 3, 1.5, 0.7),
}
BOTH = ("corrector", "metric")  # one path of each kind, with every term


def steps_on(path, K, jump="exp"):
    """K uneven steps; the first is not at 0 where a corrector would divide by kappa = 0."""
    grid = [(k / K) ** 1.25 for k in range(K + 1)]
    steps = chain.steps_of(grid, jump)
    if getattr(path, "corrector", 0) and K > 1:
        steps[0] = steps[0]._replace(t=0.05)
    return steps


def toy(path, D, seed=10):
    """Old and new logits (S, D, V), start and reward (S,)."""
    V = path.vocab_size
    old = draw(seed, V**D, D, V)
    if getattr(path, "source", "") == "mask":  # no clean token is a mask; revealed tokens carry over
        for (s, state), d in itertools.product(enumerate(chain.states(V, D)), range(D)):
            old[s, d, path.mask_id] = -math.inf
            if state[d] != path.mask_id:
                old[s, d] = torch.where(torch.arange(V) == state[d], 0.0, -math.inf)
    return old, old + 0.5 * draw(seed + 1, V**D, D, V), draw(seed + 2, V**D).softmax(0), draw(seed + 3, V**D)


# ---- goldens


def golden_path(inputs):
    if inputs["path"] == "metric" and "embeddings" in inputs:
        return Metric(chain.fudoki_distance(inputs["embeddings"]), inputs["c"], inputs["a"])
    if inputs["path"] == "metric":
        return metric(0, inputs["vocab"])
    power = {0.4: 1.0, 0.25: 2.0}[inputs["kappa"]]
    path = Mixture(inputs["vocab"], inputs["source"], inputs.get("mask_id"), power, inputs["corrector"])
    assert (path.kappa(inputs["t"]), path.speed(inputs["t"])) == (inputs["kappa"], inputs["dkappa"])
    return path


def close(found, expected):
    found = found if isinstance(found, torch.Tensor) else f64(found)
    torch.testing.assert_close(found, f64(expected), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", ["G01", "G03", "G05", "G08"])
def test_golden_steps(name):
    inputs, expected = GOLDEN[name]
    path, x, y = golden_path(inputs), inputs["x"], inputs["x_next"]
    step = Step(inputs["t"], inputs["h"], inputs.get("last_step", False), inputs.get("variant", "exp"))
    kernel, old = chain.kernel_table(path, step)[x], f64(inputs["p_old"])
    new = f64(inputs["p_new"]).log().requires_grad_()
    transition = chain.token_transition(new.softmax(-1), kernel)[y]
    old_transition = chain.token_transition(old, kernel)[y]
    close(kernel[:, y], expected["q_col"])
    close(kernel.sum(1), expected["q_row_sum"])
    close(old_transition, expected["p_old_transition"])
    close(transition.detach(), expected["p_new_transition"])
    close(transition.detach() / old_transition, expected["ratio"])
    close(kernel[:, y] / old_transition, expected["w"])
    close(transition.detach().log(), expected["logprob_new"])
    close(torch.autograd.grad(transition.log(), new)[0], expected["grad_logprob_wrt_logits_new"])
    rates = [chain.rates(path, x, v, step.t) for v in range(path.vocab_size)]
    if "lambda_by_v" in expected:
        close([sum(row) for row in rates], expected["lambda_by_v"])
    if "jump_prob" in expected:
        other = (x + 1) % 4  # any clean token that is not x
        close(1 - kernel[other, x], expected["jump_prob"])
    if "beta" in expected:
        close([path.beta(step.t), path.speed(step.t)], [expected["beta"], expected["dbeta"]])
        close(path.distance, expected["distance_matrix"])
        close(f64([path.law(v, step.t) for v in range(4)]).T, expected["p_t_given_v"])


def test_golden_joint_step_of_three_tokens():
    inputs, expected = GOLDEN["G09"]
    path, A = golden_path(inputs), inputs["advantage"]
    table = chain.kernel_table(path, Step(inputs["t"], inputs["h"], False, inputs["variant"]))
    rows = {
        name: [
            chain.token_transition(f64(p), table[x]) for p, x in zip(inputs[name], inputs["x"], strict=True)
        ]
        for name in ("p_old", "p_new", "p_ref")
    }
    at = {name: torch.stack([p[y] for p, y in zip(row, inputs["x_next"], strict=True)]).log()
          for name, row in rows.items()}  # fmt: skip
    log_ratio, against_ref = at["p_new"] - at["p_old"], at["p_new"] - at["p_ref"]
    close(log_ratio, expected["log_ratio_per_token"])
    close(against_ref, expected["log_ratio_ref_per_token"])
    ratios = {how: f64(chain.aggregate(log_ratio.tolist(), [True] * 3, how)).exp()
              for how in ("product", "geometric", "token")}  # fmt: skip
    close(ratios["product"], [expected["ratio_product"]])
    close(ratios["geometric"], [expected["ratio_geometric_mean"]])
    clipped = {k: r.clamp(1 - inputs["eps_low"], 1 + inputs["eps_high"]) for k, r in ratios.items()}
    loss = {how: -torch.minimum(ratios[how] * A, clipped[how] * A).mean() for how in ratios}
    names = {"product": "loss_product", "geometric": "loss_geometric", "token": "loss_token_mean"}
    for how, name in names.items():
        close(loss[how], expected[name])
    p, ref = f64(inputs["p_new"]), f64(inputs["p_ref"])
    close(chain.kl(p, ref), expected["kl_posterior_per_token"])
    close(
        chain.kl(torch.stack(rows["p_new"]), torch.stack(rows["p_ref"])), expected["kl_transition_per_token"]
    )
    close((-against_ref).exp() - 1 + against_ref, expected["k3_per_token"])
    close(against_ref.exp() - 1 - against_ref, expected["reversed_k3_per_token"])
    mean = against_ref.mean()
    close(mean.exp() - 1 - mean, expected["reversed_k3_of_mean"])


def test_golden_advantages():
    inputs, expected = GOLDEN["G10"]
    rewards = f64([inputs["rewards"]])
    off = rewards - rewards.mean()
    close(rewards.mean(), expected["mean"])
    close(rewards.std(correction=0), expected["std_population"])
    close(rewards.std(), expected["std_unbiased"])
    found = DEFINITIONS["group_advantages"](rewards, eps=inputs["eps"])
    close(found[0], expected["advantages_population"])
    close((off / (rewards.std() + inputs["eps"]))[0], expected["advantages_unbiased"])
    close(DEFINITIONS["group_advantages"](rewards, std="none")[0], expected["advantages_no_std"])


# ---- paths and kernels


@pytest.mark.parametrize("name", PATHS)
def test_rates_solve_the_kolmogorov_equation(name):
    """Against central differences of p_t, which also checks law_speed."""
    path, V, change = PATHS[name], 3, 1e-5
    for t, v in itertools.product((0.1, 0.4, 0.8), range(V)):
        p = f64(path.law(v, t))
        assert p.sum().item() == pytest.approx(1, abs=1e-14)
        Q = f64([chain.rates(path, x, v, t) for x in range(V)])
        flow = p @ Q - p * Q.sum(1)
        slope = (f64(path.law(v, t + change)) - f64(path.law(v, t - change))) / (2 * change)
        torch.testing.assert_close(flow, slope, rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(f64(path.law_speed(v, t)), slope, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("jump", ["exp", "euler"])
def test_rows_sum_to_1(name, jump):
    path = PATHS[name]
    old, *_ = toy(path, 2)
    for step in steps_on(path, 4, jump):
        torch.testing.assert_close(chain.kernel_table(path, step).sum(-1), torch.ones(3, 3).double())
        torch.testing.assert_close(chain.transition_matrix(path, old, step).sum(1), torch.ones(9).double())


@pytest.mark.parametrize("name", [name for name in PATHS if "metric" not in name])
@pytest.mark.parametrize("jump", ["exp", "euler"])
def test_closed_form_of_mixture_transitions(name, jump):
    """Of p(x) and p(y) alone, with a = (1 + c) k'/(1 - k), b = c k'/k and f(l) = J(h l)/l."""
    path, (t, h), p = PATHS[name], (0.5, 0.2), draw(20, 3).softmax(0).tolist()
    k, speed, c = path.kappa(t), path.speed(t), path.corrector
    a, b = (1 + c) * speed / (1 - k), c * speed / k
    table = chain.kernel_table(path, Step(t, h, False, jump))

    def J(z):
        return 1 - math.exp(-z) if jump == "exp" else min(1.0, z)

    for x, y in itertools.product(range(3), repeat=2):
        l0 = b * (1 - path.p0(x))
        l1, f = a + l0, {z: J(h * z) / z if z else 0.0 for z in (l0, a + l0)}
        if x == y:
            exact = p[x] * (1 - J(h * l0)) + (1 - p[x]) * (1 - J(h * l1))
        else:
            back = b * path.p0(y)
            exact = p[y] * (a + back) * f[l1] + p[x] * back * f[l0] + (1 - p[x] - p[y]) * back * f[l1]
        assert chain.token_transition(f64(p), table[x])[y].item() == pytest.approx(exact, abs=1e-14)


def test_lambda_of_the_metric_path_from_sorted_sums():
    """lambda(x, v) = beta' (D S0 - S1): mass and first moment of p_t(. | v) below D = d(x, v)."""
    path, t = metric(2, 6), 0.4
    for x, v in itertools.product(range(6), repeat=2):
        d, law = [row[v] for row in path.distance], path.law(v, t)
        near = [(p, e) for p, e in zip(law, d, strict=True) if e < d[x]]
        exact = path.speed(t) * (d[x] * sum(p for p, _ in near) - sum(p * e for p, e in near))
        assert sum(chain.rates(path, x, v, t)) == pytest.approx(exact, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", ["uniform", "corrector", "metric"])
def test_many_small_steps_reach_the_data(name):
    """With the exact posterior of p_t the law of the end tends to the data's."""
    path, data, errors = PATHS[name], f64([0.6, 0.1, 0.3]), []
    for K in (64, 128, 256):
        first = 1 if name == "corrector" else 0
        law = data @ f64([path.law(v, first / K) for v in range(3)])
        for k in range(first, K):
            likelihood = f64([path.law(v, k / K) for v in range(3)])  # [v, x]
            posterior = (data[:, None] * likelihood).T
            posterior = posterior / posterior.sum(1, keepdim=True)
            table = chain.kernel_table(path, Step(k / K, 1 / K, k == K - 1))
            rows = [chain.token_transition(p, q) for p, q in zip(posterior, table, strict=True)]
            law = law @ torch.stack(rows)
        errors.append((law - data).abs().sum().item() / 2)
    assert errors[2] < 0.65 * errors[1] < 0.65**2 * errors[0] and errors[2] < 0.005, errors


def test_marginals_against_sampling():
    """100,000 trajectories of two tokens, every cell's z-score with a Bonferroni bound."""
    path, count = PATHS["corrector"], 100_000
    logits, _, start, _ = toy(path, 2)
    every, generator = torch.tensor(chain.states(3, 2)), torch.Generator().manual_seed(3)
    steps = steps_on(path, 3)
    laws = chain.marginals(path, logits, steps, start)
    s = torch.multinomial(start, count, replacement=True, generator=generator)
    bound = -NormalDist().inv_cdf(FALSE_ALARM / 2 / (9 * len(steps)))
    for step, law in zip(steps, laws[1:], strict=True):
        x, _ = sample_step(
            OraclePath(path), logits[s], every[s], step.t, step.h, last=step.last, generator=generator
        )
        s = x[:, 0] * 3 + x[:, 1]
        found = torch.bincount(s, minlength=9) / count
        assert ((found - law).abs() < bound * (law * (1 - law) / count).sqrt()).all()


@pytest.mark.parametrize("corrector", [0.0, 0.5])
@pytest.mark.parametrize("source", ["uniform", "mask"])
def test_the_mixture_kernel_is_that_of_flow_matching(source, corrector):
    """Its MixtureDiscreteEulerSolver on a tabular model of two tokens, kappa = t^2: the law of the end."""
    from flow_matching import solver
    from flow_matching.path import MixtureDiscreteProbPath
    from flow_matching.path.scheduler import PolynomialConvexScheduler
    from flow_matching.utils import ModelWrapper

    path, count = Mixture(3, source, 1 if source == "mask" else None, 2.0, corrector), 100_000
    logits, _, start, _ = toy(path, 2, seed=30)
    table = logits.softmax(-1)

    class Table(ModelWrapper):
        def forward(self, x, t, **extras):
            return table[x[:, 0] * 3 + x[:, 1]]

    torch.manual_seed(5)
    s = torch.multinomial(start, count, replacement=True)
    grid = [0.25, 0.5, 0.8, 1.0]
    source_law = f64([path.p0(x) for x in range(3)])
    probability_path = MixtureDiscreteProbPath(PolynomialConvexScheduler(2.0))
    euler = solver.MixtureDiscreteEulerSolver(Table(None), probability_path, 3, source_law)
    x = torch.tensor(chain.states(3, 2))[s]
    end = euler.sample(x, None, corrector, torch.float64, time_grid=f64(grid))
    law = chain.marginals(path, logits, chain.steps_of(grid), start)[-1]
    found = torch.bincount(end[:, 0] * 3 + end[:, 1], minlength=9) / count
    bound = -NormalDist().inv_cdf(FALSE_ALARM / 2 / 9)
    assert ((found - law).abs() <= bound * (law * (1 - law) / count).sqrt() + 1e-12).all()


def test_released_sampler_is_another_kernel_for_more_than_one_draw():
    """The jump by the mean rate of n draws of X1."""
    path, step, posterior = metric(0, 3), Step(0.5, 0.125), draw(21, 3, 3).softmax(-1)
    table = chain.kernel_table(path, step)
    exact = torch.stack([chain.token_transition(p, q) for p, q in zip(posterior, table, strict=True)])
    torch.testing.assert_close(chain.released_table(path, posterior, step, 1), exact, rtol=0, atol=1e-14)
    for n in (2, 3):
        found = chain.released_table(path, posterior, step, n)
        torch.testing.assert_close(found.sum(1), torch.ones(3).double())
        assert (found - exact).abs().sum(1).max() / 2 > 0.05


# ---- ratios of one token


def transitions_of(path, step, seed):
    """(p_old, p_new, column, p_old(y | x), p_new(y | x)) for all possible x -> y."""
    old, new = draw(seed, 3, 3).softmax(-1), draw(seed + 1, 3, 3).softmax(-1)
    table = chain.kernel_table(path, step)
    for x, y in itertools.product(range(3), repeat=2):
        column = table[x, :, y]
        if (old[x] * column).sum() > 0:
            yield old[x], new[x], column, (old[x] * column).sum(), (new[x] * column).sum()


@pytest.mark.parametrize("name", PATHS)
def test_the_ratio_is_the_mean_posterior_ratio_given_the_transition(name):
    for old, new, column, p_old, p_new in transitions_of(PATHS[name], Step(0.4, 0.2), 40):
        mean = (chain.responsibility(old, column) * new / old).sum()
        assert mean.item() == pytest.approx((p_new / p_old).item(), rel=1e-13)


def estimate(old, new, column):
    return lambda draws: chain.mc_ratio(new, old, column, draws)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_mc_with_the_used_draw_is_unbiased_for_every_n(name, n):
    for old, new, column, p_old, p_new in transitions_of(PATHS[name], Step(0.4, 0.05), 42):
        found = chain.expected_over_draws(estimate(old, new, column), old, column, n)
        assert found.item() == pytest.approx((p_new / p_old).item(), rel=1e-13)


@pytest.mark.parametrize("name", BOTH)
def test_mc_of_fresh_draws_alone_is_biased_like_one_over_n(name):
    worst = []
    for n in (1, 2, 4):
        biases = []
        for old, new, column, p_old, p_new in transitions_of(PATHS[name], Step(0.4, 0.05), 42):
            found = chain.expected_over_draws(estimate(old, new, column), old, column, n, used=False)
            biases.append(abs(found - p_new / p_old).item())
        worst.append(max(biases))
    assert worst[0] > worst[1] > worst[2] > 0.01


def test_one_draw_is_the_ratio_at_the_used_clean_token():
    old, new, column = draw(44, 4).softmax(0), draw(45, 4).softmax(0), f64([0.5, 0.25, 0.0, 1.0])
    for v in (0, 1, 3):
        assert chain.mc_ratio(new, old, column, [v]).item() == pytest.approx((new / old)[v].item(), rel=1e-14)


@pytest.mark.parametrize("name", PATHS)
def test_gradient_is_responsibility_minus_posterior(name):
    table = chain.kernel_table(PATHS[name], Step(0.4, 0.2))
    for x, y in itertools.product(range(3), repeat=2):
        leaf = draw(46 + x, 3).requires_grad_()
        value = chain.token_transition(leaf.softmax(-1), table[x])[y]
        if value > 0:
            exact = chain.responsibility(leaf.detach().softmax(-1), table[x, :, y]) - leaf.detach().softmax(
                -1
            )
            torch.testing.assert_close(torch.autograd.grad(value.log(), leaf)[0], exact, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_mean_gradient_of_mc_is_exact_at_the_old_policy(name, n):
    """Of log r_hat with weights that are constants; averaged over the draws, given the transition."""
    table, logits = chain.kernel_table(PATHS[name], Step(0.4, 0.1)), draw(50, 3)
    old = logits.softmax(0)
    for x, y in itertools.product(range(3), repeat=2):
        column = table[x, :, y]
        if column.sum() > 0:
            exact = chain.responsibility(old, column) - old

            def slope(draws, column=column):
                leaf = logits.clone().requires_grad_()
                value = chain.mc_ratio(leaf.softmax(0), old, column, draws).log()
                return torch.autograd.grad(value, leaf)[0]

            found = chain.expected_over_draws(slope, old, column, n)
            torch.testing.assert_close(found, exact, rtol=0, atol=1e-14)


def test_steps_and_posteriors_without_freedom_have_no_gradient():
    """The identity step of the metric path at t = 0, and a posterior of one symbol, as top-k = 1 makes it."""
    path, leaf = metric(3, 4), draw(51, 4).requires_grad_()
    identity = chain.kernel_table(path, Step(0.0, 0.125))
    for x in range(4):
        stay = chain.token_transition(leaf.softmax(0), identity[x])[x]
        assert stay.log().item() == pytest.approx(0, abs=1e-15)
        assert torch.autograd.grad(stay.log(), leaf)[0].abs().max() < 1e-16
    one = torch.where(torch.arange(4) == 2, leaf, -torch.inf)
    moves = chain.token_transition(one.softmax(0), chain.kernel_table(path, Step(0.5, 0.01))[0])
    for y in (0, 2):
        grad = torch.autograd.grad(moves[y].log(), leaf, retain_graph=True)[0]
        assert 0 < moves[y] < 1 and (grad == 0).all()


@pytest.mark.parametrize("name", PATHS)
def test_transition_kl_is_at_most_posterior_kl(name):
    """Data processing; with equality at the last step. Of both kinds of jump."""
    path = PATHS[name]
    gaps = []
    for seed, jump in itertools.product(range(20), ("exp", "euler")):
        p, ref = (2 * draw(seed, 3)).softmax(0), (2 * draw(seed + 100, 3)).softmax(0)
        table = chain.kernel_table(path, Step(0.1 + 0.04 * seed, 0.1, False, jump))
        for x in range(3):
            rows = [chain.token_transition(q, table[x]) for q in (p, ref)]
            gaps.append((chain.kl(p, ref) - chain.kl(*rows)).item())
    assert min(gaps) >= -1e-15 and max(gaps) > 0.1
    last = chain.kernel_table(path, Step(0.9, 0.1, True))[0]
    rows = [chain.token_transition(q, last) for q in (p, ref)]
    assert chain.kl(*rows).item() == pytest.approx(chain.kl(p, ref).item(), rel=1e-14)


def test_transition_kl_of_a_mixture_path_in_closed_form():
    """c = 0: sum over y != x of P p log(p/ref), and the stay's, with P = J(h k'/(1 - k))."""
    path, (t, h) = PATHS["uniform"], (0.5, 0.2)
    p, ref = draw(60, 3).softmax(0), draw(61, 3).softmax(0)
    P, table = 1 - math.exp(-h / (1 - t)), chain.kernel_table(path, Step(t, h))
    for x in range(3):
        move = sum(P * p[y] * (p[y] / ref[y]).log() for y in range(3) if y != x)
        stay, stay_ref = 1 - P + P * p[x], 1 - P + P * ref[x]
        found = chain.kl(*(chain.token_transition(q, table[x]) for q in (p, ref)))
        assert found.item() == pytest.approx((move + stay * (stay / stay_ref).log()).item(), rel=1e-13)


# ---- chains

CHAINS = [("corrector", 1, 4), ("metric", 1, 4), ("uniform", 2, 2), ("metric", 2, 2), ("masked", 2, 2)]
IDS = [f"{name}, D = {D}, K = {K}" for name, D, K in CHAINS]


@pytest.mark.parametrize(("name", "D", "K"), CHAINS, ids=IDS)
def test_expected_reward_and_its_gradient(name, D, K):
    """Against the sum over all trajectories, and central differences of that."""
    path = PATHS[name]
    old, _, start, reward = toy(path, D)
    steps = steps_on(path, K)
    paths, chance = chain.possible(path, old, steps, start)
    assert chance.sum().item() == pytest.approx(1, abs=1e-12)
    exact = chain.expected_reward(path, old, steps, start, reward).item()
    assert exact == pytest.approx((chance @ reward[paths[:, -1]]).item(), abs=1e-12)
    gradient = chain.reward_gradient(path, old, steps, start, reward)
    places = [place for place in itertools.product(*map(range, old.shape)) if old[place].isfinite()]
    for place in places[::5]:
        change = torch.zeros_like(old)
        change[place] = 1e-5
        sides = [chain.expected_reward(path, old + s * change, steps, start, reward).item() for s in (1, -1)]
        assert (sides[0] - sides[1]) / 2e-5 == pytest.approx(gradient[place].item(), abs=1e-8)


@pytest.mark.parametrize(("name", "D", "K"), CHAINS, ids=IDS)
def test_product_of_step_ratios_is_the_change_of_measure(name, D, K):
    path = PATHS[name]
    old, new, start, reward = toy(path, D)
    steps = steps_on(path, K)
    paths, chance = chain.possible(path, old, steps, start)
    log_ratios = [chain.step_log_probs(path, p, steps, paths) for p in (new, old)]
    ratio = (log_ratios[0] - log_ratios[1]).sum(1).exp()
    exact = chain.expected_reward(path, new, steps, start, reward).item()
    assert (chance * ratio * reward[paths[:, -1]]).sum().item() == pytest.approx(exact, abs=1e-12)
    without_one = (log_ratios[0] - log_ratios[1])[:, :-1].sum(1).exp()
    assert abs((chance * without_one * reward[paths[:, -1]]).sum().item() - exact) > 1e-3


def gradients(path, D, K, log_ratio, seed=10):
    """The enumerated policy gradient that a log-ratio gives, and the exact one."""
    old, _, start, reward = toy(path, D, seed)
    steps = steps_on(path, K)
    found = chain.policy_gradient(
        lambda logits, paths: log_ratio(path, logits, steps, paths), path, old, steps, start, reward
    )
    return found, chain.reward_gradient(path, old, steps, start, reward)


def all_steps(path, logits, steps, paths):
    return chain.step_log_probs(path, logits, steps, paths).sum(1)


@pytest.mark.parametrize(("name", "D", "K"), CHAINS, ids=IDS)
def test_mean_of_reward_times_score_is_the_exact_gradient(name, D, K):
    found, exact = gradients(PATHS[name], D, K, all_steps)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-13)
    assert exact.abs().max() > 1e-3


def test_the_geometric_mean_has_the_exact_gradient_over_the_number_of_tokens():
    """At theta_old; away from it, it is biased."""
    found, exact = gradients(PATHS["metric"], 2, 2, lambda *args: all_steps(*args) / 2)
    torch.testing.assert_close(found, exact / 2, rtol=0, atol=1e-13)


def only_moves(path, logits, steps, paths):
    """Of the tokens that move, one token a state."""
    logs = chain.step_log_probs(path, logits, steps, paths)
    last = torch.tensor([step.last for step in steps])
    return torch.where((paths[:, 1:] != paths[:, :-1]) | last, logs, 0.0).sum(1)


@pytest.mark.parametrize("name", ["uniform", "metric"])
def test_dropping_the_tokens_that_stay_is_biased(name):
    found, exact = gradients(PATHS[name], 1, 3, only_moves)
    assert (found - exact).norm() > 0.05 * exact.norm()


def test_dropping_the_tokens_that_stay_is_exact_for_masks():
    """With carry-over of revealed tokens: the chance to stay does not depend on the policy."""
    found, exact = gradients(PATHS["masked"], 1, 3, only_moves)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("name", "K", "holds"), [
    ("uniform", 1, True), ("uniform", 2, False), ("uniform", 3, False),
    ("metric", 1, True), ("metric", 2, True), ("metric", 3, False),
])  # fmt: skip
def test_mean_field_is_exact_only_for_a_single_step(name, K, holds):
    """Two steps of the metric path are one: that at t = 0 is the identity. Baseline: the mean reward."""
    path = PATHS[name]
    old, new, start, reward = toy(path, 2)
    steps = steps_on(path, K)
    reward = reward - chain.expected_reward(path, old, steps, start, reward)
    paths, chance = chain.possible(path, old, steps, start)
    found = chain.policy_gradient(
        lambda logits, paths: chain.mean_field_log_ratio(logits, old, paths, 3),
        path,
        old,
        steps,
        start,
        reward,
    )
    exact = chain.reward_gradient(path, old, steps, start, reward)
    assert ((found - exact).norm() < 1e-12 * exact.norm()) == holds
    ratio = chain.mean_field_log_ratio(new, old, paths, 3).exp()
    value = (chance * ratio * reward[paths[:, -1]]).sum().item()
    expected = chain.expected_reward(path, new, steps, start, reward).item()
    assert (abs(value - expected) < 1e-12) == holds
    assert holds or (found - exact).norm() > 0.1 * exact.norm()


def test_aggregation_by_hand():
    values, mask = [1.0, 2.0, 4.0, 100.0], [True, False, True, False]
    assert chain.aggregate(values, mask, "product") == [5.0]
    assert chain.aggregate(values, mask, "geometric") == [2.5]
    assert chain.aggregate(values, mask, "token") == [1.0, 0.0, 4.0, 0.0]


# ---- the properties

DISCRETE = [p for p in PROPERTIES if p.function in CONTRACT[CONTRACT.index("MixturePath") :]]


@pytest.mark.parametrize("function", CONTRACT[CONTRACT.index("MixturePath") :])
def test_every_discrete_property_is_failed_by_a_named_wrong_version(function):
    """And none by the definitions."""
    wrongs = [wrong for wrong in WRONGS if set(wrong.functions) == {function}]
    concerned = [p for p in DISCRETE if p.function == function]
    assert len(wrongs) >= 13 and len(concerned) >= 8
    for prop in concerned:
        assert checks.measure(prop, checks.Functions(DEFINITIONS)).holds, str(prop)
        failing = (not checks.measure(prop, checks.version(wrong)).holds for wrong in wrongs)
        assert any(failing), str(prop)


def test_paths_of_the_contract_have_their_fields():
    assert MixturePath(4, "mask", 3, 2.0, 0.5).law == Mixture(4, "mask", 3, 2.0, 0.5)
    distance = f64([[0.0, 1.0], [1.0, 0.0]])
    assert MetricPath(distance).law == Metric(((0.0, 1.0), (1.0, 0.0)))
