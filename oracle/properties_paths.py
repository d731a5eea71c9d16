"""Properties of the paths of discrete flows: rates, and the kernel of one step given the clean token.

Every one looks at all pairs of symbols: (x, x1) for rates and kernels, (x, x_next) for columns.
"""

from functools import cache

import torch
from torch import Tensor

from oracle.calling import Functions
from oracle.chain import Step
from oracle.checks import Measured
from oracle.definitions_discrete import PATHS, Path
from oracle.measuring import check, draw, flat, numbers

Q_MIXTURE = (
    "Q(x -> y | v) = (1 + c) k'/(1 - k) [y = v] + c k'/k p0(y), y != x, k = t^power (arXiv 2407.15595)"
)
Q_METRIC = (
    "Q(x -> y | v) = p_t(y | v) beta' max(d(x, v) - d(y, v), 0), beta = c (t/(1 - t))^a (arXiv 2412.03487)"
)
KOLMOGOROV = "sum_x p_t(x | v) Q(x -> y | v) - p_t(y | v) lambda(y, v) = d/dt p_t(y | v)"
KERNEL = "q(y | x, v) = [y = x] (1 - J) + [y != x] Q(x -> y | v)/lambda J, J = "
JUMPS = {"exp": KERNEL + "1 - exp(-h lambda)", "euler": KERNEL + "min(1, h lambda)"}
LAST = "at the last step y = v"
DISTANCE = [[0.0, 1.5, 4.0, 9.0], [1.5, 0.0, 0.75, 4.0], [4.0, 0.75, 0.0, 4.0], [9.0, 4.0, 4.0, 0.0]]
MIXTURES = {  # name: arguments
    "uniform source": {"vocab_size": 4},
    "masked source": {"vocab_size": 4, "source": "mask", "mask_id": 2},
    "uniform source, kappa = t^2": {"vocab_size": 4, "power": 2.0},
    "masked source, kappa = t^3": {"vocab_size": 3, "source": "mask", "mask_id": 2, "power": 3.0},
    "uniform source, corrector": {"vocab_size": 4, "corrector": 0.75},
    "masked source, corrector, kappa = t^2": {
        "vocab_size": 4, "source": "mask", "mask_id": 1, "power": 2.0, "corrector": 0.5,
    },
}  # fmt: skip
METRICS = {"metric path": {}, "metric path, c and a as given": {"c": 1.25, "a": 0.625}}
T, H = 0.375, 0.125
SHORT = {"exp": 0.03125, "euler": 0.0078125}  # so that stays are not rare


def build(f: Functions, case: str) -> Path:
    """The path of a case, made by an implementation."""
    if case in MIXTURES:
        return f.MixturePath(**MIXTURES[case])
    return f.MetricPath(numbers(DISTANCE), **METRICS[case])


@cache
def exact(case: str) -> Path:
    return build(Functions(PATHS), case)


def pairs(V: int) -> tuple[Tensor, Tensor]:
    """All pairs of symbols: (V, V) each."""
    one, other = torch.meshgrid(torch.arange(V), torch.arange(V), indexing="ij")
    return one.clone(), other.clone()


def all_rates(path: Path, V: int, t: float) -> Tensor:
    """Q(x -> y | v) at [x, v, y]: flat, (V^3,)."""
    return flat((path.rates(*pairs(V), t), (V, V, V)))


def all_kernels(path: Path, V: int, *step) -> Tensor:
    """q(y | x, v) at [x, v, y]: flat, (V^3,)."""
    t, h, last, jump = Step(*step)
    return flat((path.kernel(*pairs(V), t, h, jump=jump, last=last), (V, V, V)))


def all_columns(path: Path, V: int, *step) -> Tensor:
    """log q(y | x, v) at [x, y, v]: flat, (V^3,)."""
    t, h, last, jump = Step(*step)
    return flat((path.log_kernel_column(*pairs(V), t, h, jump=jump, last=last), (V, V, V)))


def logs(observed: Tensor, expected: Tensor) -> Measured:
    """Log-chances, and where they must be -inf the chances."""
    never = expected == -torch.inf
    return Measured(
        torch.where(never, observed.exp(), observed),
        torch.where(never, 0.0, expected),
        1 + torch.where(never, 0.0, expected).abs(),
    )


def measured(observed: Tensor, expected: Tensor) -> Measured:
    return Measured(observed, expected, 1 + expected.abs())


# ---- rates


@check("MixturePath", "{case}: rates", Q_MIXTURE, cases=MIXTURES)
@check("MetricPath", "{case}: rates", Q_METRIC, cases=METRICS)
def _(f, case):
    V, times = exact(case).law.vocab_size, (T, 0.75)
    found, known = (torch.cat([all_rates(p, V, t) for t in times]) for p in (build(f, case), exact(case)))
    return measured(found, known)


