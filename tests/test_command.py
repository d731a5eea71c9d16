"""The command line as a user meets it: help, errors in one line with exit code 2, nothing written; and light
imports."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from algos import dflow_grpo, flow_grpo, op_grpo, tp_grpo
from shared import args as shared_args
from shared.command import flag_value, parse_args, run_command

ROOT = Path(__file__).parents[1]
MODULES = [flow_grpo, tp_grpo, op_grpo, dflow_grpo]


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """A folder with files that cannot be used, as the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text(" \n\n")
    Path("latin.txt").write_bytes("a four, s'il vous pla\u00eet".encode("latin-1"))
    Path("cats.txt").write_text("a cat\n")
    Path("one.txt").write_text("a one\n")
    Path("broken.jsonl").write_text('{"prompt": "a one"}\n{"prompt": \n')
    Path("nokey.jsonl").write_text('{"text": "a one"}\n')
    Path("list.jsonl").write_text('["a one"]\n')
    Path("folder").mkdir()
    Path("old").mkdir()
    Path("old/args.json").write_text(json.dumps({"algorithm": "another_grpo", "seed": 0}))
    Path("torn").mkdir()
    Path("torn/args.json").write_text('{"algorithm": "flow')
    for module in MODULES:  # a run of each algorithm without a checkpoint, and one of another version
        name = module.Args.algorithm
        settings = {"algorithm": name} | dataclasses.asdict(module.Args())
        for folder, extra in [(f"young-{name}", {}), (f"future-{name}", {"new_option": 1})]:
            Path(folder).mkdir()
            Path(folder, "args.json").write_text(json.dumps(settings | extra))
    return tmp_path


