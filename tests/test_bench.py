"""The timings of scripts/bench.py, at a tiny size: what they print, not how long it takes."""

import runpy
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench.py"


def test_the_exact_ratio_is_timed():
    sizes = "--vocab-size 70 --tokens 3 --embedding 4 --num-steps 4 --draws 2 --repeat 1"
    done = subprocess.run([sys.executable, SCRIPT, "ratio", *sizes.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    settings, *rows = done.stdout.splitlines()
    assert (
        settings.startswith("vocab_size 70, tokens 3, embedding 4, num_steps 4") and "threads 1" in settings
    )
    assert len(rows) == 6 and all(float(row.split()[-2]) >= 0 for row in rows)
    assert rows[0].startswith("tables, for each t") and rows[-1].endswith("GiB")


def test_an_iteration_of_dflow_is_timed():
    bench = runpy.run_path(str(SCRIPT))["BENCHES"]["dflow"](iterations=3, num_prompts=2, group_size=2)
    found = bench.run()
    assert len(found) == 6 * 2 and all(value > 0 for value in found.values())
    assert list(found)[:2] == ["exact: rollout", "exact: update"]
