#!/usr/bin/env bash
# What needs two GPUs of one host, tested and measured in one call, about 4 minutes. Builds nothing: Paddle and the
# operators are there.
#
#   tools/two_gpus.sh OUT            tests peers timeline ranks
#   tools/two_gpus.sh OUT PART...    some of these, and shapes: which shape of the copy kernel suits which link (nvcc compiles it)
#
# OUT gets a log of each part, and the CSV, JSON and PNG files of its programs. Exit code 1 if one of them failed; the
# others run all the same.
set -uo pipefail
out=$(realpath -m "${1:?the folder of the results}")
shift
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
failed=()

start() { # start "name of the log" command...: beside what follows, until finish
    local name=$1
    shift
    printf '== %s: %s\n' "$name" "$*"
    "$@" </dev/null >"$out/$name.log" 2>&1 &
    running[$!]=$name
}

finish() {
    local process started=$SECONDS
    for process in "${!running[@]}"; do
        wait "$process" || failed+=("${running[$process]}")
        printf '   %s after %d s: %s\n' "${running[$process]}" $((SECONDS - started)) "$(tail -n 1 "$out/${running[$process]}.log")"
    done
    running=()
}
declare -A running=()

measure() {
    start "$@"
    finish
}

tests() { # what they test is right or wrong however much else runs
    start tests-0-to-1 python -m pytest -q -s tests/gpu/test_peers_on_gpu.py -k 0-to-1
    start tests-1-to-0 python -m pytest -q -s tests/gpu/test_peers_on_gpu.py -k 1-to-0
    start tests-second-gpu python -m pytest -q -s tests/gpu/test_second_gpu.py
    finish
}

ranks() {
    measure ranks python tools/bench_ranks.py --gpus 2 --json "$out/ranks.json"
}

peers() {
    measure peers python tools/bench_peers_on_gpu.py --sender-gpu 1 --kib 4 32 128 --rounds 5 --seconds 1 \
        --json "$out/peers.json"
}

timeline() {
    measure timeline python tools/bench_decode_start.py --sender-gpu 1 --out "$out"
}

shapes() {
    measure shapes python tools/bench_copy_shapes.py --json "$out/shapes.json"
}

usual="tests peers timeline ranks"
known="$usual shapes"
parts=${*:-$usual}
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