BAD = {  # the command line -> what the one line says
    "--reward nope": "unknown reward 'nope': known are label, ink, next, jpeg",
    "--reward label:x": "weight 'x' of reward 'label' is not a number",
    "--reward label:0": "other than 0",
    "--reward label,label": "given twice",
    "--reward ''": "unknown reward ''",
    "--group-size 1": "--group-size 1: it must be at least 2",
    "--num-prompts 0": "--num-prompts 0: it must be at least 1",
    "--num-prompts 11": "the set has 10 prompts",
    "--beta -1": "--beta -1.0: it must be 0 or more",
    "--learning-rate 0": "--learning-rate 0.0: it must be above 0",
    "--learning-rate nan": "above 0",
    "--weight-decay -1": "0 or more",
    "--adam-eps 0": "above 0",
    "--max-grad-norm 0": "above 0",
    "--ema-decay 1": "below 1",
    "--ema-decay -0.1": "below 1",
    "--updates-per-rollout 0": "--updates-per-rollout 0: it must be at least 1",
    "--micro-batch-size 0": "--micro-batch-size 0: it must be at least 1",
    "--reward-batch-size 0": "at least 1",
    "--num-iterations 0": "at least 1",
    "--eval-every 0": "at least 1",
    "--eval-samples 0": "at least 1",
    "--eval-steps 0": "at least 1",
    "--checkpoint-every 0": "at least 1",
    "--seed -1": "0 or more",
    "--seed 99999999999999999999": "below 2^32",
    "--output-dir ''": "--output-dir '': it must be the name of a folder",
    "--resume ''": "--resume '': it must be the folder of a run",
    "--max-grad-norm inf": "finite",
    "--prompts missing.txt": "no prompts file missing.txt",
    "--prompts empty.txt": "holds no prompts",
    "--prompts latin.txt": "not UTF-8",
    "--prompts folder": "cannot be read",
    "--prompts one.txt": "the set has 1 prompts",
    "--prompts broken.jsonl": "broken.jsonl, line 2: not JSON",
    "--prompts nokey.jsonl": 'its text under "prompt"',
    "--prompts list.jsonl": 'its text under "prompt"',
    "--output-dir empty.txt": "cannot be written",
    "--output-dir empty.txt/run": "cannot be written",
    "--output-dir old": "already holds a run",
    "--resume missing": "no run there",
    "--resume folder": "no run there",
    "--resume torn": "no run there",
    "--resume old": "that run is of another_grpo; resume it with algos/another_grpo.py",
    "--resume young-{name}": "no checkpoint; start anew",
    "--resume=young-{name} --learning-rate 1": "leave out --learning-rate",
    "--resume young-{name} --seed 3 --beta 1": "leave out --beta, --seed",
    "--resume young-{name} --output-dir other": "leave out --output-dir",
    "--resume future-{name}": "of another version",
}
FLOW = {  # of the continuous algorithms
    "--model sd9": "unknown model 'sd9': known are digits, digits-faithful",
    "--sde-window 0 10": "--sde-window 0 10: it must satisfy 0 <= START < STOP <= 9",
    "--sde-window -1 4": "0 <= START < STOP <= 9",
    "--sde-window 4 4": "0 <= START < STOP <= 9",
    "--num-steps 5 --sde-window 0 5": "STOP <= 4",
    "--num-steps 1": "--num-steps 1: it must be at least 2",
    "--noise-level 0": "--noise-level 0.0: it must be above 0",
    "--noise-level -0.5": "above 0",
    "--noise-level nan": "above 0",
    "--sampler cps --noise-level 1.2": "at most 1 for --sampler cps",
    "--clip-range -0.2": "--clip-range -0.2: it must be above 0",
    "--clip-range 0": "above 0",
    "--model-path ''": "--model-path '': it must be a folder or a hub id",
    "--lora-rank 4": "--lora-rank is an option of sd3.5-m, wan2.1, not of digits",
    "--model sd3.5-m --num-frames 5": "--num-frames is an option of wan2.1, not of sd3.5-m",
    "--lora-rank 0": "--lora-rank 0: it must be at least 1",
    "--resolution 0": "--resolution 0: it must be one or two multiples of 16",
    "--resolution 40": "multiples of 16",
    "--resolution 32 40": "--resolution 32 40: it must be one or two multiples of 16",
    "--resolution 32 32 32": "multiples of 16",
    "--num-frames 8": "--num-frames 8: it must be 4 k + 1",
    "--guidance-scale 0.5": "--guidance-scale 0.5: it must be at least 1",
    "--guidance-scale nan": "at least 1",
    "--prompts cats.txt --num-prompts 1": 'prompt "a cat" must name exactly one digit',
}
TP_ONLY = {
    "--reward-tolerance -1": "--reward-tolerance -1.0: it must be 0 or more",
    "--completion-batch-size 0": "--completion-batch-size 0: it must be at least 1",
}
OP_ONLY = {
    "--hybrid-fraction 1.5": "--hybrid-fraction 1.5: it must be 0, or enough for at least one group",
    "--hybrid-fraction nan": "and at most 1",
    "--hybrid-fraction -0.1": "0, or enough",
    "--hybrid-fraction 0.12": "0, or enough for at least one group",
    "--hybrid-source buffer --num-prompts 1": "0, or enough for at least one group",
    "--replays-per-group 4": "--replays-per-group 4: it must be at least 1 and below --group-size",
    "--replays-per-group 0": "at least 1",
    "--buffer-capacity 0": "at least 1",
    "--reward-decay 0": "above 0 and at most 1",
    "--reward-decay 1.1": "at most 1",
    "--truncate-at 0": "above 0 and at most 1",
    "--truncate-at 2": "at most 1",
    "--max-weight 0": "--max-weight 0.0: it must be above 0",
    "--max-weight nan": "above 0",
    "--sde-window 2 6": "START must be 0, or give --no-correction",
}
DFLOW_ONLY = {
    "--model digits": "model 'digits' is continuous: train it with",
    "--model sd3.5-m": "model 'sd3.5-m' is continuous: train it with",
    "--model sd9": "unknown model 'sd9': known are digit-tokens, digit-tokens-masked, digit-tokens-timed",
    "--task understanding --reward label": "reward 'label' scores images",
    "--reward answer": "reward 'answer' scores answers",
    "--task understanding --prompts cats.txt --num-prompts 1": "image",
    "--prompts cats.txt --num-prompts 1": 'prompt "a cat" must name exactly one digit',
    "--eval-prompts cats.txt": 'prompt "a cat" must name exactly one digit',
    "--eval-prompts missing.txt": "no prompts file missing.txt",
    "--eval-top-k -1": "--eval-top-k -1: it must be 0 or more",
    "--num-steps 0": "--num-steps 0: it must be at least 1",
    "--num-steps 1 --sampler released --ratio mc": "at least 1, or 2 with --sampler released",
    "--num-draws 0": "--num-draws 0: it must be at least 1",
    "--clip-range 0.1 0": "--clip-range 0.1 0.0: it must be above 0, both",
    "--clip-range nan 0.1": "above 0, both",
    "--dpo-beta 0": "--dpo-beta 0.0: it must be above 0",
    "--ratio mean_field --aggregation product": "it must be token with --ratio mean_field",
    "--sampler released": "--sampler released: it must be conditional, unless --ratio is mc",
    "--loss dpo --aggregation token": "--loss dpo: it must be grpo where tokens are clipped one by one",
    "--loss dpo --micro-batch-size 24": "--micro-batch-size 24: --loss dpo needs whole groups of 16",
}
OWN = {flow_grpo: FLOW, tp_grpo: FLOW | TP_ONLY, op_grpo: FLOW | OP_ONLY, dflow_grpo: DFLOW_ONLY}
CASES = [(module, line, said) for module in MODULES for line, said in (BAD | OWN[module]).items()]


