"""SD3.5 Medium as a policy, on a tiny model of its classes: what it samples and encodes against diffusers'
pipeline, what is trained, what is exported, and whole runs."""

import functools
import json
import runpy
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mutants import SD3_MUTANTS
from test_mutants import applied, run_test
from torch.testing import assert_close

from algos import flow_grpo, op_grpo, tp_grpo
from shared.command import saved_args
from shared.errors import InputError
from shared.policies import make_policy, sd3
from shared.policies.sd3 import HUB_ID, SD3Policy
from shared.prompts import Prompt
from shared.rollout import ode_sample

diffusers = pytest.importorskip("diffusers", reason="the packages of real models need Python 3.11")
pytestmark = pytest.mark.xdist_group("sd3")  # one process imports diffusers, not all

ROOT = Path(__file__).parents[1]
ALGORITHMS = {"flow_grpo": flow_grpo, "tp_grpo": tp_grpo, "op_grpo": op_grpo}
PROMPTS = [Prompt("a cat", {}), Prompt('two dogs and a sign that says "no"', {}), Prompt("a cat", {})]
RESOLUTION, STEPS = 32, 3
TRAINED = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


@functools.cache
def folder() -> tempfile.TemporaryDirectory:
    """A folder with the tiny models, which goes with the process."""
    made = tempfile.TemporaryDirectory()
    script = runpy.run_path(str(ROOT / "scripts" / "make_tiny_models.py"))
    script["main"](script["Args"](output_dir=Path(made.name)))
    return made


def model_path() -> str:
    return folder().name + "/sd3.5-m"


def make(**options) -> SD3Policy:
    options = {"resolution": (RESOLUTION,), "lora_rank": 4, "mixed_precision": "no"} | options
    return SD3Policy(model_path=model_path(), **options)


def plain_pipeline():
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(model_path())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def images_of(pipeline, noise, guidance_scale=4.5):
    """Pixels (B, 3, H, W) that diffusers' pipeline makes of latents."""
    size = {"height": RESOLUTION, "width": RESOLUTION, "num_inference_steps": STEPS, "output_type": "pt"}
    texts = [prompt.text for prompt in PROMPTS]
    return pipeline(texts, latents=noise.clone(), guidance_scale=guidance_scale, **size).images


@functools.cache
def pipeline_images(guidance_scale):
    return images_of(plain_pipeline(), noise_of(make()), guidance_scale)


def sample(policy, noise):
    return policy.decode(ode_sample(policy, noise, policy.encode(PROMPTS), policy.sigmas(STEPS)))


def noise_of(policy):
    return policy.noise(len(PROMPTS), torch.Generator().manual_seed(0))


def trained_weights(policy):
    return {name: p for name, p in policy.module.named_parameters() if p.requires_grad}