@check("MixturePath", "{case}: the Kolmogorov equation", KOLMOGOROV, cases=MIXTURES)
@check("MetricPath", "{case}: the Kolmogorov equation", KOLMOGOROV, cases=METRICS)
def _(f, case):
    path, law = build(f, case), exact(case).law
    V, observed, expected = law.vocab_size, [], []
    for t in (0.25, 0.625):
        Q = all_rates(path, V, t).view(V, V, V)
        for v in range(V):
            p = numbers(law.law(v, t))
            observed.append(p @ Q[:, v] - p * Q[:, v].sum(1))
            expected.append(numbers(law.law_speed(v, t)))
    return measured(torch.cat(observed), torch.cat(expected))


@check("MetricPath", "no rate to a symbol that is as far from X1, or farther", Q_METRIC, tolerance=0.0)
def _(f):
    d = numbers(DISTANCE)
    farther = d.T[None] >= d[:, :, None]  # at [x, v, y]: d(y, v) >= d(x, v)
    observed = all_rates(build(f, "metric path"), 4, T)[farther.flatten()]
    return Measured(observed, torch.zeros_like(observed))


@check("MetricPath", "from_embeddings: distance of directions, squared twice",
       "d(x, v) = (|e_x/|e_x| - e_v/|e_v||^2)^2")  # fmt: skip
def _(f):
    if getattr(f.MetricPath, "from_embeddings", None) is None:
        raise NotImplementedError("MetricPath.from_embeddings")
    weight = draw(300, 5, 3) * numbers([[1.0], [0.5], [4.0], [2.0], [0.25]])
    found, known = (g.MetricPath.from_embeddings(weight.clone()) for g in (f, Functions(PATHS)))
    return measured(all_rates(found, 5, T), all_rates(known, 5, T))


# ---- the kernel


@check("MixturePath", "{case}: kernel, jump = exp", JUMPS["exp"], cases=MIXTURES)
@check("MetricPath", "{case}: kernel, jump = exp", JUMPS["exp"], cases=METRICS)
def _(f, case):
    return kernels(f, case, "exp")


@check("MixturePath", "{case}: kernel, jump = euler", JUMPS["euler"], cases=MIXTURES)
@check("MetricPath", "{case}: kernel, jump = euler", JUMPS["euler"], cases=METRICS)
def _(f, case):
    return kernels(f, case, "euler")


def kernels(f: Functions, case: str, jump: str) -> Measured:
    """A long and a short step."""
    V, steps = exact(case).law.vocab_size, [(T, H, False, jump), (0.25, SHORT[jump], False, jump)]
    found, known = (
        torch.cat([all_kernels(path, V, *step) for step in steps]) for path in (build(f, case), exact(case))
    )
    return Measured(found, known)


@check("MixturePath", "{case}: rows of the kernel sum to 1", "sum_y q(y | x, v) = 1", cases=MIXTURES)
@check("MetricPath", "{case}: rows of the kernel sum to 1", "sum_y q(y | x, v) = 1", cases=METRICS)
def _(f, case):
    path, V = build(f, case), exact(case).law.vocab_size
    steps = [(T, H, False, "exp"), (0.75, 0.25, False, "euler"), (0.875, 0.125, True, "exp")]
    observed = torch.cat([all_kernels(path, V, *step).view(-1, V).sum(1) for step in steps])
    return Measured(observed, torch.ones_like(observed))


@check("MixturePath", "jump = euler stops at 1 where h lambda is above", JUMPS["euler"], cases=(MIXTURES,))
@check("MetricPath", "jump = euler stops at 1 where h lambda is above", JUMPS["euler"], cases=(METRICS,))
def _(f, case):
    found, known = ([all_kernels(make(name), exact(name).law.vocab_size, 0.75, 0.25, False, "euler")
                     for name in case] for make in (lambda name: build(f, name), exact))  # fmt: skip
    return Measured(torch.cat(found), torch.cat(known))


@check("MixturePath", "{case}: the last step is X1", LAST, cases=MIXTURES)
@check("MetricPath", "{case}: the last step is X1", LAST, cases=METRICS)
def _(f, case):
    V, eye = exact(case).law.vocab_size, torch.eye(exact(case).law.vocab_size, dtype=torch.float64)
    found = [all_kernels(build(f, case), V, 0.875, 0.125, True, jump) for jump in JUMPS]
    return Measured(torch.cat(found), eye.repeat(2 * V, 1, 1).flatten())


@check("MixturePath", "{case}: log q(x_next | x, .) at the last step", LAST, cases=MIXTURES)
@check("MetricPath", "{case}: log q(x_next | x, .) at the last step", LAST, cases=METRICS)
def _(f, case):
    V, eye = exact(case).law.vocab_size, torch.eye(exact(case).law.vocab_size, dtype=torch.float64)
    found = [all_columns(build(f, case), V, 0.875, 0.125, True, jump) for jump in JUMPS]
    return logs(torch.cat(found), eye.repeat(2 * V, 1, 1).flatten().log())


