"""Train the toy models that ship in shared/assets/, and print their quality.

    python scripts/pretrain_toys.py                       # writes shared/assets/ again
    python scripts/pretrain_toys.py --output-dir FOLDER   # writes elsewhere
    python scripts/pretrain_toys.py --check               # prints the quality of what ships

digits.safetensors, digits_faithful.safetensors: the rectified flow of shared/policies/digits.py, trained
with half, or a fifth, of the labels replaced by random ones.
digits_judge.safetensors: the classifier that the rewards `label`, `ink` and `next` ask, trained on 80 % of
the real digits.
digit_tokens.safetensors, digit_tokens_timed.safetensors, digit_tokens_masked.safetensors: the discrete flows
of shared/policies/digit_tokens.py, trained with half of the labels replaced by random ones; their
understanding on the judge's 80 %.
digit_images.safetensors: the real digits themselves, for prompts that ask about them. They are the test set
of UCI's "Optical Recognition of Handwritten Digits" (CC BY 4.0), as scikit-learn ships it.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bundle: drop

import torch
import tyro
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, mse_loss, one_hot
from tqdm import tqdm

from shared.ctmc import sample_step
from shared.policies import make_policy
from shared.policies.digit_tokens import (
    LEVELS,
    NUM_CLASSES,
    NUM_TOKENS,
    DigitTokensNetwork,
    token_path,
)
from shared.policies.digits import ASSETS, DigitsNetwork
from shared.prompts import DIGIT_IMAGES, Prompt, load_prompts
from shared.rewards import make_rewards, score
from shared.rewards.toy import DigitsJudge
from shared.rollout import ode_sample, rollout, sample_noise

RANDOM_LABELS = {"digits": 0.5, "digits-faithful": 0.2}  # share of training labels replaced by a uniform one
TRAIN_SHARE = 0.8  # of the real digits, for the judge and for understanding
TOKEN_FLOWS = {  # path, time_input
    "digit-tokens": ("metric", False),
    "digit-tokens-masked": ("mask", False),
    "digit-tokens-timed": ("metric", True),
}
RANDOM_TOKEN_LABELS = 0.5  # share of their training labels replaced by a uniform one, drawn again each time


@dataclass
class Args:
    output_dir: Path = ASSETS
    """Folder for the weight files."""
    flow_steps: int = 8000
    """Training steps of the flow, batches of 256."""
    judge_steps: int = 3000
    """Training steps of the judge, batches of 256."""
    token_steps: int = 6000
    """Training steps of each discrete flow, batches of 256."""
    token_samples: int = 400
    """Images of each digit by which the quality of a discrete flow is measured."""
    check: bool = False
    """Train nothing; print the quality of the weights in shared/assets/."""


def real_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The 1,797 digits in a fixed random order: pixels (1797, 8, 8) in [0, 1] and labels (1797,)."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.images / 16, dtype=torch.float32)[order], torch.tensor(data.target)[order]


def train_flow(pixels: torch.Tensor, labels: torch.Tensor, random_labels: float, steps: int) -> DigitsNetwork:
    """Flow matching on all digits: v(x_sigma) regresses eps - x0. Returns the average of the weights over
    training (EMA)."""
    torch.manual_seed(0)
    network = DigitsNetwork()
    ema = torch.optim.swa_utils.AveragedModel(
        network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    latents = (2 * pixels - 1)[:, None]
    for _ in tqdm(range(steps), desc="flow", unit="step"):
        rows = torch.randint(len(latents), (256,))
        random = torch.rand(256) < random_labels
        label = torch.where(random, torch.randint(10, (256,)), labels[rows])
        sigma = torch.randn(256).sigmoid()  # logit-normal, as SD3
        x0, eps = latents[rows], torch.randn(256, *latents.shape[1:])
        s = sigma[:, None, None, None]
        loss = mse_loss(network((1 - s) * x0 + s * eps, sigma, label), eps - x0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        ema.update_parameters(network)
    return ema.module


def train_judge(pixels: torch.Tensor, labels: torch.Tensor, steps: int) -> DigitsJudge:
    """Cross-entropy on the training share, with pixel noise so that it is calm between the digits."""
    torch.manual_seed(0)
    judge = DigitsJudge()
    optimizer = torch.optim.AdamW(judge.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    train = int(TRAIN_SHARE * len(pixels))
    for _ in tqdm(range(steps), desc="judge", unit="step"):
        rows = torch.randint(train, (256,))
        noisy = (pixels[rows] + 0.15 * torch.randn(256, 8, 8)).clamp(0, 1)
        loss = cross_entropy(judge(noisy), labels[rows], label_smoothing=0.02)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return judge


def train_token_flow(
    pixels: torch.Tensor, labels: torch.Tensor, path: str, time_input: bool, steps: int
) -> DigitTokensNetwork:
    """Cross-entropy of the clean tokens given x_t, t uniform; half of a batch for each task, understanding on
    the training share. A revealed token of a masked path is no target. Returns the average of the weights
    over training (EMA)."""
    torch.manual_seed(0)
    network = DigitTokensNetwork(time_input)
    ema = torch.optim.swa_utils.AveragedModel(
        network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps + 1)
    levels = (pixels * (LEVELS - 1)).round().long().flatten(1)
    paths = {task: token_path(path, task) for task in NUM_TOKENS}
    shares = {"generation": len(levels), "understanding": int(TRAIN_SHARE * len(levels))}
    for _ in tqdm(range(steps), desc=f"tokens, {path}", unit="step"):
        loss = 0.0
        for task in NUM_TOKENS:
            rows = torch.randint(shares[task], (128,))
            random = torch.rand(128) < RANDOM_TOKEN_LABELS
            label = torch.where(random, torch.randint(NUM_CLASSES, (128,)), labels[rows])
            t = torch.rand(128)
            x1 = levels[rows] if task == "generation" else label[:, None]  # (128, D)
            x = paths[task].sample(x1, t[:, None])
            noised = (x, label) if task == "generation" else (levels[rows], x[:, 0])
            logits = network(*noised, t, task)
            if path == "mask":
                x1 = torch.where(x == paths[task].mask_id, x1, -100)  # cross_entropy ignores -100
            loss = loss + cross_entropy(logits.transpose(1, 2), x1, reduction="sum") / x1.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        ema.update_parameters(network)
    return ema.module


def report_quality(token_samples: int) -> None:
    """Print how good the weights in shared/assets/ are."""
    pixels, labels = real_digits()
    judge = DigitsJudge()
    judge.load_state_dict(load_file(ASSETS / "digits_judge.safetensors"))
    test = slice(int(TRAIN_SHARE * len(pixels)), None)
    accuracy = (judge(pixels[test]).argmax(1) == labels[test]).float().mean()
    print(f"judge: accuracy {accuracy:.3f} on {len(labels[test])} held-out real digits")

    rewards, prompts = (
        make_rewards("label,ink,next,jpeg"),
        [p for p in load_prompts("digits") for _ in range(400)],
    )
    for model in RANDOM_LABELS:
        policy = make_policy(model)
        cond, sigmas = policy.encode(prompts), policy.sigmas(10)
        noise = sample_noise(policy, 0, 0, range(len(prompts)), 10)
        flow = rollout(policy, noise, cond, sigmas, (0, 9), noise_level=0.7)
        for name, latents in [
            ("ODE, 10 steps", ode_sample(policy, noise[:, 0], cond, sigmas)),
            ("ODE, 40 steps", ode_sample(policy, noise[:, 0], cond, policy.sigmas(40))),
            ("SDE, 10 steps, noise level 0.7", flow.final),
        ]:
            images = policy.decode(latents)
            parts = score(rewards, images, prompts).parts
            confidence = judge(images.mean(1)).softmax(1).amax(1).mean()
            means = ", ".join(f"{part} {value.mean():.3f}" for part, value in parts.items())
            print(f"{model}, {name}: {means}; judge's confidence in the digit it sees {confidence:.3f}")
    for model in TOKEN_FLOWS:
        report_token_quality(model, token_samples)


def report_token_quality(model: str, samples: int) -> None:
    """Print the rewards of a discrete flow: of `samples` images of each digit, and of four answers to each
    held-out digit."""
    policy = make_policy(model, task="generation")
    rewards, prompts = make_rewards("label,ink"), [p for p in load_prompts("digits") for _ in range(samples)]
    for num_steps in (4, 8, 16):
        made = sample_tokens(policy, prompts, num_steps)
        parts = score(rewards, made, prompts).parts
        means = ", ".join(f"{part} {value.mean():.3f}" for part, value in parts.items())
        print(f"{model}, {num_steps} steps: {means}")
    policy = make_policy(model, task="understanding")
    prompts = load_prompts("digit-images-test") * 4
    for name, greedy in [("sampled", False), ("greedy", True)]:
        made = sample_tokens(policy, prompts, 8, greedy)
        accuracy = score(make_rewards("answer", task="understanding"), made, prompts).total.mean()
        print(f"{model}, understanding, 8 steps, {name}: accuracy {accuracy:.3f} on the held-out digits")


@torch.no_grad()
def sample_tokens(policy, prompts: list[Prompt], num_steps: int, greedy: bool = False):
    """What a discrete policy makes of the prompts, from seed 0. greedy: the clean token of a step is the most
    probable one; its jumps stay random."""
    cond, times = policy.encode(prompts), policy.times(num_steps).tolist()
    generator = torch.Generator().manual_seed(0)
    x = policy.source(len(prompts), generator)
    for t, t_next in zip(times[:-1], times[1:], strict=True):
        logits = policy.posterior_logits(x, t, cond)
        if greedy:
            logits = one_hot(logits.argmax(-1), logits.shape[-1]).float().log()
        x, _ = sample_step(policy.path, logits, x, t, t_next - t, last=t_next == 1, generator=generator)
    return policy.decode(x, cond)


def main(args: Args) -> None:
    if not args.check:
        torch.set_num_threads(1)  # the networks are too small for more
        pixels, labels = real_digits()
        args.output_dir.mkdir(parents=True, exist_ok=True)
        images = {"images": (pixels * (LEVELS - 1)).round().byte(), "labels": labels.byte()}
        save_file(images, args.output_dir / DIGIT_IMAGES.name)
        for model, random_labels in RANDOM_LABELS.items():
            network = train_flow(pixels, labels, random_labels, args.flow_steps)
            save_file(network.state_dict(), args.output_dir / f"{model.replace('-', '_')}.safetensors")
        for model, (path, time_input) in TOKEN_FLOWS.items():
            network = train_token_flow(pixels, labels, path, time_input, args.token_steps)
            save_file(network.state_dict(), args.output_dir / f"{model.replace('-', '_')}.safetensors")
        save_file(
            train_judge(pixels, labels, args.judge_steps).state_dict(),
            args.output_dir / "digits_judge.safetensors",
        )
    if args.check or args.output_dir == ASSETS:
        report_quality(args.token_samples)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
