#!/bin/sh
# Builds libjax_ep_ffi.so into the source tree, beside jax_ep/ffi/library.py, without installing the package: for work
# on the C++ sources, and for programs that import jax_ep straight from the tree.
# Usage: tools/build_ffi.sh PYTHON, where PYTHON has jaxlib installed. CMAKE names another cmake.
set -eu
python=${1:?usage: tools/build_ffi.sh PYTHON}
cd "$(dirname "$0")/.."
cmake=${CMAKE:-cmake}
"$cmake" -S . -B build/ffi -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$python" >/dev/null
"$cmake" --build build/ffi
# Through a new file and a rename: a process that has the old library mapped keeps it.
cp build/ffi/libjax_ep_ffi.so jax_ep/ffi/libjax_ep_ffi.so.new
mv -f jax_ep/ffi/libjax_ep_ffi.so.new jax_ep/ffi/libjax_ep_ffi.so
echo "built jax_ep/ffi/libjax_ep_ffi.so"
