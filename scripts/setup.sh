# Sourced by quickstart.sh and test.sh. `set_up EXTRAS` makes .venv hold the dependencies of pyproject.toml and of its
# extras EXTRAS ("" for none), in the versions of constraints.txt. It installs nothing if they are there already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "error: $*" >&2; exit 1; }

find_python() {  # the first Python >= 3.10; PYTHON=... chooses another
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

requirements() {  # the dependencies and the given extras of pyproject.toml, a line each
    .venv/bin/python - "$1" <<'EOF'
import sys

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = [project["optional-dependencies"][extra] for extra in sys.argv[1].split()]
print("\n".join(sum(extras, project["dependencies"])))
EOF
}

set_up() {
    local extras=$1 python ready="" stamp
    stamp=".venv/.ready-${1:-base}"
    stamp="${stamp// /-}"
    # A finished set-up leaves a stamp: the checksum of what it installed.
    ready="$(cat pyproject.toml scripts/constraints.txt | cksum)"
    if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$ready" ]; then
        return
    fi
    echo "== Setting up .venv (once; several minutes, most of it PyTorch)"
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        python=$(find_python) || fail "no Python 3.10 or newer found${PYTHON:+ (PYTHON=$PYTHON)}." \
            "On Debian or Ubuntu: sudo apt install python3 python3-venv"
        "$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module." \
            "On Debian or Ubuntu: sudo apt install python3-venv"
        echo "== 1/3 virtual environment, with $("$python" --version)"
        rm -rf .venv
        "$python" -m venv .venv || fail "$python could not make .venv (see above)"
    fi
    echo "== 2/3 PyTorch"
    .venv/bin/python -m pip install --disable-pip-version-check -c scripts/constraints.txt torch ||
        fail "PyTorch could not be installed (see above); run this script again to continue"
    echo "== 3/3 other packages"
    requirements "$extras" | .venv/bin/python -m pip install --disable-pip-version-check \
        -c scripts/constraints.txt -r /dev/stdin ||
        fail "packages could not be installed (see above); run this script again to continue"
    echo "$ready" | tee .venv/.ready-base >"$stamp"  # extras come on top of the base
    echo "== Ready"
}
