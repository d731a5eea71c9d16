"""The README and the run lines of the docstrings: their commands run, their example prints what it says."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from algos import dflow_grpo, flow_grpo, op_grpo, tp_grpo
from shared.command import parse_args

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MODULES = {f"algos/{m.Args.algorithm}.py": m for m in (flow_grpo, tp_grpo, op_grpo, dflow_grpo)}
TEXTS = "\n".join([README, *(module.__doc__ for module in MODULES.values())])
COMMANDS = sorted(
    {line.split("#")[0].strip() for line in re.findall(r"^ *python (algos/.*)$", TEXTS, re.MULTILINE)}
)


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--help" not in c and "--resume" not in c])
def test_commands_run(command, tmp_path, monkeypatch):
    """Each with its own options, shortened to one small iteration; then it is resumed for another."""
    path, *argv = shlex.split(command)
    module = MODULES[path]
    monkeypatch.chdir(tmp_path)
    short = (
        "--num-iterations 1 --num-prompts 2 --group-size 4 --eval-samples 10 --output-dir runs/RUN".split()
    )
    assert len(module.train(parse_args(module.Args, [*argv, *short]))) == 1
    assert len(module.train(parse_args(module.Args, ["--resume", "runs/RUN", "--num-iterations", "2"]))) == 2


def test_all_kinds_of_commands_are_there():
    assert len(COMMANDS) >= 8 and "algos/tp_grpo.py --help" in COMMANDS
    for script in ("scripts/quickstart.sh", "scripts/test.sh"):
        assert f"bash {script}" in README and (ROOT / script).exists()
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


def test_python_examples_print_what_their_comments_say(capsys, tmp_path):
    examples = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "print(" in code]
    assert examples
    for i, code in enumerate(examples):
        path = tmp_path / f"example{i}.py"
        path.write_text(code)
        runpy.run_path(str(path))
        expected = re.findall(r"print\(.*\)  # (.*)", code)
        assert expected and capsys.readouterr().out.splitlines() == expected
