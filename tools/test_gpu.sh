#!/usr/bin/env bash
# Run the tests on this machine's NVIDIA GPUs, in one process that drives all of them and with one process per GPU.
# Usage: tools/test_gpu.sh PYTHON [PART...], where PYTHON has the package's dependencies.
# Parts (default: all except sharing and gemms):
#   gpu        tests/gpu, which need GPUs
#   contract   the contract suite on 1, 2 and 4 GPUs, with triton and pallas, and random sizes
#   devices    the other tests that touch devices
#   processes  contract tests and part of tests/gpu in 2 processes, and in one per GPU
#   gemms      contract tests of fused GEMMs, in one process per GPU
#   sharing    contract tests in 4 and 8 processes that share fewer GPUs
# Environment:
#   RESULTS      folder of test_gpu.json and training_equivalence.json (default: runs/test_gpu)
#   JOBS         pytest processes that share the GPUs for `contract` and `devices`, which mostly compile (default: 1);
#                limited by GPU memory, 10 GB each
#   PYTEST_ARGS  more arguments for pytest
# A failing part does not stop the others; the exit status is that of the first failure.
set -uo pipefail
python=${1:?usage: tools/test_gpu.sh PYTHON [PART...]}
shift
cd "$(dirname "$0")/.."
parts=${*:-gpu contract devices processes}
results=${RESULTS:-runs/test_gpu}
jobs=${JOBS:-1}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} JAX_EP_TEST_DEVICES=gpu
# Multicast memory can make the drivers of a shared host fail.
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
# A thread ends a process that hangs in a driver, which ignores signals.
# If the benchmark plugin is installed, it warns about parallel runs, and warnings are errors.
options=(-q -p no:cacheprovider -p no:benchmark --timeout-method thread -o timeout=150 --implementation triton --results "$results")
read -ra more <<<"${PYTEST_ARGS:-}"
contract=(dispatch_combine gradients moe transforms)
low_latency=(low_latency low_latency_moe low_latency_gemm_combine)
together=("${contract[@]/#/tests/contract/test_}" "${low_latency[@]/#/tests/contract/test_}")
gemms=(fused moe_recipe)
gemms=("${gemms[@]/#/tests/contract/test_}")
gemms=("${gemms[@]/%/.py}")
together=("${together[@]/%/.py}" tests/gpu/test_soak.py tests/gpu/test_stragglers.py tests/gpu/test_nccl_beside.py)
random=tests/gpu/test_random_sizes.py # mostly compiles
devices=(ffi/test_ffi ffi/test_ffi_status test_sharding test_flax test_flax_meshes test_models ops/test_fuzz megakernels/test_growth tracing/test_recording contract/test_exchange_in_rounds)
devices=("${devices[@]/#/tests/}")
devices=("${devices[@]/%/.py}")
status=0

run() { # name, then command
  local start=$SECONDS
  echo "== $1"
  "${@:2}" || status=$((status ? status : $?))
  echo "== $1: $((SECONDS - start)) s"
}

shared() { # pytest in $jobs processes that share the GPUs' memory
  local memory=() workers=() mebibytes most
  if ((jobs > 1)); then
    # A process needs about 3 GB in addition to its pool, for code, heaps and the driver, and exits without it.
    mebibytes=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | sort -n | head -1)
    most=$((mebibytes / 10000))
    if ((jobs > most)); then
      echo "JOBS=$jobs: the smallest GPU has memory for only $most" >&2
      jobs=$((most > 1 ? most : 1))
    fi
    memory=(env "XLA_PYTHON_CLIENT_MEM_FRACTION=$(printf '0.%02d' $((65 / (jobs + 1))))")
    workers=(-n "$jobs" --dist worksteal)
  fi
  "${memory[@]}" "$python" -m pytest "${options[@]}" "${workers[@]}" "$@" "${more[@]}"
}

for part in $parts; do
  case $part in
    gpu) run gpu "$python" -m pytest "${options[@]}" tests/gpu --ignore "$random" "${more[@]}" ;;
    contract) run contract shared tests/contract tests/pallas "$random" --implementation triton,pallas ;; # the last one applies
    devices) run devices shared "${devices[@]}" ;;
    processes)
      gpus=$(nvidia-smi -L | wc -l)
      for count in $(printf '%s\n' 2 "$gpus" | sort -nu); do
        ((count >= 2 && count <= gpus)) &&
          run "$count processes" "$python" tests/helpers/run_processes.py "$count" "${options[@]}" "${together[@]}" "${more[@]}"
      done
      ;;
    gemms)
      gpus=$(nvidia-smi -L | wc -l)
      run "gemms in $gpus processes" "$python" tests/helpers/run_processes.py "$gpus" "${options[@]}" "${gemms[@]}" "${more[@]}"
      ;;
    sharing)
      gpus=$(nvidia-smi -L | wc -l)
      for count in 4 8; do # a wait for another process lasts until that one runs
        ((gpus < count)) || continue
        memory=$(printf '0.%02d' $((50 / count)))
        run "$count processes that share" env "JAX_EP_TEST_GPUS=$gpus" \
          "XLA_PYTHON_CLIENT_MEM_FRACTION=$memory" "$python" tests/helpers/run_processes.py "$count" "${options[@]}" \
          "${together[@]:0:4}" "${gemms[@]:0:2}" "${more[@]}"
      done
      ;;
    *)
      echo "tools/test_gpu.sh: unknown part $part" >&2
      exit 2
      ;;
  esac
done
exit "$status"
