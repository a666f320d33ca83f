#!/bin/sh
# Print the path of a Python that can run jax_ep: 3.12 or newer, with the modules that create a virtual environment.
# The order is: $PYTHON, which must be suitable; python3.14, 3.13, 3.12 and python3 on PATH; pyenv's versions, newest
# first, activated or not. A launcher on PATH must also start: pyenv puts python3.12 there even if `pyenv global` selects
# another version.
set -u

requirement="Python 3.12 or newer, with the modules venv and ensurepip"

usable() {
  command -v "$1" >/dev/null 2>&1 &&
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
  usable "$PYTHON" && command -v "$PYTHON" && exit 0
  echo "error: PYTHON=$PYTHON is not $requirement." >&2
  exit 1
fi

for name in python3.14 python3.13 python3.12 python3; do
  usable "$name" && command -v "$name" && exit 0
done

pyenv_roots() {
  [ -z "${PYENV_ROOT:-}" ] || printf '%s\n' "$PYENV_ROOT"
  [ -z "${HOME:-}" ] || printf '%s\n' "$HOME/.pyenv"
  command -v pyenv >/dev/null 2>&1 && pyenv root 2>/dev/null
}

found=$(
  pyenv_roots | while IFS= read -r root; do
    for minor in 14 13 12; do # plain releases only: no free-threaded builds, no previews
      for python in "$root/versions/3.$minor".*/bin/python3; do
        case $python in */3.$minor.*[!0-9]*/bin/python3) continue ;; esac
        usable "$python" && printf '%s %s\n' "$minor" "$python"
      done
    done
  done | sort -rn | head -n 1 | cut -d' ' -f2-
)
if [ -n "$found" ]; then
  printf '%s\n' "$found"
  exit 0
fi

cat >&2 <<EOF
error: jax_ep needs $requirement, and none was found: not as python3.14, python3.13, python3.12 or
python3 on PATH, and not among pyenv's versions. Install one (for example: pyenv install 3.12), or name it:
  make PYTHON=/path/to/python3.12 ...
EOF
exit 1