@pytest.mark.parametrize(
    "module, line, said", CASES, ids=[f"{m.Args.algorithm} {line}" for m, line, _ in CASES]
)
def test_bad_input_is_one_line_and_exit_code_2(module, line, said, inputs, capsys):
    before = {path: path.stat().st_mtime_ns for path in inputs.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as stopped:
        run_command(module.train, module.Args, shlex.split(line.format(name=module.Args.algorithm)))
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error, error
    assert {path: path.stat().st_mtime_ns for path in inputs.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "line", ["--reword label", "--group-size many", "--sampler sde", "--sde-window 3", "extra"]
)
def test_mistyped_options_are_refused_with_the_option_named(line, inputs, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_command(flow_grpo.train, flow_grpo.Args, line.split())
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and "Traceback" not in error and line.split()[0] in error


@pytest.mark.parametrize("module", MODULES)
def test_help_explains_every_option(module, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_args(module.Args, ["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    source = Path(shared_args.__file__).read_text() + Path(module.__file__).read_text()
    for field in dataclasses.fields(module.Args):
        assert "--" + field.name.replace("_", "-") in text
        assert re.search(rf'^    {field.name}: .*\n    """', source, re.MULTILINE), (
            f"{field.name} has no docstring"
        )
    symbols = ["epsilon:", "a: strength", "T: steps", "G: images", "upstream: train.clip_range"]
    if module is dflow_grpo:
        symbols = ["n of --ratio mc", "K: steps", "G: samples", "upstream: eps_low, eps_high"]
    for symbol in [*symbols, "beta:", "P: prompts"]:
        assert symbol in " ".join(text.replace("│", " ").split()), symbol


def test_resume_keeps_settings_and_takes_a_larger_number_of_iterations(tmp_path):
    settings = {"algorithm": "tp_grpo"} | dataclasses.asdict(
        tp_grpo.Args(seed=5, sde_window=(1, 4), balanced=False)
    )
    (tmp_path / "args.json").write_text(json.dumps(settings))
    for argv in (["--resume", str(tmp_path)], [f"--resume={tmp_path}"]):
        args = parse_args(tp_grpo.Args, [*argv, "--num-iterations", "99"])
        assert (args.seed, args.sde_window, args.balanced, args.num_iterations) == (5, (1, 4), False, 99)
        assert args.resume == args.output_dir == str(tmp_path)


def test_flag_value():
    assert flag_value(["--a", "1", "--resume", "x"], "--resume") == "x"
    assert flag_value(["--resume=x=y"], "--resume") == "x=y"
    assert flag_value(["--resumes", "x"], "--resume") is None and flag_value(["--resume"], "--resume") is None


def test_the_default_folder_names_the_run(tmp_path, monkeypatch):
    from accelerate import Accelerator

    from shared.run import Run

    monkeypatch.chdir(tmp_path)
    folders = [Run(flow_grpo.Args(reward="label:1,jpeg:0.5", seed=3), Accelerator()).folder for _ in range(2)]
    assert re.fullmatch(r"runs/flow_grpo-digits-label1\+jpeg0.5-3-\d{8}-\d{6}", str(folders[0]))
    assert folders[0] != folders[1] and all((folder / "args.json").exists() for folder in folders)


@pytest.mark.parametrize("module", MODULES)
def test_run_lines_of_the_docstring_parse(module):
    lines = [
        line.split("#")[0].split()
        for line in module.__doc__.splitlines()
        if line.strip().startswith("python algos/")
    ]
    assert len(lines) >= 3
    for line in lines:
        assert (ROOT / line[1]).samefile(module.__file__)
        if "--resume" not in line:
            parse_args(module.Args, line[2:])


@pytest.mark.parametrize("name", ["flow_grpo", "tp_grpo", "dflow_grpo"])
def test_tests_named_in_the_docstring_exist(name):
    """Each claimed difference from the authors' code names a test; it must be there."""
    text = (ROOT / "algos" / f"{name}.py").read_text()
    suite = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    named = set(re.findall(r"\btest_\w+", text))
    assert len(named) >= 4 and all(f"def {test}(" in suite for test in named)


def test_the_digits_never_import_diffusers_or_transformers(tmp_path):
    """From any folder, as a process, with packages of those names installed that fail when they are
    imported."""
    for package in ("diffusers", "transformers", "peft", "torchvision"):
        (tmp_path / "site" / package).mkdir(parents=True)
        (tmp_path / "site" / package / "__init__.py").write_text(
            f"raise RuntimeError('{package} was imported')\n"
        )
        metadata = tmp_path / "site" / f"{package}-9.9.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    options = "--num-iterations 1 --num-prompts 2 --group-size 2 --eval-samples 2 --output-dir run".split()
    command = [sys.executable, str(ROOT / "algos" / "tp_grpo.py"), *options]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "evaluation reward" in result.stdout and (tmp_path / "run" / "turning_points.png").exists()
