"""The oracle's properties of replayed samples against independent means, and what goes wrong without the
correction, with it in the wrong place, and with samples that were selected."""

import itertools

import pytest
import torch

from oracle import checks, gaussian, properties_replay
from oracle.definitions import DEFINITIONS
from oracle.gaussian import Policy, Reward, Sampler
from oracle.properties import PROPERTIES, WRONGS
from oracle.wrong_replay import WRONG_REPLAY

torch.set_num_threads(1)
KINDS = {"flow": 0.7, "dance": 0.4, "cps": 0.6}
PAIR = {"sequence_weight", "clipped_surrogate"}


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def policy_of(seed, sigmas, size=0.3):
    N = len(sigmas) - 1
    return Policy(size * draw(seed, N, 1, 1) + 0.5, size * draw(seed + 1, N, 1), f64(sigmas))


# ---- the clip: naive and corrected


def one_step(clip, naive):
    """Minus the gradient in (A, b) of the loss of one replayed step at theta = old; the exact gradient of
    E_old[f] = m - (m^2 + std^2)/2 for f = x' - x'^2/2; and the share of the ratios that the clip cuts.

    All written out in D = 1: x' = mean + std z, by an equidistant rule, since the clip makes kinks.
    """
    x, on_x, on_v, std = 0.75, 0.8, -0.4, 0.5
    A, b = f64(0.5).requires_grad_(), f64(0.25).requires_grad_()
    mean, mean_off = on_x * x + on_v * (A * x + b), on_x * x + on_v * (0.2 * x + 1)
    exact = torch.stack(torch.autograd.grad(mean - (mean**2 + std**2) / 2, (A, b), retain_graph=True))
    z = torch.linspace(-10, 10, 40_001, dtype=torch.float64)
    mass = torch.softmax(-(z**2) / 2, 0)
    x_next = mean_off + std * z
    log_new, log_off, value = -((x_next - mean) ** 2) / (2 * std**2), -(z**2) / 2, x_next - x_next**2 / 2
    ratio = (log_new - (log_off if naive else log_new.detach())).exp()
    weight = 1.0 if naive else (log_new.detach() - log_off).exp()
    loss = mass @ (weight * torch.maximum(-value * ratio, -value * ratio.clamp(1 - clip, 1 + clip)))
    found = -torch.stack(torch.autograd.grad(loss, (A, b)))
    return found, exact, float(mass @ ((ratio - 1).abs() > clip).double())


def test_the_clip_spoils_the_naive_ratio_and_not_the_corrected_one():
    """At theta = old the naive ratio p_old/p_off is off 1 before anything is learned, and the clip cuts what
    is good and rarer under off: here all but 2 % of the gradient is lost, with 63 % of the ratios clipped."""
    for clip in (0.2, 1e6):
        found, exact, clipped = one_step(clip, naive=False)
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=0)
        assert clipped == 0
    found, exact, _ = one_step(1e6, naive=True)  # one step, no clip: the naive ratio is the weight
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=0)
    found, exact, clipped = one_step(0.2, naive=True)
    assert ((found - exact).abs() > 0.9 * exact.abs()).all()
    assert clipped > 0.6


# ---- closed forms


