"""Named wrong versions of the paths of discrete flows: their rates and their kernel."""

import math
from collections.abc import Callable

from oracle import chain
from oracle.chain import Metric, Mixture, Step, log
from oracle.checks import Wrong
from oracle.definitions_discrete import MetricPath, MixturePath, entrywise


def jump_chance(z: float, jump: str) -> float:
    return math.exp(chain.log_jump(z, jump))


def altered(
    base: type,
    *,
    rates: Callable = chain.rates,
    shown: Callable = lambda rates, x: rates,  # what the method `rates` makes of them
    time: Callable = lambda t, h: t,  # the time at which the kernel takes the rates
    total: Callable = lambda rates, law, x, v, t: sum(rates),
    chance: Callable = lambda z, s: jump_chance(z, s.jump),
    stay: Callable = lambda z, J, s: math.exp(chain.log_stay(z, s.jump)),
    target: Callable = lambda rate, total: rate / total,
    end: Callable = lambda x, v, y: float(y == v),
    column: Callable | None = None,  # of (path, x, y, step): in place of log q(y | x, .)
) -> type:
    """A path class with some of its ingredients exchanged."""

    class Altered(base):
        def rate_list(self, x, v, t):
            return rates(self.law, x, v, t)

        def rates(self, x, x1, t):
            return entrywise(lambda x, v: shown(self.rate_list(x, v, t), x), x, x1)

        def log_kernel_list(self, x, v, step):
            V = range(self.law.vocab_size)
            if step.last and end is not None:
                return [log(end(x, v, y)) for y in V]
            t = time(step.t, step.h)
            found = self.rate_list(x, v, t)
            rate = total(found, self.law, x, v, t)
            J, z = chance(step.h * rate, step), step.h * rate
            moves = [target(found[y], rate) * J if found[y] else 0.0 for y in V]
            return [log(stay(z, J, step) if y == x else moves[y]) for y in V]

        def log_kernel_column(self, x, x_next, t, h, jump="exp", last=False):
            if column is None:
                return super().log_kernel_column(x, x_next, t, h, jump, last)
            step = Step(t, h, last, jump)
            return entrywise(lambda x, y: column(self, x, y, step), x, x_next)

    return Altered


def right_column(path, x: int, y: int, step: Step) -> list[float]:
    return [path.log_kernel_list(x, v, step)[y] for v in range(path.law.vocab_size)]


def log_of_rounded(path, x: int, y: int, step: Step) -> list[float]:
    return [log(1 - math.fsum(map(math.exp, q[:x] + q[x + 1 :]))) if y == x else q[y]
            for q in (path.log_kernel_list(x, v, step) for v in range(path.law.vocab_size))]  # fmt: skip


def normalised_column(path, x: int, y: int, step: Step) -> list[float]:
    q = right_column(path, x, y, step)
    return [p - log(sum(map(math.exp, q))) if p > -math.inf else p for p in q]


def without_chance(path, x: int, y: int, step: Step) -> list[float]:
    """log(Q/lambda) of a move, without the chance that it happens."""
    if y == x or step.last:
        return right_column(path, x, y, step)
    by_v = [path.rate_list(x, v, step.t) for v in range(path.law.vocab_size)]
    return [log(rates[y] / sum(rates)) if rates[y] else -math.inf for rates in by_v]


def in_place(base: type) -> type:
    """A path whose kernel leaves X1 in x."""

    class InPlace(base):
        def kernel(self, x, x1, t, h, jump="exp", last=False):
            found = super().kernel(x, x1, t, h, jump, last)
            x.copy_(x1)
            return found

    return InPlace


