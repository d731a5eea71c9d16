#!/usr/bin/env bash
# Set up what is missing, then train TP-GRPO on the embedded digits: under a minute on a CPU. Options pass through to it.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up ""
echo "== Training: TP-GRPO teaches a small model of handwritten digits to draw the digit that its prompt names"
exec .venv/bin/python algos/tp_grpo.py "$@"
