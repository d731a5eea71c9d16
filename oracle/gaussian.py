"""The linear-Gaussian policy: every quantity of a continuous flow and its samplers in closed form.

With a velocity that is affine in the state, v(x, sigma[k]) = A[k] x + b[k], every sampler step is affine with
Gaussian noise, x[k+1] = M[k] x[k] + c[k] + std[k] z[k]. So moments, densities, expected rewards, their
gradients, weights of off-policy samples and ODE completions are exact up to rounding: no sampling.

All of it is float64 on the CPU and written from the equations, with nothing of the code that it checks.
D is the dimension of a state (1 to 4), N the number of steps; step k goes from sigma[k] to sigma[k+1].
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Policy(NamedTuple):
    """v(x, sigma[k]) = A[k] x + b[k] on the grid sigmas."""

    A: Tensor  # (N, D, D)
    b: Tensor  # (N, D)
    sigmas: Tensor  # (N+1,) from at most 1 down to 0


class Sampler(NamedTuple):
    """Which steps are stochastic, and how: those with window[0] <= k < window[1]."""

    kind: str  # ode, flow, dance or cps
    noise_level: float
    window: tuple[int, int]


class Chain(NamedTuple):
    """x[k+1] = M[k] x[k] + c[k] + std[k] z[k] with z ~ N(0, I); std[k] = 0 is a deterministic step."""

    M: Tensor  # (N, D, D)
    c: Tensor  # (N, D)
    std: Tensor  # (N,)


class Reward(NamedTuple):
    """r(x) = linear x + x' quadratic x."""

    linear: Tensor  # (D,)
    quadratic: Tensor  # (D, D)

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., D). Returns (...)."""
        return x @ self.linear + torch.einsum("...i,ij,...j->...", x, self.quadratic, x)


def data_policy(mean: Tensor, cov: Tensor, sigmas: Tensor) -> Policy:
    """The exact velocity E[eps - x0 | x] of the flow x = (1 - sigma) x0 + sigma eps for data N(mean, cov).

    (eps - x0, x) is jointly Gaussian, so A = Cov(eps - x0, x) Cov(x)^-1 with Cov(eps - x0, x) = sigma I -
    (1 - sigma) cov, and b follows from E[eps - x0] = -mean. mean (D,), cov (D, D), sigmas (N+1,).
    """
    eye = torch.eye(len(mean), dtype=torch.float64)
    A, b = [], []
    for sigma in sigmas[:-1].tolist():
        slope = (sigma * eye - (1 - sigma) * cov) @ torch.linalg.inv(flow_cov(cov, sigma))
        A.append(slope)
        b.append(-mean - (1 - sigma) * slope @ mean)
    return Policy(torch.stack(A), torch.stack(b), sigmas)


def flow_cov(cov: Tensor, sigma: float) -> Tensor:
    """Covariance of x = (1 - sigma) x0 + sigma eps: what a sampler that keeps the marginals has at sigma."""
    return (1 - sigma) ** 2 * cov + sigma**2 * torch.eye(len(cov), dtype=torch.float64)


def step_coefficients(
    sigma: float, sigma_next: float, kind: str, noise_level: float = 0.0, sigma_clip: float = 1.0
) -> tuple[float, float, float]:
    """One sampler step as mean = on_x x + on_v v, with standard deviation std. Returns (on_x, on_v, std).

    ode     x - v dt
    flow    x - (v + g^2 / (2 sigma) (x + (1 - sigma) v)) dt, std g sqrt(dt), g = a sqrt(sigma / (1 - sigma));
            where sigma > sigma_clip, 1 - sigma_clip replaces 1 - sigma in g    (arXiv 2505.05470)
    dance   the same with g = a                                                (arXiv 2505.07818)
    cps     (1 - sigma') x0_hat + sqrt(sigma'^2 - std^2) eps_hat, std sigma' sin(a pi / 2),
            x0_hat = x - sigma v, eps_hat = x + (1 - sigma) v                  (arXiv 2509.05952)
    """
    dt = sigma - sigma_next
    if kind == "ode":
        return 1.0, -dt, 0.0
    if kind == "cps":
        std = sigma_next * math.sin(noise_level * math.pi / 2)
        keep = math.sqrt(max(sigma_next**2 - std**2, 0.0))  # rounding can make it negative at a = 1
        on_x = (1 - sigma_next) + keep
        on_v = (1 - sigma_next) * -sigma + keep * (1 - sigma)
        return on_x, on_v, std
    g2 = noise_level**2
    if kind == "flow":
        g2 *= sigma / (1 - (sigma_clip if sigma > sigma_clip else sigma))
    pull = g2 / (2 * sigma)
    return 1 - pull * dt, -dt - pull * (1 - sigma) * dt, math.sqrt(g2 * dt)


def chain(policy: Policy, sampler: Sampler) -> Chain:
    """The affine-Gaussian chain of a policy under a sampler. Differentiable in policy.A and policy.b."""
    sigmas = policy.sigmas.tolist()
    eye = torch.eye(policy.b.shape[1], dtype=torch.float64)
    M, c, stds = [], [], []
    for k in range(len(sigmas) - 1):
        inside = sampler.window[0] <= k < sampler.window[1]
        on_x, on_v, std = step_coefficients(
            sigmas[k], sigmas[k + 1], sampler.kind if inside else "ode", sampler.noise_level, sigmas[1]
        )
        M.append(on_x * eye + on_v * policy.A[k])
        c.append(on_v * policy.b[k])
        stds.append(std)
    return Chain(torch.stack(M), torch.stack(c), torch.tensor(stds, dtype=torch.float64))


def moments(steps: Chain, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (N+1, D) and covariance (N+1, D, D) of every x[k], from those of x[0]."""
    means, covs = [mean], [cov]
    eye = torch.eye(len(mean), dtype=torch.float64)
    for M, c, std in zip(*steps, strict=True):
        means.append(M @ means[-1] + c)
        covs.append(M @ covs[-1] @ M.T + std**2 * eye)
    return torch.stack(means), torch.stack(covs)


