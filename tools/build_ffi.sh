#!/bin/sh
# Build libjax_ep_ffi.so into the source tree, next to jax_ep/ffi/library.py, without installing the package. For work on
# the C++ sources, and for programs that import jax_ep directly from the tree.
# Usage: tools/build_ffi.sh PYTHON, where PYTHON has jaxlib installed. CMAKE selects another cmake.
set -eu
python=${1:?usage: tools/build_ffi.sh PYTHON}
cd "$(dirname "$0")/.."
cmake=${CMAKE:-cmake}
"$cmake" -S . -B build/ffi -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$python" >/dev/null
"$cmake" --build build/ffi
# Write a new file and rename it, so that processes keep the old library mapped.
cp build/ffi/libjax_ep_ffi.so jax_ep/ffi/libjax_ep_ffi.so.new
mv -f jax_ep/ffi/libjax_ep_ffi.so.new jax_ep/ffi/libjax_ep_ffi.so
echo "built jax_ep/ffi/libjax_ep_ffi.so"
