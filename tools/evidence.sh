#!/usr/bin/env bash
# Run the tests, then the benchmarks, that this machine's NVIDIA GPUs support, in pieces of under ten minutes. Finished
# pieces are recorded, so that an interrupted run resumes.
# Usage: tools/evidence.sh PYTHON [--list] [PIECE...], where PYTHON has the package's dependencies.
# The number of GPUs selects the pieces. --list prints them with their commands, state and estimated time, and marks those
# that exceed the time limit. Pieces named on the command line run in any case.
# Environment:
#   RESULTS  folder of the reports and records (default: benchmarks/results)
#   GPUS     number of GPUs (default: those that nvidia-smi lists)
#   MINUTES  time limit for all pieces; none starts that would end later (default: 25)
#   BEFORE   another checkout, whose operations are timed next to those of this one
# A failing piece does not stop the others; the exit status is that of the first failure. At the end, the tables of
# docs/performance.md are regenerated from the reports.
set -uo pipefail
python=${1:?usage: tools/evidence.sh PYTHON [--list] [PIECE...]}
shift
cd "$(dirname "$0")/.."
results=${RESULTS:-benchmarks/results}
gpus=${GPUS:-$(nvidia-smi -L 2>/dev/null | wc -l)}
done_folder=$results/evidence
most_seconds=590 # time limit of a piece
budget=$((60 * ${MINUTES:-25}))
only_list=
if [[ ${1:-} == --list ]]; then
  only_list=yes
  shift
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# Multicast memory can make the drivers of a shared host fail.
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1

if ((gpus < 1)); then
  echo "tools/evidence.sh: this machine has no NVIDIA GPU that nvidia-smi lists" >&2
  exit 2
fi
suffix=
((gpus > 1)) && suffix="_${gpus}_gpus"

pieces=() names=" " # name, estimated seconds and command of each; all names, separated by spaces
piece() { pieces+=("$1" "$2" "$3") names+="$1 "; }
tests() { piece "tests-$1" "$2" "${3:-}tools/test_gpu.sh $python $1"; }
bench() { piece "bench-$1" "$2" "$python benchmarks/$3 --out $results"; }

# The most important pieces come first, after the tests of their kernels. Estimated seconds are from H200s, and are
# replaced by the time that a piece took here. Tests mostly compile, several at a time.
tests contract 280 "JOBS=8 "
if ((gpus > 1)); then
  layers="--tokens 4096 --parts --layers moe capacity"
  bench layer-deepseek-v3 200 "layer.py --models deepseek-v3 $layers --suffix '${suffix}_deepseek_v3'"
  bench layer-qwen3-30b 150 "layer.py --models qwen3-30b $layers --suffix '${suffix}_qwen3_30b'"
  bench exchange 80 "exchange.py --suffix '$suffix' --ranks $gpus --routing uniform"
  models="deepseek-v3 qwen3-30b mixtral-8x7b" many="--routing uniform --tokens 4096 32768"
  bench layer-parts 150 "layer.py --models $models $many --parts dispatch combine --layers --suffix '${suffix}_parts'"
  graphs="--graphs $many"
  bench exchange-graphs 80 "exchange.py $graphs --ranks $gpus --suffix '${suffix}_graphs'"
  bench low-latency 150 "low_latency.py --suffix '$suffix' --ranks $gpus"
  recipes="--layers moe fp8 'fp8 once' capacity"
  bench layer-recipes 80 "layer.py --models deepseek-v3 --tokens 4096 --routing uniform --parts $recipes --suffix '${suffix}_recipes'"
  ragged="--models qwen3-30b deepseek-v3 --routing uniform --layers moe ragged"
  bench layer-ragged 200 "layer.py $ragged --tokens 4096 --parts --suffix '${suffix}_ragged'"
  bench layer-mixtral 150 "layer.py --models mixtral-8x7b $layers --suffix '${suffix}_mixtral'"
  tests processes 200
  tests gemms 260