def log_density(x: Tensor, mean: Tensor, cov: Tensor) -> Tensor:
    """log N(x; mean, cov) in nats. x (B, D), mean (D,), cov (D, D) positive definite. Returns (B,)."""
    root = torch.linalg.cholesky(cov)
    z = torch.linalg.solve_triangular(root, (x - mean).T, upper=False)  # (D, B)
    return -0.5 * (z**2).sum(0) - root.diagonal().log().sum() - 0.5 * len(mean) * math.log(2 * math.pi)


def step_log_densities(steps: Chain, states: Tensor) -> Tensor:
    """log p(x[k+1] | x[k]) of every stochastic step; their sum is the trajectory's log-density given x[0]
    (chain rule; deterministic steps have probability 1). states (B, N+1, D). Returns (B, n)."""
    columns = []
    for k in steps.std.nonzero().flatten().tolist():
        cov = steps.std[k] ** 2 * torch.eye(states.shape[2], dtype=torch.float64)
        off = states[:, k + 1] - states[:, k] @ steps.M[k].T - steps.c[k]
        columns.append(log_density(off, torch.zeros_like(steps.c[k]), cov))
    return torch.stack(columns, dim=1)


def trajectories(steps: Chain, start: Tensor, noise: Tensor) -> Tensor:
    """All states (B, N+1, D) from start (B, D) and the noise (B, n, D) of the n stochastic steps."""
    states, used = [start], 0
    for M, c, std in zip(*steps, strict=True):
        x = states[-1] @ M.T + c
        if std > 0:
            x, used = x + std * noise[:, used], used + 1
        states.append(x)
    return torch.stack(states, dim=1)


def expected_reward(reward: Reward, mean: Tensor, cov: Tensor) -> Tensor:
    """E[r(x)] for x ~ N(mean, cov): linear mean + tr(quadratic cov) + mean' quadratic mean. Returns ()."""
    return reward(mean) + (reward.quadratic * cov.T).sum()


