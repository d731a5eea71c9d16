"""The script that makes the embedded weights, shortened: it writes what the policy and the judge load."""

import re
import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file

from shared.policies.digit_tokens import DigitTokensPolicy
from shared.policies.digits import DigitsPolicy
from shared.rewards import toy

SCRIPT = Path(__file__).parents[1] / "scripts" / "pretrain_toys.py"


def test_pretraining_writes_what_the_policy_and_the_judge_load(tmp_path, capsys):
    script = runpy.run_path(str(SCRIPT))
    script["main"](script["Args"](output_dir=tmp_path, flow_steps=3, judge_steps=3, token_steps=3))
    assert DigitsPolicy(weights=tmp_path / "digits.safetensors").module is not None
    toy.DigitsJudge().load_state_dict(load_file(tmp_path / "digits_judge.safetensors"))
    for name, path, time_input in [
        ("digit_tokens", "metric", False),
        ("digit_tokens_masked", "mask", False),
        ("digit_tokens_timed", "metric", True),
    ]:
        weights = tmp_path / f"{name}.safetensors"
        assert DigitTokensPolicy(weights=weights, path=path, time_input=time_input).module is not None
    for name, limit in [
        ("digits.safetensors", 1_000_000),
        ("digits_faithful.safetensors", 1_000_000),
        ("digits_judge.safetensors", 1_000_000),
        ("digit_tokens.safetensors", 2_000_000),
        ("digit_tokens_masked.safetensors", 2_000_000),
        ("digit_tokens_timed.safetensors", 2_000_000),
        ("digit_images.safetensors", 1_000_000),
    ]:
        shipped = SCRIPT.parents[1] / "shared" / "assets" / name
        assert shipped.stat().st_size == (tmp_path / name).stat().st_size < limit
    images = "digit_images.safetensors"
    assert (tmp_path / images).read_bytes() == (SCRIPT.parents[1] / "shared" / "assets" / images).read_bytes()


def test_quality_of_the_shipped_weights_is_what_the_readme_says(capsys):
    script = runpy.run_path(str(SCRIPT))
    script["main"](script["Args"](check=True, token_samples=4))
    printed = capsys.readouterr().out
    assert "judge: accuracy 0.986 on 360 held-out real digits" in printed
    assert "digits, ODE, 10 steps: label 0.48" in printed
    assert "digits-faithful, SDE, 10 steps, noise level 0.7: label 0.745, ink 0.229, next 0.023" in printed
    sampled = re.search(r"digit-tokens, understanding, 8 steps, sampled: accuracy (\d\.\d+)", printed)
    assert float(sampled[1]) == pytest.approx(0.59, abs=0.12)  # of 360 answers: 4.6 standard errors
    assert "digit-tokens-masked, understanding, 8 steps, greedy: accuracy 0.98" in printed
    assert printed.count("digit-tokens") == 3 * (3 + 2)  # three numbers of steps; sampled and greedy
