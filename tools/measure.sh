#!/usr/bin/env bash
# Measures what docs/performance.md has, on the GPU of this machine, one program after the other.
#
#   tools/measure.sh OUT            everything, about 20 minutes on an H200
#   tools/measure.sh OUT PART...    some of: pipeline engines swap calls urgent soak cache inserts convert permute topk index
#
# OUT gets a log of each part, and the CSV, JSON and PNG files of its programs. Exit code 1 if one of them failed;
# the others run all the same.
set -uo pipefail
out=$(realpath -m "${1:?the folder of the results}")
shift
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
bench="python -m paddle_kv.cli.main bench"
failed=()

measure() { # measure "name of the log" command...
    local name=$1 started=$SECONDS
    shift
    printf '== %s: %s\n' "$name" "$*"
    "$@" </dev/null >"$out/$name.log" 2>&1 || failed+=("$name")
    printf '   %d s, %s\n' $((SECONDS - started)) "$out/$name.log"
}

pipeline() {
    local products
    for products in 2 4 1; do # moving takes as long as computing, half as long, twice as long
        measure "pipeline-$products" python examples/gpu_pipeline.py --products $products --out "$out/pipeline-$products"
    done
}

engines() {
    measure calibrate $bench --calibrate --csv "$out/calibrate.csv"
    measure engines python tools/bench_engines.py --pipeline --csv "$out/engines.csv"
    measure engines-large python tools/bench_engines.py --sizes 128 --both --plain --csv "$out/engines-large.csv"
    measure engines-each python tools/bench_engines.py --engines copy_engine,kernel,staging --csv "$out/engines-each.csv"
}

swap() {
    local sizes="--layers 16 --blocks 256 --tokens 2 --tokens 8 --tokens 16 --tokens 64"
    measure swap $bench $sizes --csv "$out/swap.csv" --json "$out/swap.json" --plot "$out/swap.png"
    for load in gemm gemv; do
        measure "swap-$load" $bench --layers 16 --blocks 256 --tokens 16 --tokens 64 --load $load --csv "$out/$load.csv"
    done
}

calls() {
    measure calls python tools/bench_call_cost.py --backend cupy --blocks 1,256 --layers 32 --out "$out"
}

urgent() {
    measure urgent python -m pytest -q -s tests/gpu/test_transfer_queue.py -k urgent
}

soak() {
    measure soak python -m paddle_kv.cli.main soak --device gpu --minutes 1 --layers 32 --block-bytes 2032 \
        --device-blocks 8192 --host-blocks 32768 --blocks 1024 --json "$out/soak.json"
}

cache() {
    measure cache_ops python tools/bench_cache_ops.py --repeats 9 --output "$out/cache_ops"
}

inserts() {
    measure inserts python tools/bench_small_inserts.py --output "$out/small_inserts"
}

convert() {
    measure convert python tools/bench_convert_ops.py --repeats 9 --output "$out/convert"
}

permute() {
    measure permute python tools/bench_permute.py --repeats 9 --out "$out"
}

topk() {
    measure topk python tools/bench_topk_rows.py --out "$out"
}

index() {
    measure index python tools/bench_index.py --csv "$out/index.csv" --json "$out/index.json"
}

known="pipeline engines swap calls urgent soak cache inserts convert permute topk index"
parts=${*:-$known}
for part in $parts; do
    if [[ " $known " != *" $part "* ]]; then
        echo "$part is none of: $known"
        exit 2
    fi
done
for part in $parts; do
    $part
done
for name in "${failed[@]}"; do
    echo "failed: $name, see $out/$name.log"
done
[ "${#failed[@]}" = 0 ]
