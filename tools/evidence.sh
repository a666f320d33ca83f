#!/usr/bin/env bash
# Shows what this machine's NVIDIA GPUs can show: that the kernels compute, then how fast they are. In pieces of under ten
# minutes, of which each is remembered: after an interruption, or in another session, only what is left runs.
# Usage: tools/evidence.sh PYTHON [--list] [PIECE...], where PYTHON has the package's dependencies.
# Pieces are those for as many GPUs as there are; --list prints them, with what they run, and what is done already.
# Environment:
#   RESULTS  folder of the reports, and of what is remembered in it (default: benchmarks/results)
#   GPUS     how many GPUs to go by (default: those that nvidia-smi lists)
#   BEFORE   another checkout: its operations are timed beside those of this one
# A piece that fails does not keep others from running; the exit status is that of the first that fails.
set -uo pipefail
python=${1:?usage: tools/evidence.sh PYTHON [--list] [PIECE...]}
shift
cd "$(dirname "$0")/.."
results=${RESULTS:-benchmarks/results}
gpus=${GPUS:-$(nvidia-smi -L 2>/dev/null | wc -l)}
done_folder=$results/evidence
seconds=590 # for each piece
only_list=
if [[ ${1:-} == --list ]]; then
  only_list=yes
  shift
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# Multicast memory can make the drivers of a shared host fail.
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1

if ((gpus < 1)); then
  echo "tools/evidence.sh: this machine has no NVIDIA GPU that nvidia-smi lists; nothing to show" >&2
  exit 2
fi
suffix=
((gpus > 1)) && suffix="_${gpus}_gpus"

pieces=() # name, then what it runs
piece() { pieces+=("$1" "$2"); }
tests() { piece "tests-$1" "tools/test_gpu.sh $python $1"; }
bench() { piece "bench-$1" "$python benchmarks/$2 --out $results"; }

# What is wrong is known first, then what has changed, then the whole layer, whose figures are looked at most.
tests contract
tests gpu
tests devices
[[ -n ${BEFORE:-} ]] && bench compare "compare.py --against $BEFORE --suffix '$suffix'"
if ((gpus > 1)); then
  tests products
  tests processes
  bench layer "layer.py --suffix '$suffix' --tokens 4096 8192"
  bench exchange "exchange.py --suffix '$suffix' --ranks $gpus"
  bench low-latency "low_latency.py --suffix '$suffix' --parts exchange layer --ranks $gpus"
fi
bench fused-moe "fused_moe.py --models qwen3-30b"
bench fused-moe-graphs "fused_moe.py --models qwen3-30b mixtral-8x7b --tokens 1 4 16 --graphs --suffix _graphs"
bench fused-moe-mixtral "fused_moe.py --models mixtral-8x7b --suffix _mixtral"
bench fused-moe-large "fused_moe.py --models deepseek-v3 --shard 8 --suffix _deepseek_shard"
bench grouped-gemm "grouped_gemm.py --parts kernels"
bench decode-experts "low_latency.py --parts experts"

commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
wanted=" $* "
status=0
for ((i = 0; i < ${#pieces[@]}; i += 2)); do
  name=${pieces[i]} command=${pieces[i + 1]} stamp=$done_folder/${pieces[i]}.txt
  [[ $# -gt 0 && $wanted != *" $name "* ]] && continue
  was_done=
  [[ -e $stamp && $(cat "$stamp") == "$commit, $gpus GPUs" ]] && was_done=yes
  if [[ -n $only_list ]]; then
    printf '%-4s  %-22s  %s\n' "${was_done:+done}" "$name" "$command"
    continue
  fi
  if [[ -n $was_done && $# -eq 0 ]]; then
    echo "== $name: done at $commit"
    continue
  fi
  echo "== $name: $command"
  start=$SECONDS
  if RESULTS=$results timeout "$seconds" bash -c "$command"; then
    mkdir -p "$done_folder"
    echo "$commit, $gpus GPUs" >"$stamp"
  else
    code=$?
    status=$((status ? status : code))
    echo "== $name: exit status $code" >&2
  fi
  echo "== $name: $((SECONDS - start)) s"
done
exit "$status"