KERNELS = {  # of either path
    "the first-order jump chance min(1, h lambda) is used always: jump = exp is ignored": {
        "chance": lambda z, s: min(1.0, z),
        "stay": lambda z, J, s: 1 - J,
    },
    "the jump chance 1 - exp(-h lambda) is used always: jump = euler is ignored": {
        "chance": lambda z, s: jump_chance(z, "exp"),
        "stay": lambda z, J, s: math.exp(-z),
    },
    "jump = euler does not stop at 1": {
        "chance": lambda z, s: z if s.jump == "euler" else jump_chance(z, "exp"),
        "stay": lambda z, J, s: 1 - J,
    },
    "the chances to jump and to stay are exchanged": {
        "chance": lambda z, s: 1 - jump_chance(z, s.jump) if z else 0.0,
        "stay": lambda z, J, s: 1 - J,
    },
    "h is missing in the jump chance: it is that of a step of length 1": {
        "chance": lambda z, s: jump_chance(z / s.h, s.jump),
        "stay": lambda z, J, s: 1 - J,
    },
    "moves are not divided by lambda: they are Q(x -> y) J": {"target": lambda rate, total: rate},
    "a token that jumps draws any symbol, not one by its rate": {
        "target": lambda rate, total: 1 / 3,
    },
    "the chance to stay is 1 in the kernel although moves have chances": {"stay": lambda z, J, s: 1.0},
    "the last step is taken by rates like the others: it must be X1 itself": {"end": None},
    "the last step keeps x: it must be X1": {"end": lambda x, v, y: float(y == x)},
    "the rates of a step are those at its end, t + h": {"time": lambda t, h: min(t + h, 0.96875)},
    "the rates of a step are those at its middle": {"time": lambda t, h: t + h / 2},
    "the rates have -lambda at x itself: they must be 0 there": {
        "shown": lambda rates, x: [-sum(rates) if y == x else rate for y, rate in enumerate(rates)]
    },
    "log_kernel_column returns the row over x_next, not the column over v": {
        "column": lambda path, x, y, step: path.log_kernel_list(x, y, step)
    },
    "log_kernel_column returns chances: their logarithm is missing": {
        "column": lambda path, x, y, step: [math.exp(p) for p in right_column(path, x, y, step)]
    },
    "log_kernel_column is normalised over v: it is no law of v": {"column": normalised_column},
    "log_kernel_column has log(Q/lambda) for a move: the chance to jump is missing": {
        "column": without_chance
    },
    "log_kernel_column exchanges x and x_next": {
        "column": lambda path, x, y, step: right_column(path, y, x, step)
    },
    "log_kernel_column ignores last": {
        "column": lambda path, x, y, step: right_column(path, x, y, step._replace(last=False))
    },
    "log_kernel_column ignores jump: it is that of exp": {
        "column": lambda path, x, y, step: right_column(path, x, y, step._replace(jump="exp"))
    },
}


# ---- mixture paths


def forward(law: Mixture, t: float) -> float:
    return (1 + law.corrector) * law.speed(t) / (1 - law.kappa(t))


def backward(law: Mixture, t: float) -> float:
    return law.corrector * law.speed(t) / law.kappa(t) if law.corrector else 0.0


def mixture(
    *,
    to_x1: Callable = forward,
    to_source: Callable = backward,
    p0: Callable = lambda law, x, y: law.p0(y),
    law_of: Callable = lambda law: law,
    itself: bool = False,
) -> dict:
    """The rates of a mixture path with some of their ingredients exchanged."""

    def rates(law, x, v, t):
        law = law_of(law)
        every = [to_x1(law, t) * (y == v) + to_source(law, t) * p0(law, x, y) for y in range(law.vocab_size)]
        return [rate if y != x or itself else 0.0 for y, rate in enumerate(every)]

    return {"rates": rates}