def move_the_lora(policy):
    """Random weights in place of its zeros."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in trained_weights(policy).values():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_samples_are_those_of_the_pipeline(guidance_scale):
    policy = make(guidance_scale=guidance_scale)
    noise = noise_of(policy)
    images = sample(policy, noise)
    assert images.shape == (3, 3, RESOLUTION, RESOLUTION) and images.std() > 0.1
    assert_close(images, pipeline_images(guidance_scale), rtol=0, atol=1e-4)
    assert (images - pipeline_images(5.5 - guidance_scale)).abs().max() > 0.1  # guidance matters here
    assert (images[0] - images[2]).abs().max() > 0.1  # and so does the noise


def test_a_half_of_the_rows_is_empty_prompts_only_with_guidance():
    rows = []
    policy = make()
    policy.module.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["timestep"])), with_kwargs=True
    )
    cond, noise = policy.encode(PROMPTS), noise_of(policy)
    policy.velocity(noise, 0.5, cond)
    policy.guidance_scale = 1.0
    policy.velocity(noise, 0.5, cond)
    assert rows == [6, 3]


def test_the_grid_is_the_schedulers():
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    policy = make()
    for num_steps in (1, 2, 10, 40):
        scheduler.set_timesteps(num_steps)
        assert torch.equal(policy.sigmas(num_steps), scheduler.sigmas.double())
        timesteps = torch.stack([torch.full((), 1000 * float(s)) for s in policy.sigmas(num_steps)[:-1]])
        assert torch.equal(timesteps, scheduler.timesteps)
    expected = [1.0, 0.960, 0.913, 0.858, 0.790, 0.707, 0.602, 0.465, 0.278, 0.009, 0.0]
    assert_close(policy.sigmas(10), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5.1e-4)


def test_embeddings_are_the_pipelines_and_do_not_depend_on_the_batch():
    policy, pipeline = make(), plain_pipeline()
    cond = policy.encode(PROMPTS)
    with torch.no_grad():
        expected = pipeline.encode_prompt([prompt.text for prompt in PROMPTS], None, None)
    embeddings, empty, pooled, pooled_empty = expected
    assert_close(cond["embeddings"], embeddings, rtol=0, atol=1e-5)
    assert_close(cond["pooled"], pooled, rtol=0, atol=1e-5)
    assert_close(policy._negative[0], empty[0], rtol=0, atol=1e-5)
    assert_close(policy._negative[1], pooled_empty[0], rtol=0, atol=1e-5)
    again = make().encode(PROMPTS[1:2])
    assert all(torch.equal(again[name][0], cond[name][1]) for name in cond)
    assert policy._embeddings.cache_info().hits == 1  # the repeated prompt


def test_noise_and_pixels():
    policy = make(resolution=(48,))
    noise = policy.noise(2, torch.Generator().manual_seed(3))
    expected = torch.randn((2, 16, 6, 6), generator=torch.Generator().manual_seed(3))
    assert torch.equal(noise, expected)
    pixels = policy.decode(20 * noise.bfloat16())
    assert pixels.shape == (2, 3, 48, 48) and pixels.dtype == torch.float32
    assert pixels.min() == 0.0 and pixels.max() == 1.0
    assert torch.equal(policy.decode(noise)[1:], policy.decode(noise[1:]))


@pytest.mark.parametrize("mixed_precision, dtype", [("no", torch.float32), ("bf16", torch.bfloat16)])
def test_only_the_lora_is_trained_and_all_of_it(mixed_precision, dtype):
    """Upstream also adapts the last block's text queries, which the output does not use."""
    policy = make(mixed_precision=mixed_precision)
    weights = trained_weights(policy)
    base = [p for p in policy.module.parameters() if not p.requires_grad]
    assert {p.dtype for p in base} == {policy.dtype} == {dtype}
    assert {p.dtype for p in weights.values()} == {torch.float32}
    names = {name.removeprefix("base_model.model.transformer_blocks.").split(".lora_")[0] for name in weights}
    unused = {"2.attn.add_q_proj", "2.attn.to_add_out"}
    assert names == {f"{i}.attn.{part}" for i in range(3) for part in TRAINED} - unused
    move_the_lora(policy)
    v = policy.velocity(noise_of(policy), 0.7, policy.encode(PROMPTS))
    assert v.dtype == torch.float32
    v.square().mean().backward()
    assert all(p.grad.abs().max() > 0 for p in weights.values())
    others = [
        p
        for part in policy._pipeline.components.values()
        if isinstance(part, torch.nn.Module)
        for p in part.parameters()
    ]
    assert all(p.grad is None for p in others if not any(p is w for w in weights.values()))