def reward_gradient(
    policy: Policy, sampler: Sampler, reward: Reward, mean: Tensor, cov: Tensor
) -> tuple[Tensor, Tensor]:
    """The exact gradient of E[r(x[N])] in A (N, D, D) and b (N, D), by autograd of the moment recursion."""
    A, b = policy.A.detach().requires_grad_(), policy.b.detach().requires_grad_()
    means, covs = moments(chain(Policy(A, b, policy.sigmas), sampler), mean, cov)
    return torch.autograd.grad(expected_reward(reward, means[-1], covs[-1]), (A, b))


def ratio_gradient(
    policy: Policy, old: Policy, sampler: Sampler, reward: Reward, mean: Tensor, cov: Tensor
) -> tuple[Tensor, Tensor]:
    """The exact gradient of E_old[sum over stochastic k of (p/p_old)(x[k+1] | x[k]) r(x[N])] in A (N, D, D)
    and b (N, D) of the policy p.

    The ratio of step k exchanges that one transition: its term is E[r] of the chain that takes step k from p
    and all others from old. At p = old this is the policy gradient of the stochastic steps.
    """
    A, b = policy.A.detach().requires_grad_(), policy.b.detach().requires_grad_()
    new, total = chain(Policy(A, b, policy.sigmas), sampler), torch.zeros((), dtype=torch.float64)
    for k in new.std.nonzero().flatten().tolist():
        pairs = zip(chain(old, sampler), new, strict=True)
        steps = Chain(*(torch.cat([a[:k], c[k : k + 1], a[k + 1 :]]) for a, c in pairs))
        means, covs = moments(steps, mean, cov)
        total = total + expected_reward(reward, means[-1], covs[-1])
    return torch.autograd.grad(total, (A, b))