fi
[[ -n ${BEFORE:-} ]] && bench compare 120 "compare.py --against $BEFORE --suffix '$suffix'"
bench fused-moe 100 "fused_moe.py --models qwen3-30b"
decode="--models qwen3-30b mixtral-8x7b gpt-oss-120b --tokens 1 4 16 64 --formats fp8 int8 --graphs"
bench fused-moe-decode 120 "fused_moe.py $decode --only 'fused_moe, ' several 'a step' --suffix _decode"
batches="--models qwen3-30b mixtral-8x7b --tokens 128 256 512 --formats fp8 int8 int4_prepacked mxfp4_prepacked --graphs"
bench fused-moe-batches 120 "fused_moe.py $batches --only 'fused_moe, ' several --suffix _batches"
prepacked="--models qwen3-30b mixtral-8x7b gpt-oss-120b --tokens 1 16 64 256 --graphs --suffix _prepacked"
prepacked+=" --formats mxfp4 mxfp4_prepacked int4 int4_prepacked --only 'fused_moe, ' several 'a step'"
bench fused-moe-prepacked 240 "fused_moe.py $prepacked"
bench fused-moe-mixtral 100 "fused_moe.py --models mixtral-8x7b --suffix _mixtral"
prefill="--models qwen3-30b mixtral-8x7b deepseek-v3-quarter --tokens 4096 --formats --lengths 4 16"
bench fused-moe-prefill 190 "fused_moe.py $prefill --only several 'one launch' 'hidden rows' einsum --suffix _prefill"
compile="compile_times.py --models deepseek-v3-quarter --rounds 2"
bench compile-times 140 "$compile"
bench compile-times-fp8 80 "$compile --recipe fp8 --suffix _fp8"
bench fused-moe-large 100 "fused_moe.py --models deepseek-v3 --shard 8 --suffix _deepseek_shard"
bench grouped-gemm 300 "grouped_gemm.py"
tests gpu 560
tests devices 120 "JOBS=8 "

for name in "$@"; do # an unknown name would run nothing
  [[ $names == *" $name "* ]] && continue
  echo "tools/evidence.sh: no piece $name for $gpus GPUs; --list prints all pieces" >&2
  exit 2
done

commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
wanted=" $* "
status=0
planned=0 # seconds of the pieces to run, for --list
ran=
for ((i = 0; i < ${#pieces[@]}; i += 3)); do
  name=${pieces[i]} estimate=${pieces[i + 1]} command=${pieces[i + 2]} stamp=$done_folder/${pieces[i]}.txt
  [[ $# -gt 0 && $wanted != *" $name "* ]] && continue
  was_done=
  if [[ -e $stamp ]]; then # "COMMIT, N GPUs, SECONDS s"
    IFS=, read -r before machine took <"$stamp"
    [[ $machine == " $gpus GPUs" && $took =~ ([0-9]+) ]] && estimate=${BASH_REMATCH[1]}
    [[ "$before,$machine" == "$commit, $gpus GPUs" ]] && was_done=yes
  fi
  elapsed=$SECONDS
  [[ -n $only_list ]] && elapsed=$planned
  late=
  [[ $# -eq 0 && -z $was_done ]] && ((elapsed + estimate > budget)) && late=yes
  if [[ -n $only_list ]]; then
    [[ -z $was_done && -z $late ]] && planned=$((planned + estimate))
    printf '%-4s  %-22s %4d s  %s\n' "${was_done:+done}${late:+late}" "$name" "$estimate" "$command"
    continue
  fi
  if [[ -n $was_done && $# -eq 0 ]]; then
    echo "== $name: done at $commit"
    continue
  fi
  if [[ -n $late ]]; then
    echo "== $name: left for the next run: it takes about $estimate s, and $elapsed of $budget s have passed"
    continue
  fi
  echo "== $name: $command"
  start=$SECONDS
  if RESULTS=$results timeout "$most_seconds" bash -c "$command"; then
    mkdir -p "$done_folder"
    echo "$commit, $gpus GPUs, $((SECONDS - start)) s" >"$stamp"
    ran=yes
  else
    code=$?
    status=$((status ? status : code))
    echo "== $name: exit status $code" >&2
  fi
  echo "== $name: $((SECONDS - start)) s"
done
if [[ -n $ran && $results == benchmarks/results ]]; then
  "$python" benchmarks/tables.py || status=$((status ? status : $?))
fi
exit "$status"