MIXTURE = {
    "k' is missing in the rates: they must be those of kappa's speed": mixture(
        to_x1=lambda law, t: (1 + law.corrector) / (1 - law.kappa(t)),
        to_source=lambda law, t: law.corrector / law.kappa(t),
    ),
    "the rate to X1 lacks 1/(1 - k)": mixture(to_x1=lambda law, t: (1 + law.corrector) * law.speed(t)),
    "the rate to X1 is k'/k: it must be k'/(1 - k)": mixture(
        to_x1=lambda law, t: (1 + law.corrector) * law.speed(t) / law.kappa(t) if t else 0.0
    ),
    "the rate to X1 is k'/(1 - t): it must be k'/(1 - k)": mixture(
        to_x1=lambda law, t: (1 + law.corrector) * law.speed(t) / (1 - t)
    ),
    "power is ignored: kappa = t": mixture(law_of=lambda law: law._replace(power=1.0)),
    "the speed of kappa is 1: it must be power t^(power - 1)": mixture(
        to_x1=lambda law, t: (1 + law.corrector) / (1 - law.kappa(t)),
    ),
    "the corrector is ignored": mixture(law_of=lambda law: law._replace(corrector=0.0)),
    "the corrector acts backward only: forward lacks it, so it is not free of divergence": mixture(
        to_x1=lambda law, t: law.speed(t) / (1 - law.kappa(t))
    ),
    "the corrector acts forward only: back to the source it must act, too": mixture(
        to_source=lambda law, t: 0.0
    ),
    "the corrector's way back has k'/(1 - k): it must be k'/k": mixture(
        to_source=lambda law, t: law.corrector * law.speed(t) / (1 - law.kappa(t))
    ),
    "the corrector's way back goes to every symbol at full rate: p0 is missing": mixture(
        p0=lambda law, x, y: 1.0
    ),
    "the uniform source gives 1/(V - 1) to the other symbols: it must be 1/V": mixture(
        p0=lambda law, x, y: law.p0(y) if law.source == "mask" else 1 / (law.vocab_size - 1)
    ),
    "the corrector of a masked source goes to all symbols: it must go to the mask": mixture(
        p0=lambda law, x, y: 1 / law.vocab_size
    ),
    "mask_id is ignored: the mask is the last symbol": mixture(
        p0=lambda law, x, y: float(y == law.vocab_size - 1) if law.source == "mask" else law.p0(y)
    ),
    "a token at X1 jumps to itself: its rate must be 0": mixture(itself=True),
    "lambda lacks the corrector's way back": {
        "total": lambda rates, law, x, v, t: forward(law, t) if x != v else sum(rates),
        "stay": lambda z, J, s: 1 - J,
    },
    "the jump chance is the exact (k(t + h) - k(t))/(1 - k(t)) of the path: it must come from h lambda": {
        "chance": lambda z, s: min(1.0, z) if s.jump == "euler" else z / (1 + z) if z else 0.0,
        "stay": lambda z, J, s: 1 - J,
    },
}


# ---- metric paths


def metric(
    *,
    weight: Callable = lambda law, x, y, v, t: law.law(v, t)[y],
    speed: Callable = lambda law, t: law.speed(t),
    gap: Callable = lambda far, near: max(far - near, 0.0),
    law_of: Callable = lambda law: law,
) -> dict:
    """The rates of a metric path with some of their ingredients exchanged."""

    def rates(law, x, v, t):
        law = law_of(law)
        d = [row[v] for row in law.distance]
        every = [weight(law, x, y, v, t) * speed(law, t) * gap(d[x], d[y]) for y in range(law.vocab_size)]
        return [rate if y != x else 0.0 for y, rate in enumerate(every)]

    return {"rates": rates}


def over_clean_tokens(law: Metric, x: int, y: int, v: int, t: float) -> float:
    """exp(-beta d(y, v)) normalised over v: of one row of the matrix, not one column."""
    energies = [math.exp(-law.beta(t) * d) for d in law.distance[y]]
    return energies[v] / sum(energies)


def embedded(distance: Callable) -> type:
    """A metric path whose from_embeddings has another distance, from two rows."""

    class Embedded(MetricPath):
        @classmethod
        def from_embeddings(cls, weight):
            rows = weight.double()
            return cls(distance(rows[:, None], rows[None]))

    return Embedded


def unit(rows):
    return rows / rows.norm(dim=-1, keepdim=True)


def speed_without(power: float) -> Callable:
    """beta' with 1/(1 - t)^power in place of its square."""
    return lambda law, t: law.speed(t) * (1 - t) ** (2 - power)