@pytest.mark.parametrize("kind", KINDS)
def test_ratio_gradient_against_quadrature(kind):
    """sum over the steps of E_old[p/p_old f]: quadrature over old's noise, autograd of the densities."""
    sigmas, reward, start = [0.9, 0.72, 0.5, 0.0], Reward(f64([1.0]), f64([[-0.5]])), f64([0.5])
    new, old = policy_of(0, sigmas), policy_of(2, sigmas)
    new = new._replace(A=(0.8 * old.A + 0.2 * new.A).requires_grad_(), b=new.b.requires_grad_())
    sampler, still = Sampler(kind, KINDS[kind], (0, 2)), f64([[0.0]])
    noise, mass = gaussian.quadrature(2, 30)
    chains = [gaussian.chain(policy, sampler) for policy in (new, old)]
    states = gaussian.trajectories(chains[1], start.expand(len(noise), 1), noise[..., None])
    log_new, log_old = (gaussian.step_log_densities(steps, states) for steps in chains)
    objective = mass @ ((log_new - log_old).exp().sum(1) * reward(states[:, -1]))
    quadrature = torch.autograd.grad(objective, (new.A, new.b))
    exact = gaussian.ratio_gradient(new, old, sampler, reward, start, still)
    for one, two in zip(exact, quadrature, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-9)
    at_old = gaussian.ratio_gradient(old, old, sampler, reward, start, still)
    for one, two in zip(at_old, gaussian.reward_gradient(old, sampler, reward, start, still), strict=True):
        torch.testing.assert_close(one[:2], two[:2], rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_log_weight_variance_of_a_step(kind):
    """The closed form in |dv| against the recursion over whole chains, from a state without variance."""
    sigmas, x = [1.0, 0.9, 0.72, 0.5, 0.27, 0.1, 0.0], f64([0.5])
    old, off = policy_of(4, sigmas), policy_of(6, sigmas)
    for k in range(5):
        one = [gaussian.chain(policy, Sampler(kind, KINDS[kind], (k, k + 1))) for policy in (off, old)]
        one = [gaussian.Chain(*(part[k : k + 1] for part in steps)) for steps in one]
        found = gaussian.log_weight_variance(*one, x, f64([[0.0]])).item()
        dv = ((old.A - off.A)[k] @ x + (old.b - off.b)[k]).item()
        exact = properties_replay.log_weight_variance(kind, KINDS[kind], sigmas[k], sigmas[k + 1], sigmas[1])
        assert found == pytest.approx(dv**2 * exact, rel=1e-11)


def test_log_weight_variance_of_the_flow_by_hand():
    """dt (1 + a^2/2)^2 (1 - s)/(a^2 s) inside; dt (1 - sigma_clip)/a^2 at the guarded step from s = 1, where
    the score term has no v in it: its coefficient is 1 - s = 0."""
    assert properties_replay.log_weight_variance("flow", 0.5, 0.8, 0.7, 0.9) == pytest.approx(
        0.1 * 1.125**2 * 0.2 / (0.25 * 0.8), rel=1e-12
    )
    assert properties_replay.log_weight_variance("flow", 0.5, 1.0, 0.9, 0.9) == pytest.approx(
        0.1 * 0.1 / 0.25, rel=1e-12
    )


# ---- selection


def test_choosing_the_best_of_a_group_breaks_the_correction():
    """E_off[w f] = E_old[f] for any stored sample of off, not for the best of a group of four: one step with
    three outcomes, all 81 groups enumerated. So even where off is old, and the weight 1."""
    f, p_old = f64([-1.0, 0.5, 2.0]), f64([0.4, 0.4, 0.2])
    for p_off in (f64([0.5, 0.3, 0.2]), p_old):
        weighted, any_one, best = p_old / p_off * f, 0.0, 0.0
        for group in itertools.product(range(3), repeat=4):
            chance = p_off[list(group)].prod().item()
            any_one += chance * weighted[group[0]].item()
            best += chance * weighted[max(group)].item()  # f rises with the outcome
        assert any_one == pytest.approx((p_old @ f).item(), abs=1e-12)
        assert best > (p_old @ f).item() + 1


# ---- wrong compositions


@pytest.mark.parametrize("wrong", WRONG_REPLAY, ids=range(len(WRONG_REPLAY)))
def test_wrong_compositions_fail_by_a_margin_and_are_named(wrong):
    """By more than 0.01 in a loss or a gradient whose entries are below 1; their functions are all right."""
    outcomes = [checks.measure(p, checks.version(wrong)) for p in PROPERTIES if set(p.needs) == PAIR]
    failed = [outcome for outcome in outcomes if not outcome.holds]
    off = [(o.measured.observed - o.measured.expected).abs().max().item() for o in failed]
    assert max(off) > 0.01
    diagnosis = checks.Diagnosis(outcomes, WRONGS)
    meanings = [diagnosis.meaning(outcome) for outcome in failed]
    assert meanings.count(wrong.sentence) > len(meanings) / 2


def measured_in(prop):
    """The name of the module that has the property."""
    return getattr(prop.measure, "func", prop.measure).__module__


REPLAYED = [p for p in PROPERTIES if measured_in(p) == properties_replay.__name__]


@pytest.mark.parametrize("prop", REPLAYED, ids=str)
def test_every_property_of_replayed_samples_is_failed_by_named_wrong_versions(prop):
    """By at least three of those whose functions take part in it."""
    assert checks.measure(prop, checks.Functions(DEFINITIONS)).holds
    concerned = (wrong for wrong in WRONGS if set(wrong.functions) <= set(prop.needs))
    failing = (wrong for wrong in concerned if not checks.measure(prop, checks.version(wrong)).holds)
    assert len(list(itertools.islice(failing, 3))) == 3