PLAIN = ("uniform source", "masked source", "uniform source, kappa = t^2")


@check("MixturePath", "a token at X1 never leaves: c = 0", "lambda(v, v) = 0", cases=(PLAIN,), tolerance=0.0)
@check("MetricPath", "a token at X1 never leaves", "lambda(v, v) = 0", cases=(tuple(METRICS),), tolerance=0.0)
def _(f, case):
    observed = []
    for name in case:
        x, rows = torch.arange(4), [(T, H, "exp"), (0.75, 0.25, "euler")]
        found = [build(f, name).kernel(x.clone(), x.clone(), t, h, jump=jump) for t, h, jump in rows]
        observed += [flat((kernel, (4, 4))) for kernel in found]
    return Measured(torch.cat(observed), torch.eye(4, dtype=torch.float64).flatten().repeat(2 * len(case)))


@check("MixturePath", "where kappa' = 0, at t = 0 with kappa = t^2, the step is the identity",
       "lambda = 0: stay", cases=("uniform source, kappa = t^2",), tolerance=0.0)  # fmt: skip
@check("MetricPath", "at t = 0 the step is the identity", "beta' is set to 0 at t = 0, where it is infinite",
       cases=("metric path",), tolerance=0.0)  # fmt: skip
def _(f, case):
    path, eye = build(f, case), torch.eye(4, dtype=torch.float64)
    kernel = all_kernels(path, 4, 0.0, H)
    column = all_columns(path, 4, 0.0, H).exp()
    stays = torch.cat([eye[:, None].expand(4, 4, 4).flatten(), eye[:, :, None].expand(4, 4, 4).flatten()])
    return Measured(torch.cat([all_rates(path, 4, 0.0), kernel, column]), torch.cat([0 * kernel, stays]))


@check("MixturePath", "the defaults: uniform source, kappa = t, c = 0, exp", Q_MIXTURE)
def _(f):
    x, v = pairs(4)
    observed = flat((f.MixturePath(4).kernel(x, v, T, H), (4, 4, 4)))
    return Measured(observed, all_kernels(exact("uniform source"), 4, T, H, False, "exp"))


@check("MetricPath", "the defaults: c = 3, a = 0.9, exp", Q_METRIC)
def _(f):
    x, v = pairs(4)
    observed = flat((f.MetricPath(numbers(DISTANCE)).kernel(x, v, 0.25, H / 4), (4, 4, 4)))
    return Measured(observed, all_kernels(exact("metric path"), 4, 0.25, H / 4, False, "exp"))


@check("MixturePath", "{case}: symbols of any shape", "entry by entry", cases=("masked source",))
@check("MetricPath", "{case}: symbols of any shape", "entry by entry", cases=("metric path",))
def _(f, case):
    path, known, observed, expected = build(f, case), exact(case), [], []
    for shape in ((), (3,), (2, 3, 2)):
        x, y = ((draw(seed, *shape).abs() * 64).long() % 4 for seed in (301, 302))
        for part, p in ((observed, path), (expected, known)):
            part += [flat((p.rates(x, y, T), (*shape, 4))), flat((p.kernel(x, y, T, H), (*shape, 4)))]
            part.append(flat((p.log_kernel_column(x, x, T, H, jump="exp", last=False), (*shape, 4))).exp())
    return measured(torch.cat(observed), torch.cat(expected))


# ---- columns: all v at once, in logarithms


@check("MixturePath", "{case}: log q(x_next | x, .), jump = exp", JUMPS["exp"], cases=MIXTURES)
@check("MetricPath", "{case}: log q(x_next | x, .), jump = exp", JUMPS["exp"], cases=METRICS)
def _(f, case):
    return columns(f, case, T, SHORT["exp"], "exp")


@check("MixturePath", "{case}: log q(x_next | x, .), jump = euler", JUMPS["euler"], cases=MIXTURES)
@check("MetricPath", "{case}: log q(x_next | x, .), jump = euler", JUMPS["euler"], cases=METRICS)
def _(f, case):
    return columns(f, case, T, SHORT["euler"], "euler")


def columns(f: Functions, case: str, t: float, h: float, jump: str) -> Measured:
    V = exact(case).law.vocab_size
    found, known = (all_columns(path, V, t, h, False, jump) for path in (build(f, case), exact(case)))
    return logs(found, known)


@check("MetricPath", "log q where the chance is 0 in float32, near the data", JUMPS["exp"])
def _(f):
    """beta is 34 at t = 0.9375, so that p_t reaches exp(-309), and stays exp(-h lambda) with it."""
    return columns(f, "metric path", 0.9375, 0.03125, "exp")
