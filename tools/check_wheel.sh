#!/bin/sh
# Install a wheel into an empty environment without a compiler, as a user would, and run the README's quick start, a
# benchmark and the compiled library there.
# Usage: tools/check_wheel.sh PYTHON WHEEL. CONSTRAINTS is a file of versions to install; default: pip's choice.
set -eu
python=${1:?usage: tools/check_wheel.sh PYTHON WHEEL}
wheel=$(realpath "${2:?usage: tools/check_wheel.sh PYTHON WHEEL}")
readme=$(realpath "$(dirname "$0")/../README.md")
constraints=${CONSTRAINTS:+$(realpath "$CONSTRAINTS")}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/env"
cd "$folder" # outside of the sources, which Python would import first
alone() { # only with the programs of the environment
  env -u CC -u CXX -u PYTHONPATH PATH="$folder/env/bin" XLA_FLAGS=--xla_force_host_platform_device_count=8 \
    PIP_NO_COMPILE=1 "$folder/env/bin/python" "$@"
}
alone -m pip install --disable-pip-version-check -q --only-binary :all: ${constraints:+-c "$constraints"} "$wheel"
alone -m jax_ep bench fused-moe --quick --tokens 4 --formats --only fused_moe >/dev/null
alone - "$readme" <<'PROGRAM'
import importlib.util, re, shutil, sys
from pathlib import Path

present = [name for name in ("cc", "c++", "gcc", "g++", "clang", "cmake") if shutil.which(name)]
present += [name for name in ("flax", "triton", "pytest") if importlib.util.find_spec(name)]
if present:
    sys.exit(f"not an empty environment: it has {present}")
section = re.search(r"^## Quick start\n(.*?)^##+ ", Path(sys.argv[1]).read_text(), re.MULTILINE | re.DOTALL)
blocks = re.findall(r"^```python\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
if not blocks:
    sys.exit("the README's quick start has no code")
for block in blocks:
    exec(block)

import jax_ep.ffi

library = jax_ep.ffi.load()._name
if not library.startswith(sys.prefix):
    sys.exit(f"{library} is not that of the wheel")
print(f"the quick start ran with jax {jax.__version__} and {Path(library).name}")
PROGRAM
