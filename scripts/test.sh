#!/usr/bin/env bash
# Set up what is missing, then run the tests. Arguments pass through to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up "test models ocr"
exec .venv/bin/python -m pytest -n auto --maxprocesses 4 --dist loadgroup "$@"