METRIC = {
    "rates to farther symbols are not 0: the absolute difference of distances is used": metric(
        gap=lambda far, near: abs(far - near)
    ),
    "the rates go away from X1: the difference of distances has the wrong sign": metric(
        gap=lambda far, near: max(near - far, 0.0)
    ),
    "the difference of distances is missing: every closer symbol counts alike": metric(
        gap=lambda far, near: float(near < far)
    ),
    "symbols as far from X1 as x get a rate, too: only closer ones may": metric(
        gap=lambda far, near: far - near if near != far else 0.25
    ),
    "the difference of distances is the distance from x: d(x, v) without d(y, v)": metric(
        gap=lambda far, near: far if near < far else 0.0
    ),
    "p_t is missing: the rates are beta' times the difference": metric(weight=lambda *_: 1.0),
    "the rates have p_t of x: it must be that of y": metric(weight=lambda law, x, y, v, t: law.law(v, t)[x]),
    "p_t is normalised over v: it must sum to 1 over the symbols": metric(weight=over_clean_tokens),
    "p_t is not normalised: it is exp(-beta d)": metric(
        weight=lambda law, x, y, v, t: math.exp(-law.beta(t) * law.distance[y][v])
    ),
    "p_t has exp(-d): beta is missing": metric(
        weight=lambda law, x, y, v, t: Metric(law.distance, 1.0, 0.9).law(v, 0.5)[y]
    ),
    "beta stands in place of beta'": metric(speed=lambda law, t: law.beta(t)),
    "beta' is missing": metric(speed=lambda law, t: 1.0),
    "beta' lacks 1/(1 - t)^2, the inner derivative": metric(speed=speed_without(0.0)),
    "beta' has 1/(1 - t): it must be squared": metric(speed=speed_without(1.0)),
    "beta' lacks the factor a": metric(speed=lambda law, t: law.speed(t) / law.a),
    "beta' has (t/(1 - t))^a: the power must be a - 1": metric(
        speed=lambda law, t: law.speed(t) * (t / (1 - t))
    ),
    "c is ignored: it is 3": metric(law_of=lambda law: law._replace(c=3.0)),
    "a is ignored: it is 0.9": metric(law_of=lambda law: law._replace(a=0.9)),
    "a is ignored: it is 1": metric(law_of=lambda law: law._replace(a=1.0)),
    "the distances are squared once more": metric(
        law_of=lambda law: law._replace(distance=tuple(tuple(d**2 for d in row) for row in law.distance))
    ),
    "t = 0 is replaced by a small time: the step there must be the identity": metric(
        speed=lambda law, t: law.speed(max(t, 1e-3))
    ),
    "beta' is infinite at t = 0: it must be set to 0": metric(
        speed=lambda law, t: law.speed(t) if t else math.inf
    ),
    "log q of a stay is log(1 - J), which rounding spoils: it must be -h lambda": {"column": log_of_rounded},
    "log q is the logarithm of float32 chances: far symbols become -inf": {
        "column": lambda path, x, y, step: [
            p if p > -103 else -math.inf for p in right_column(path, x, y, step)
        ]
    },
}
EMBEDDED = {
    "from_embeddings has the squared distance of directions: it must be squared twice": embedded(
        lambda a, b: (unit(a) - unit(b)).square().sum(-1)
    ),
    "from_embeddings has the distance of directions: it must be squared twice": embedded(
        lambda a, b: (unit(a) - unit(b)).norm(dim=-1)
    ),
    "from_embeddings does not normalise the embeddings": embedded(lambda a, b: (a - b).square().sum(-1) ** 2),
    "from_embeddings has one minus the cosine: it must be (2 - 2 cosine)^2": embedded(
        lambda a, b: 1 - (unit(a) * unit(b)).sum(-1)
    ),
    "from_embeddings averages over the embedding's dimensions: it must sum": embedded(
        lambda a, b: (unit(a) - unit(b)).square().mean(-1) ** 2
    ),
}

WRONG_PATHS = [
    Wrong(sentence, {base.__name__: altered(base, **parts)})
    for base, wrongs in ((MixturePath, {**KERNELS, **MIXTURE}), (MetricPath, {**KERNELS, **METRIC}))
    for sentence, parts in wrongs.items()
] + [Wrong("x is changed in place", {p.__name__: in_place(p)}) for p in (MixturePath, MetricPath)]
WRONG_PATHS += [Wrong(sentence, {"MetricPath": version}) for sentence, version in EMBEDDED.items()]
