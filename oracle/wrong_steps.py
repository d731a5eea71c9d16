"""Named wrong versions of the grid, the sampler steps, the log-probability and the KL.

A deviation is compared with what these give, to say what it means. Each departs from the definition in one
place, and is a mistake that is easily made: the name is right and the numbers are plausible.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch

from oracle import definitions as exact
from oracle.checks import Wrong

GRID = {
    "the grid runs from 0 to 1: it must fall from 1 to 0": lambda n, a=1.0: exact.shifted_sigmas(n, a).flip(
        0
    ),
    "the shift is applied twice": lambda n, shift=1.0: exact.shifted_sigmas(n, shift**2),
    "the shift is inverted: above 1 it must raise the sigmas": lambda n, a=1.0: exact.shifted_sigmas(
        n, 1 / a
    ),
    "the shift is ignored": lambda n, shift=1.0: exact.shifted_sigmas(n),
    "the shift multiplies the sigmas but they are not renormalised": lambda n, a=1.0: (
        exact.shifted_sigmas(n) * a
    ),
}

ODE = {
    "the sign of dt is wrong: the step moves towards the noise": lambda x, v, s, s1: x + v * (s - s1),
    "sigma_next is ignored: the step goes all the way to sigma = 0": lambda x, v, s, s1: x - v * s,
    "dt is missing: the whole velocity is subtracted": lambda x, v, s, s1: x - v,
    "the step has sqrt(dt) in place of dt": lambda x, v, s, s1: x - v * math.sqrt(s - s1),
    "no gradient flows through v": lambda x, v, s, s1: x - v.detach() * (s - s1),
    "no gradient flows through x": lambda x, v, s, s1: x.detach() - v * (s - s1),
    "no gradient flows through x and v": lambda x, v, s, s1: (x - v * (s - s1)).detach(),
}


def step(
    *,
    std_power: float = 0.5,
    guarded: Callable = lambda s, clip: min(s, clip),  # sigma in the 1 - sigma of g
    top: Callable = lambda s, clip: s,  # sigma in its numerator
    g: Callable = lambda kind, a, ratio: a * math.sqrt(ratio) if kind == "flow" else a,
    pull: Callable = lambda g, s, dt: g**2 / (2 * s),
    eps_hat: Callable = lambda x, v, s: x + (1 - s) * v,
    x0_hat: Callable = lambda x, v, s: x - s * v,
    direction: float = 1.0,
    cps_std: Callable = lambda s, s1, a: s1 * math.sin(a * math.pi / 2),
    cps_keep: Callable = lambda s1, std: math.sqrt(max(s1**2 - std**2, 0)),
    finish: Callable = lambda mean, std, x: (mean, std),
) -> Callable:
    """`transition` with some of its ingredients exchanged."""

    def transition(x, v, sigma, sigma_next, *, noise_level, sigma_clip, kind="flow"):
        dt = sigma - sigma_next
        if kind == "cps":
            std = cps_std(sigma, sigma_next, noise_level)
            mean = (1 - sigma_next) * x0_hat(x, v, sigma) + cps_keep(sigma_next, std) * eps_hat(x, v, sigma)
        else:
            low = max(1 - guarded(sigma, sigma_clip), 1e-20)
            g_now = g(kind, noise_level, top(sigma, sigma_clip) / low)
            std = g_now * dt**std_power
            mean = x - (direction * v + pull(g_now, sigma, dt) * eps_hat(x, v, sigma)) * dt
        return finish(mean, torch.tensor(std, dtype=torch.float64), x)

    return transition


def flow_only(g: Callable) -> Callable:
    """The diffusion coefficient of a wrong `flow`, with dance as it should be."""
    return lambda kind, a, ratio: g(a, ratio) if kind == "flow" else a


def ode_mean(x, v, sigma, sigma_next, **rest):
    return exact.ode_step(x, v, sigma, sigma_next), exact.transition(x, v, sigma, sigma_next, **rest)[1]


def default_level(x, v, sigma, sigma_next, *, noise_level, **rest):
    return exact.transition(x, v, sigma, sigma_next, noise_level=noise_level or 0.7, **rest)


def default_kind(kind: str) -> Callable:
    return lambda *args, kind=kind, **rest: exact.transition(*args, kind=kind, **rest)


TRANSITION = {
    "step_std lacks sqrt(dt): KL and log-prob are off by the step size": step(std_power=0),
    "step_std has dt in place of sqrt(dt)": step(std_power=1),
    "step_std is the variance, not the standard deviation": step(finish=lambda mean, std, x: (mean, std**2)),
    "the guard at sigma = 1 tests for equality: it never fires at 0.999999, where step_std explodes": step(
        guarded=lambda s, clip: clip if s == 1 else s
    ),
    "the guard at sigma = 1 fires next to 1 only: it must fire wherever sigma > sigma_clip": step(
        guarded=lambda s, clip: clip if s > 0.9995 else s
    ),
    "sigma_clip is not used: flow is singular at sigma = 1": step(guarded=lambda s, clip: s),
    "sigma_clip is used at every step: it belongs to sigma > sigma_clip": step(guarded=lambda s, clip: clip),
    "sigma_clip also replaces sigma in the numerator of g": step(top=lambda s, clip: min(s, clip)),
    "g is inverted: sqrt((1 - sigma) / sigma)": step(g=flow_only(lambda a, ratio: a / math.sqrt(ratio))),
    "g lacks its square root: a sigma / (1 - sigma)": step(g=flow_only(lambda a, ratio: a * ratio)),
    "g has the square root over a too: sqrt(a sigma / (1 - sigma))": step(
        g=flow_only(lambda a, ratio: math.sqrt(a * ratio))
    ),
    "g lacks its numerator: a / sqrt(1 - sigma)": step(top=lambda s, clip: 1.0),
    "flow has dance's constant g = a": step(g=lambda kind, a, ratio: a),
    "dance has flow's g = a sqrt(sigma / (1 - sigma))": step(g=lambda kind, a, ratio: a * math.sqrt(ratio)),
    "the drift is not corrected for the added noise: the mean is the ODE step": ode_mean,
    "the drift correction has the wrong sign": step(pull=lambda g, s, dt: -(g**2) / (2 * s)),
    "the drift correction lacks the 1/2 of g^2 / (2 sigma)": step(pull=lambda g, s, dt: g**2 / s),
    "the drift correction lacks the 1 / sigma of g^2 / (2 sigma)": step(pull=lambda g, s, dt: g**2 / 2),
    "the drift correction has g in place of g^2": step(pull=lambda g, s, dt: g / (2 * s)),
    "the drift correction contains dt twice: it uses step_std^2 for g^2": step(
        pull=lambda g, s, dt: g**2 * dt / (2 * s)
    ),
    "the drift correction lacks dt": step(pull=lambda g, s, dt: g**2 / (2 * s) / dt),
    "the drift correction acts on x: it must act on x + (1 - sigma) v": step(eps_hat=lambda x, v, s: x),
    "eps_hat is x + sigma v: it must be x + (1 - sigma) v": step(eps_hat=lambda x, v, s: x + s * v),
    "eps_hat is x - (1 - sigma) v: it must be x + (1 - sigma) v": step(
        eps_hat=lambda x, v, s: x - (1 - s) * v
    ),
    "the sign of dt is wrong: v moves the mean towards the noise": step(direction=-1.0),
    "cps: step_std has sigma in place of sigma_next": step(
        cps_std=lambda s, s1, a: s * math.sin(a * math.pi / 2),
    ),
    "cps: step_std is sigma_next a: the sine is missing": step(cps_std=lambda s, s1, a: s1 * a),
    "cps: the pi / 2 in the sine is missing": step(cps_std=lambda s, s1, a: s1 * math.sin(a)),
    "cps: the sine has pi in place of pi / 2": step(cps_std=lambda s, s1, a: s1 * math.sin(a * math.pi)),
    "cps: step_std is a cosine: it must be sigma_next sin(a pi / 2)": step(
        cps_std=lambda s, s1, a: s1 * math.cos(a * math.pi / 2)
    ),
    "cps: step_std has a factor sqrt(dt) too many: it is that of the whole step": step(
        cps_std=lambda s, s1, a: s1 * math.sin(a * math.pi / 2) * math.sqrt(s - s1)
    ),
    "cps: eps_hat keeps sigma_next - step_std: it must be sqrt(sigma_next^2 - step_std^2)": step(
        cps_keep=lambda s1, std: s1 - std
    ),
    "cps: eps_hat keeps its whole share sigma_next although noise is added": step(
        cps_keep=lambda s1, std: s1
    ),
    "cps: x0_hat is x + sigma v: it must be x - sigma v": step(x0_hat=lambda x, v, s: x + s * v),
    "step_std has a lower bound: at noise_level = 0 the step is not the ODE step": step(
        finish=lambda mean, std, x: (mean, std.clamp(min=1e-3))
    ),
    "noise_level = 0 is taken for 'not given': the step is not the ODE step": default_level,
    "no gradient flows through v into the mean": lambda x, v, *a, **k: exact.transition(
        x, v.detach(), *a, **k
    ),
    "no gradient flows through x into the mean": lambda x, v, *a, **k: exact.transition(
        x.detach(), v, *a, **k
    ),
    "no gradient flows into the mean": step(finish=lambda mean, std, x: (mean.detach(), std)),
    "the default kind is cps: it must be flow": default_kind("cps"),
    "the default kind is dance: it must be flow": default_kind("dance"),
}


def log_prob(
    *,
    reduce: Callable = lambda terms: terms.sum(1),
    square: Callable = lambda d, std: d**2 / (2 * std**2),
    scale: Callable = lambda std: math.log(std),
    constant: float = 0.5 * math.log(2 * math.pi),
    detach: bool = False,
) -> Callable:
    """`gaussian_log_prob` with some of its ingredients exchanged."""

    def gaussian_log_prob(x_next, mean, step_std):
        mean = mean.detach() if detach else mean
        terms = -square(x_next - mean, float(step_std)) - scale(float(step_std)) - constant
        return reduce(terms.flatten(1))

    return gaussian_log_prob


def log_prob_once(x_next, mean, step_std):
    square = (((x_next - mean) / step_std) ** 2).flatten(1).sum(1)
    return -square / 2 - math.log(step_std) - 0.5 * math.log(2 * math.pi)


LOG_PROB = {
    "log_prob is the mean over the entries: it must be their sum": log_prob(reduce=lambda t: t.mean(1)),
    "log_prob is summed over the batch too": log_prob(reduce=lambda t: t.sum().expand(len(t))),
    "log_prob lacks the normalising constant log(2 pi) / 2": log_prob(constant=0.0),
    "log_prob lacks -log(step_std): it is not normalised": log_prob(scale=lambda std: 0.0),
    "log_prob is the bare -(x_next - mean)^2 / (2 step_std^2): it is not normalised": log_prob(
        scale=lambda std: 0.0, constant=0.0
    ),
    "log_prob is the bare -(x_next - mean)^2: without step_std it is no density": log_prob(
        square=lambda d, std: d**2, scale=lambda std: 0.0, constant=0.0
    ),
    "the normalising constants are subtracted once a sample, not once an entry": log_prob_once,
    "log_prob lacks the 1/2 of (x_next - mean)^2 / (2 step_std^2)": log_prob(square=lambda d, s: d**2 / s**2),
    "step_std is used as the variance": log_prob(
        square=lambda d, std: d**2 / (2 * std), scale=lambda std: 0.5 * math.log(std)
    ),
    "the square is divided by step_std: it must be divided by step_std^2": log_prob(
        square=lambda d, std: d**2 / (2 * std)
    ),
    "the square is not divided by step_std^2": log_prob(square=lambda d, std: d**2 / 2),
    "log(step_std) has the wrong sign": log_prob(scale=lambda std: -math.log(std)),
    "log(step_std) is subtracted as log(step_std^2)": log_prob(scale=lambda std: 2 * math.log(std)),
    "the constant is log(2 pi): it must be log(2 pi) / 2 per entry": log_prob(constant=math.log(2 * math.pi)),
    "the square has the wrong sign": log_prob(square=lambda d, std: -(d**2) / (2 * std**2)),
    "the whole has the wrong sign: it is -log_prob": lambda *args: -exact.gaussian_log_prob(*args),
    "it is the density: its logarithm is missing": lambda *args: exact.gaussian_log_prob(*args).exp(),
    "no gradient flows through the mean: nothing is learned": log_prob(detach=True),
}

KL = {
    "the KL is the mean over the entries: it must be their sum": lambda m, r, s: (
        exact.gaussian_kl(m, r, s) / m[0].numel()
    ),
    "the KL is summed over the batch too": lambda m, r, s: exact.gaussian_kl(m, r, s).sum().expand(len(m)),
    "the KL lacks the 1/2 of |mean - mean_ref|^2 / (2 step_std^2)": lambda m, r, s: (
        2 * exact.gaussian_kl(m, r, s)
    ),
    "the KL has 1/4 in place of 1/2": lambda m, r, s: exact.gaussian_kl(m, r, s) / 2,
    "the KL is divided by step_std: it must be divided by step_std^2": lambda m, r, s: (
        exact.gaussian_kl(m, r, s) * float(s)
    ),
    "the KL is not divided by step_std^2": lambda m, r, s: exact.gaussian_kl(m, r, s) * float(s) ** 2,
    "the KL is not squared: it is the norm": lambda m, r, s: exact.gaussian_kl(m, r, s).sqrt(),
    "the KL has absolute differences in place of squares": lambda m, r, s: (
        (m - r).abs().flatten(1).sum(1) / (2 * float(s) ** 2)
    ),
    "the KL has the wrong sign": lambda m, r, s: -exact.gaussian_kl(m, r, s),
    "no gradient flows through the mean: the KL cannot hold the policy": lambda m, r, s: exact.gaussian_kl(
        m.detach(), r, s
    ),
}


def kl_with_step_size(power: int) -> dict[str, Callable]:
    """A transition that remembers dt and a KL that multiplies by a power of it."""
    last = SimpleNamespace(dt=1.0)

    def transition(x, v, sigma, sigma_next, **rest):
        last.dt = sigma - sigma_next
        return exact.transition(x, v, sigma, sigma_next, **rest)

    return {
        "transition": transition,
        "gaussian_kl": lambda mean, ref, std: exact.gaussian_kl(mean, ref, std) * last.dt**power,
    }


WRONG_STEPS = [
    *(Wrong(sentence, {"shifted_sigmas": f}) for sentence, f in GRID.items()),
    *(Wrong(sentence, {"ode_step": f}) for sentence, f in ODE.items()),
    *(Wrong(sentence, {"transition": f}) for sentence, f in TRANSITION.items()),
    *(Wrong(sentence, {"gaussian_log_prob": f}) for sentence, f in LOG_PROB.items()),
    *(Wrong(sentence, {"gaussian_kl": f}) for sentence, f in KL.items()),
    Wrong("the KL divides by g^2 and so loses the factor dt: it is too small by dt", kl_with_step_size(1)),
    Wrong("the KL has a factor dt too many in the denominator: it is too large", kl_with_step_size(-1)),
]