def test_guidance_has_gradient_through_both_halves():
    policy = make(guidance_scale=3.0)
    move_the_lora(policy)
    noise, cond = noise_of(policy), policy.encode(PROMPTS)
    empty = policy.encode([Prompt("", {})] * 3)
    weight = next(iter(trained_weights(policy).values()))

    def gradient(v):
        return torch.autograd.grad(v.square().mean(), weight)[0]

    guided = gradient(policy.velocity(noise, 0.6, cond))
    policy.guidance_scale = 1.0
    v, v_empty = policy.velocity(noise, 0.6, cond), policy.velocity(noise, 0.6, empty)
    expected = gradient(v_empty + 3.0 * (v - v_empty))
    detached = gradient(v_empty.detach() + 3.0 * (policy.velocity(noise, 0.6, cond) - v_empty.detach()))
    assert_close(guided, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    assert (guided - detached).abs().max() > 0.01 * guided.abs().max()


def test_the_reference_is_the_base_model_and_leaves_gradients_alone():
    policy = make()
    noise, cond = noise_of(policy), policy.encode(PROMPTS)
    base = policy.velocity(noise, 0.5, cond)
    move_the_lora(policy)
    moved = policy.velocity(noise, 0.5, cond)
    assert (moved - base).abs().max() > 0.01
    with torch.no_grad(), policy.reference():
        assert torch.equal(policy.velocity(noise, 0.5, cond), base)
    moved.square().mean().backward()
    assert all(p.grad.abs().max() > 0 for p in trained_weights(policy).values())
    assert torch.equal(policy.velocity(noise, 0.5, cond), moved)


def test_an_exported_lora_makes_the_same_images_in_a_plain_pipeline():
    policy, pipeline = make(), plain_pipeline()
    noise = noise_of(policy)
    before = sample(policy, noise)
    move_the_lora(policy)
    images = sample(policy, noise)
    assert (images - before).abs().max() > 0.1
    with tempfile.TemporaryDirectory() as exported:
        path = policy.export(Path(exported))
        assert path.exists() and [path] == list(Path(exported).iterdir())
        pipeline.load_lora_weights(exported)
    assert_close(images_of(pipeline, noise), images, rtol=0, atol=1e-4)


def test_policies_start_alike():
    torch.manual_seed(5)
    first = trained_weights(make())
    torch.manual_seed(6)
    drawn = torch.initial_seed()
    second = trained_weights(make())
    assert torch.initial_seed() == drawn
    assert all(torch.equal(first[name], second[name]) for name in first)


def run(name, output_dir, **options):
    """Train on the tiny model; returns the metrics and the folder's exported LoRA."""
    from safetensors.torch import load_file

    module = ALGORITHMS[name]
    small = {
        "model": "sd3.5-m",
        "model_path": model_path(),
        "resolution": (RESOLUTION,),
        "lora_rank": 4,
        "mixed_precision": "no",
        "prompts": str(output_dir.parent / "prompts.txt"),
        "reward": "jpeg",
        "num_iterations": 2,
        "num_prompts": 2,  # so that OP-GRPO replays from iteration 2
        "group_size": 2,
        "num_steps": 3,
        "eval_samples": 2,
        "eval_steps": 2,
        "eval_every": 1,
        "updates_per_rollout": 1,
        "beta": 0.1,
    }
    (output_dir.parent / "prompts.txt").write_text("a cat\ntwo dogs\n")
    history = module.train(module.Args(output_dir=str(output_dir), **small | options))
    return history, load_file(output_dir / "pytorch_lora_weights.safetensors")


@pytest.fixture
def few_tokens(monkeypatch):
    """Runs with fewer tokens take a third of the time."""
    monkeypatch.setattr(sd3, "PROMPT_TOKENS", 8)


def without_times(history):
    return [{k: v for k, v in m.items() if not k.startswith("seconds")} for m in history]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_runs_resume_exactly(name, tmp_path, few_tokens):
    """Two iterations equal one and another, in another Run; before the first update every ratio is 1."""
    straight, weights = run(name, tmp_path / "straight")
    assert name != "op_grpo" or straight[1]["replays"] == 2
    assert [m["ratio_deviation"] for m in straight] == [0.0, 0.0]
    assert straight[0]["kl"] == 0.0 < straight[1]["kl"] and straight[0]["grad_norm"] > 0.0
    assert all(m["trained_steps"] > 0 for m in straight)
    run(name, tmp_path / "resumed", num_iterations=1)
    args = saved_args(ALGORITHMS[name].Args, str(tmp_path / "resumed"))
    resumed = ALGORITHMS[name].train(replace(args, num_iterations=2))
    assert without_times(resumed) == without_times(straight)
    state = torch.load(tmp_path / "resumed" / "checkpoints" / "000002.pt", weights_only=True)
    assert len(state["module"]) == len(weights) and all(".lora_" in key for key in state["module"])
    from safetensors.torch import load_file

    resumed_weights = load_file(tmp_path / "resumed" / "pytorch_lora_weights.safetensors")
    assert all(torch.equal(resumed_weights[key], weights[key]) for key in weights)
    assert any(value.abs().max() > 0 for key, value in weights.items() if "lora_B" in key)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_ratios_are_one_in_16_bits(name, tmp_path, few_tokens, monkeypatch):
    """And a model in a relative folder is found again from any other."""
    monkeypatch.chdir(folder().name)
    options = {
        "storage_dtype": "bfloat16",
        "model_path": "sd3.5-m",
        "mixed_precision": "bf16",
        "micro_batch_size": 3,
    }
    history, _ = run(name, tmp_path / "run", num_iterations=2, guidance_scale=1.0, ratio="per_dim", **options)
    assert [m["ratio_deviation"] for m in history] == [0.0, 0.0]
    settings = json.loads((tmp_path / "run" / "args.json").read_text())
    assert Path(settings["model_path"]).is_absolute() and Path(settings["model_path"]).samefile(model_path())


def test_options_reach_the_model():
    options = {"model_path": model_path(), "lora_rank": 3, "resolution": (48,), "guidance_scale": 2.0}
    policy = make_policy("sd3.5-m", "cpu", None, options | {"mixed_precision": "no"})
    assert policy.latent_shape == (16, 6, 6) and policy.guidance_scale == 2.0
    assert policy.dtype == torch.float32 and policy.device == torch.device("cpu")
    config = policy.module.peft_config["default"]
    assert (config.r, config.lora_alpha) == (3, 6)


@pytest.mark.parametrize("path", ["missing/folder/here", "empty"])
def test_missing_weights_are_refused_in_a_line(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=f"--model-path {path}: it cannot be loaded") as error:
        make_policy("sd3.5-m", options={"model_path": path})
    message = str(error.value)
    assert "\n" not in message and f"accept the licence at https://huggingface.co/{HUB_ID}" in message


def test_missing_packages_are_refused_in_a_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)
    with pytest.raises(InputError, match=r'pip install -c scripts/constraints.txt "\.\[models\]"'):
        make_policy("sd3.5-m", options={"model_path": model_path()})


def test_tiny_models_are_small_and_the_same_each_time(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "make_tiny_models.py"))
    script["main"](script["Args"](output_dir=tmp_path))
    weights = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.safetensors"))
    assert len(weights) == 5 and sum(path.stat().st_size for path in tmp_path.rglob("*")) < 4_000_000
    for path in weights:
        assert (tmp_path / path).read_bytes() == (Path(folder().name) / path).read_bytes()
    config = json.loads((tmp_path / "sd3.5-m" / "transformer" / "config.json").read_text())
    assert config["qk_norm"] == "rms_norm" and config["dual_attention_layers"] == [0, 1]


@pytest.mark.parametrize("mutant", SD3_MUTANTS, ids=[f"{m.function}: {m.fault}" for m in SD3_MUTANTS])
def test_mutant_is_killed(mutant, tmp_path):
    with applied(mutant, tmp_path):
        try:
            run_test(mutant.killed_by)
        except (Exception, pytest.fail.Exception):
            return
    pytest.fail(f"{mutant.function} with the fault {mutant.fault!r} passes {mutant.killed_by}")
