"""The pictures that a run leaves behind. matplotlib is imported when the first one is drawn."""

import math
from pathlib import Path

import torch
from torch import Tensor

from shared.prompts import DIGIT_WORDS, Prompt

MAX_IMAGES = 20  # on a sheet of samples
MAX_ANSWERS = 12  # in a confusion matrix, besides "other"
MAX_TRAJECTORIES = 4  # in the picture of turning points
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#777777"  # distinguishable with any colour vision, and in grey


def save_samples(path: Path, images: Tensor, rewards: Tensor, prompts: list[Prompt], title: str) -> None:
    """A sheet of the first images (B, 3, H, W) in [0, 1], each with its prompt and reward (B,)."""
    count = min(len(images), MAX_IMAGES)
    columns = min(count, 5)
    rows = math.ceil(count / columns)
    figure = _figure(max(2.1 * columns, 6), 2.5 * rows + 0.5)
    grid = figure.add_gridspec(rows, columns, **_margins(figure, top=0.95, bottom=0.1, left=0.1, right=0.1))
    figure.suptitle(f"{title}: mean reward {rewards.mean():.3f} over {len(rewards)} images, {count} shown")
    for i in range(count):
        axes = figure.add_subplot(grid[i // columns, i % columns])
        _show(axes, images[i])
        axes.set_title(f"{_shorten(prompts[i].text)}\n{rewards[i]:.3f}", fontsize=9)
    figure.savefig(path)


def save_reward_curve(path: Path, history: list[dict], eval_before: float) -> None:
    """Training reward (fresh noise) and evaluation reward (fixed noise) against iterations."""
    figure = _figure(7, 4.2)
    axes = figure.add_subplot(figure.add_gridspec(1, 1, **_margins(figure, 0.2, 0.6, 0.8, 0.2))[0, 0])
    iterations = [m["iteration"] for m in history]
    evaluated = [(0, eval_before)] + [
        (m["iteration"], m["eval_reward"]) for m in history if m["eval_reward"] is not None
    ]
    axes.plot(
        iterations,
        [m["reward_mean"] for m in history],
        color=GREY,
        linestyle="--",
        label="training (fresh noise)",
    )
    axes.plot(
        *zip(*evaluated, strict=True),
        color=BLUE,
        marker="o",
        markersize=3,
        label="evaluation (fixed noise)",
    )
    axes.set(xlabel="iteration", ylabel="reward")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)


def save_turning_points(
    path: Path,
    R: Tensor,
    points: Tensor,
    awarded: Tensor,
    images: Tensor,
    prompts: list[Prompt],
    sigmas: Tensor,
) -> None:
    """For the trajectories whose turning points weigh most: R[0..n], turning points marked, images beneath.

    R (B, n+1), points and awarded (B, n) bool (all turning points; those that balancing left), images
    (B, n+1, 3, H, W), B prompts, sigmas (n+1,) of the states 0..n.
    """
    weight = ((R[:, -1:] - R[:, :-1]).abs() * points).sum(1)
    chosen = weight.argsort(descending=True, stable=True)[:MAX_TRAJECTORIES].tolist()
    k, n = len(chosen), points.shape[1]
    figure = _figure(max(1.05 * (n + 1), 6) + 1.1, 3.6 * k + 0.8)
    grid = figure.add_gridspec(2 * k, n + 1, height_ratios=[2, 1] * k, **_margins(figure, 0.9, 0.1, 0.9, 0.2))
    for row, i in enumerate(chosen):
        r = R[i].tolist()
        axes = figure.add_subplot(grid[2 * row, :])
        axes.plot(range(n + 1), r, color=GREY, marker="o", markersize=3)
        for j in range(1, n + 1):
            if points[i, j - 1]:
                axes.plot([j - 1, j], r[j - 1 : j + 1], color=ORANGE, linewidth=3)
                fill = ORANGE if awarded[i, j - 1] else "white"
                axes.plot(j, r[j], color=ORANGE, marker="D", markersize=9, markerfacecolor=fill)
                place = {"textcoords": "offset points", "xytext": (0, 9), "ha": "center", "fontsize": 8}
                place["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
                axes.annotate(f"{r[n] - r[j - 1]:+.2g}", (j, r[j]), color=ORANGE, **place)
        axes.margins(y=0.3)
        axes.set_xlim(-0.5, n + 0.5)
        axes.set_xticks(range(n + 1), [f"{j}\nσ {s:.2f}" for j, s in enumerate(sigmas)], fontsize=8)
        axes.set_ylabel("reward of the\nODE completion", fontsize=9)
        axes.set_title(f"{prompts[i].text}: R[0] = {r[0]:.3f}, R[{n}] = {r[n]:.3f}", fontsize=10)
        axes.grid(alpha=0.3)
        for j in range(n + 1):
            _show(figure.add_subplot(grid[2 * row + 1, j]), images[i, j])
    figure.suptitle(
        "Diamonds: turning points, steps that turn the trajectory to its final direction. Filled: rewarded\n"
        "with R[n] - R[j-1], the number above. Hollow: dropped by balancing; R[j] - R[j-1], as other steps.",
        fontsize=10,
    )
    figure.savefig(path)


def save_replay(
    path: Path, history: list[dict], measured: Tensor, expected: Tensor, sigmas: Tensor, prefix: int
) -> None:
    """Four panels: over training the weights of replayed trajectories, the ages of stored ones, and the
    shares of ratios outside the clip range; and what one iteration of updates makes of the log-weight of each
    step.

    measured, expected: its variance (n,), over trajectories and in closed form; sigmas (n,): where each of
    these steps begins; prefix: the number of steps that are replayed.
    """
    figure = _figure(11, 7.5)
    grid = figure.add_gridspec(
        2, 2, **_margins(figure, 0.3, 0.6, 0.8, 0.2) | {"hspace": 0.25, "wspace": 0.25}
    )
    panels = [figure.add_subplot(grid[i // 2, i % 2]) for i in range(4)]

    def draw(axes, name: str, color: str, style: str, label: str) -> None:
        points = [(m["iteration"], m[name]) for m in history if m[name] is not None]
        axes.plot([i for i, _ in points], [v for _, v in points], style, color=color, label=label)

    draw(panels[0], "weight_mean", BLUE, "-", "mean")
    draw(panels[0], "weight_ess", GREY, ":", "effective sample size, per sample")
    if any((m["weight_max"] or 0) > 1 for m in history):
        draw(panels[0], "weight_max", ORANGE, "--", "largest")
        panels[0].set_yscale("log")
    panels[0].set_ylabel("weight of replayed trajectories")
    draw(panels[1], "buffer_age", BLUE, "-", f"mean of {history[-1]['buffer_size']} stored trajectories")
    panels[1].set_ylabel("age in iterations")
    draw(panels[2], "clip_fraction_fresh", GREY, ":", "fresh")
    draw(panels[2], "clip_fraction_replayed", BLUE, "-", "replayed, theta / old")
    draw(panels[2], "clip_fraction_naive", ORANGE, "--", "replayed, theta / off (naive)")
    panels[2].set_ylabel("share of ratios outside the clip range")
    panels[3].plot(sigmas, expected.cpu(), color=GREY, label="closed form, E|Δmean|² / std²")
    panels[3].plot(sigmas, measured.cpu(), "o", color=BLUE, label="over trajectories")
    if prefix < len(sigmas):
        between = (sigmas[prefix - 1] + sigmas[prefix]) / 2
        panels[3].axvline(between, color=ORANGE, linestyle="--", label="truncation")
    if (measured > 0).all() and (expected > 0).all():
        panels[3].set_yscale("log")
    panels[3].invert_xaxis()
    panels[3].set(xlabel="σ where the step begins", ylabel="variance of log p_new / p_old, last iteration")
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.set_xlabel(axes.get_xlabel() or "iteration")
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def save_confusion(
    path: Path, answers: list[str], rewards: Tensor, prompts: list[Prompt], title: str
) -> None:
    """How often each right answer (rows, prompt.metadata["answer"]) got which answer (columns); B of each,
    rewards (B,). Answers that are rare or that no question has are counted as "other"."""
    right = [str(prompt.metadata["answer"]).strip().casefold() for prompt in prompts]
    frequent = sorted(set(right), key=lambda name: (-right.count(name), name))[:MAX_ANSWERS]
    names = [word for word in DIGIT_WORDS if word in frequent]
    names += sorted(set(frequent) - set(names))
    counts = torch.zeros(len(names) + 1, len(names) + 1, dtype=torch.long)
    place = {name: i for i, name in enumerate(names)}
    for asked, given in zip(right, answers, strict=True):
        counts[place.get(asked, -1), place.get(given.strip().casefold(), -1)] += 1
    names.append("other")
    rows = [i for i in range(len(names)) if counts[i].any()]
    if not counts[:, -1].any():
        counts, names = counts[:, :-1], names[:-1]
    figure = _figure(0.55 * len(names) + 2.2, 0.45 * len(rows) + 2.1)
    axes = figure.add_subplot(figure.add_gridspec(1, 1, **_margins(figure, 0.6, 1.1, 1.0, 0.3))[0, 0])
    shares = counts[rows] / counts[rows].sum(1, keepdim=True)
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for i, row in enumerate(rows):
        for j in range(counts.shape[1]):
            if counts[row, j]:
                color = "white" if shares[i, j] > 0.5 else "black"
                axes.text(j, i, int(counts[row, j]), ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(names)), [_shorten(name, 14) for name in names], rotation=45, ha="right")
    axes.set_yticks(range(len(rows)), [_shorten(names[row], 14) for row in rows])
    axes.set(xlabel="answer given", ylabel="right answer")
    figure.suptitle(f"{title}: mean reward {rewards.mean():.3f} over {len(rewards)} answers", fontsize=10)
    figure.savefig(path)


def save_filmstrip(path: Path, states: list, prompts: list[Prompt], times: Tensor) -> None:
    """A few trajectories of a discrete flow, one a row: what their tokens show at each time.

    states: for each of the times (K+1,) images (B, 3, H, W) in [0, 1], or B answers; B prompts. An image that
    a prompt asks about, if its metadata hold the pixels, stands to the left.
    """
    asked = [prompt.metadata.get("image") for prompt in prompts]
    count, first = len(prompts), int(isinstance(asked[0], list))
    columns = first + len(states)
    figure = _figure(max(1.05 * columns, 6) + 0.2, 1.35 * count + 1)
    grid = figure.add_gridspec(count, columns, **_margins(figure, 0.75, 0.35, 0.1, 0.1))
    for i, prompt in enumerate(prompts):
        for k in range(columns):
            axes = figure.add_subplot(grid[i, k])
            axes.set_axis_off()
            if k < first:
                axes.imshow(asked[i], cmap="gray")
            elif isinstance(states[k - first], list):
                words = _shorten(states[k - first][i], 14)
                axes.text(0.5, 0.5, words, ha="center", va="center", fontsize=9)
            else:
                _show(axes, states[k - first][i])
            if i == 0:
                axes.set_title("asked about" if k < first else f"t = {times[k - first]:.3g}", fontsize=9)
        right = prompt.metadata.get("answer")
        label = prompt.text + (f" (right: {right})" if right else "")
        place = (
            0.1 / figure.get_figwidth(),
            grid[i, 0].get_position(figure).y0 - 0.05 / figure.get_figheight(),
        )
        figure.text(*place, _shorten(label, 90), fontsize=8, va="top")
    figure.suptitle("Tokens of a trajectory over the steps of the sampler", fontsize=10)
    figure.savefig(path)


def save_ratio_noise(
    path: Path, exact: Tensor, estimates: Tensor, counts: tuple[int, ...], clip_range: tuple[float, float]
) -> None:
    """How noisy ratios from n draws are, against the clip range, after an iteration of updates.

    exact: ratios (R,); estimates: (len(counts), repeats, R), for each n of counts.
    """
    below, above = clip_range
    figure = _figure(10, 4.2)
    grid = figure.add_gridspec(1, 2, **_margins(figure, 0.5, 0.6, 0.9, 0.2) | {"wspace": 0.3})
    spread, error = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    spread.axhspan(1 - below, 1 + above, color=GREY, alpha=0.2, label="clip range")
    names = [*map(str, counts), "exact"]
    boxes = [*(each.flatten().numpy() for each in estimates), exact.numpy()]
    drawn = spread.boxplot(
        boxes, whis=(1, 99), showfliers=False, patch_artist=True, medianprops={"color": "black"}
    )
    for box, name in zip(drawn["boxes"], names, strict=True):
        box.set_facecolor(ORANGE if name == "exact" else BLUE)
    spread.set_xticks(range(1, len(names) + 1), names)
    spread.set(xlabel="draws n", ylabel="ratio to the policy of the rollout")
    spread.set_title(f"{len(exact)} ratios: quartiles and 1 to 99 %", fontsize=9)
    spread.legend(frameon=False, fontsize=8)
    noise = (estimates - exact).square().mean((1, 2)).sqrt()
    error.plot(counts, noise, "o-", color=BLUE, label="root mean square error of the estimate")
    for side, style in [(below, "--"), (above, ":")]:
        error.axhline(side, color=GREY, linestyle=style, label=f"clip range {side:g}")
    error.axhline(
        (exact - 1).square().mean().sqrt(), color=ORANGE, label="exact: distance of the ratio from 1"
    )
    error.set_xscale("log")
    error.set_yscale("log")
    error.set_xticks(counts, map(str, counts))
    error.minorticks_off()
    error.set_xlabel("draws n")
    error.legend(frameon=False, fontsize=8)
    for axes in (spread, error):
        axes.grid(alpha=0.3)
    figure.suptitle("Ratios estimated from n draws of the clean token (mc), and exact", fontsize=10)
    figure.savefig(path)


def _figure(width: float, height: float):
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110)


def _margins(figure, top: float, bottom: float, left: float, right: float) -> dict[str, float]:
    """Margins in inches as arguments of a grid (a computed layout would take longer than everything else)."""
    width, height = figure.get_size_inches()
    edges = {
        "top": 1 - top / height,
        "bottom": bottom / height,
        "left": left / width,
        "right": 1 - right / width,
    }
    return edges | {"hspace": 0.4, "wspace": 0.1}


def _show(axes, image: Tensor) -> None:
    axes.imshow(image.permute(1, 2, 0).float().clamp(0, 1).numpy(), interpolation="nearest")
    axes.set_axis_off()


def _shorten(text: str, limit: int = 28) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