def quadrature(dims: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Gauss-Hermite product rule for N(0, I): points (nodes^dims, dims), weights (nodes^dims,) of sum 1.

    Exact for polynomials of degree 2 nodes - 1 in each dimension.
    """
    z, w = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.stack(np.meshgrid(*[z] * dims, indexing="ij"), -1).reshape(-1, dims)
    weights = np.stack(np.meshgrid(*[w / math.sqrt(2 * math.pi)] * dims, indexing="ij"), -1)
    return torch.from_numpy(grid), torch.from_numpy(weights.reshape(-1, dims).prod(1))


def reweighted(
    value: Callable[[Tensor], Tensor], drawn: Chain, target: Chain, prefix: int, start: Tensor, nodes: int
) -> Tensor:
    """E[w f] where the first `prefix` stochastic steps are drawn from one policy, the rest from the target.

    w = prod over the prefix of p_target / p_drawn. It equals E_target[f] for every prefix: prefix = 0 is the
    plain expectation, prefix = n the change of measure (no truncation), between them a truncated replay. The
    two chains must agree on deterministic steps before the prefix ends; there is no density to correct them.

    value: states (B, N+1, D) -> (B,); start (D,), the state x[0]. By quadrature over all noise: use D n <= 4.
    """
    stochastic = drawn.std.nonzero().flatten().tolist()
    switch = stochastic[prefix - 1] + 1 if prefix else 0
    mixed = Chain(*(torch.cat([a[:switch], b[switch:]]) for a, b in zip(drawn, target, strict=True)))
    noise, mass = quadrature(len(stochastic) * len(start), nodes)
    states = trajectories(
        mixed, start.expand(len(noise), -1), noise.unflatten(1, (len(stochastic), len(start)))
    )
    log_w = (step_log_densities(target, states) - step_log_densities(mixed, states))[:, :prefix].sum(1)
    return (mass * log_w.exp() * value(states)).sum()


def log_weight_variance(drawn: Chain, target: Chain, mean: Tensor, cov: Tensor) -> Tensor:
    """Variance of each step's log-weight log p_target - log p_drawn at stochastic steps, under `drawn`: (n,).

    At one step the weight's logarithm is z delta / std - |delta|^2 / (2 std^2), delta = difference of the two
    means, affine in x[k] and so N(m, S): the variance is E|delta|^2 / std^2 + Var|delta|^2 / (4 std^4) with
    E|delta|^2 = |m|^2 + tr S and Var|delta|^2 = 2 tr S^2 + 4 m' S m. It grows without bound as std -> 0.
    """
    means, covs = moments(drawn, mean, cov)
    variances = []
    for k in drawn.std.nonzero().flatten().tolist():
        slope = target.M[k] - drawn.M[k]
        m = slope @ means[k] + target.c[k] - drawn.c[k]
        S = slope @ covs[k] @ slope.T
        spread = 2 * (S @ S).trace() + 4 * m @ S @ m
        variances.append((m @ m + S.trace()) / drawn.std[k] ** 2 + spread / (4 * drawn.std[k] ** 4))
    return torch.stack(variances)


def completion(policy: Policy, k: int) -> tuple[Tensor, Tensor]:
    """The ODE from x[k] to the end of the grid is x -> P x + p. Returns P (D, D) and p (D,)."""
    P, p = torch.eye(policy.b.shape[1], dtype=torch.float64), torch.zeros_like(policy.b[0])
    steps = chain(policy, Sampler("ode", 0.0, (0, 0)))
    for M, c in zip(steps.M[k:], steps.c[k:], strict=True):
        P, p = M @ P, M @ p + c
    return P, p


def completion_rewards(policy: Policy, states: Tensor, window: tuple[int, int], reward: Reward) -> Tensor:
    """R[j] = reward of the ODE completion after j stochastic steps, j = 0 .. n. states (B, N+1, D). Returns
    (B, n+1)."""
    columns = []
    for k in range(window[0], window[1] + 1):
        P, p = completion(policy, k)
        columns.append(reward(states[:, k] @ P.T + p))
    return torch.stack(columns, dim=1)


def sign(difference: float, tolerance: float = 0.0) -> int:
    """-1, 0 or 1; 0 where |difference| <= tolerance."""
    return 0 if abs(difference) <= tolerance else (1 if difference > 0 else -1)


def is_turning_point(R: Sequence[float], j: int, rule: str, tolerance: float = 0.0) -> bool:
    """Whether stochastic step j (1 .. n) of one trajectory with rewards R[0 .. n] is a turning point.

    A literal reading of Definitions 4.1 (trend) and 5.1 (consistent) of arXiv 2602.06422, with sign(0) = 0.
    """
    n = len(R) - 1
    trend = sign(R[n] - R[0], tolerance)

    def step(i: int) -> int:
        return sign(R[i] - R[i - 1], tolerance)

    consistent = step(j) * sign(R[n] - R[j], tolerance) > 0
    if j == 1:
        return consistent if rule == "consistent" else step(1) * trend > 0
    turns = step(j - 1) * trend < 0 and step(j) * trend > 0
    return turns and (consistent or rule == "trend")


def balanced_points(points: Sequence[bool], awards: Sequence[float]) -> list[bool]:
    """Turning points kept by balancing (arXiv 2602.06422, App. D), over one flat batch.

    While both signs occur and one is more frequent, the more frequent one loses its smallest award in
    magnitude, of equal ones the later.
    """
    kept = list(points)
    while True:
        positive = [i for i, point in enumerate(kept) if point and awards[i] > 0]
        negative = [i for i, point in enumerate(kept) if point and awards[i] < 0]
        if not positive or not negative or len(positive) == len(negative):
            return kept
        larger = max(positive, negative, key=len)
        kept[min(larger, key=lambda i: (abs(awards[i]), -i))] = False


def awarded_rewards(
    rows: Sequence[Sequence[float]], rule: str = "consistent", balanced: bool = True, tolerance: float = 0.0
) -> list[list[float]]:
    """The reward of every step of a batch of trajectories: R[n] - R[j-1] at the turning points that balancing
    keeps, R[j] - R[j-1] elsewhere (arXiv 2602.06422, Eq. 7 and 8). rows: B times R[0 .. n]. Returns B times
    n."""
    places = [(row, j) for row in range(len(rows)) for j in range(1, len(rows[row]))]
    points = [is_turning_point(rows[row], j, rule, tolerance) for row, j in places]
    awards = [rows[row][-1] - rows[row][j - 1] for row, j in places]
    if balanced:
        points = balanced_points(points, awards)
    result: list[list[float]] = [[] for _ in rows]
    for (row, j), point, award in zip(places, points, awards, strict=True):
        result[row].append(award if point else rows[row][j] - rows[row][j - 1])
    return result
