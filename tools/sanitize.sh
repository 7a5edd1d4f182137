#!/usr/bin/env bash
# Runs the GPU tests under NVIDIA's compute-sanitizer and fails on the first error that it reports.
#
#   tools/sanitize.sh [pytest arguments]          default: tests/gpu
#   TOOLS="memcheck racecheck" tools/sanitize.sh  which of its tools; default: memcheck synccheck
#
# Only kernels of this project are looked at: Paddle's and CuPy's own would take minutes more, and failed calls of the CUDA
# API are not errors of ours (tests provoke some, and Paddle has kernels that Hopper cannot run). Under the tool one kernel runs
# after another, so tests that need two at once are left out.
# initcheck has to see what other kernels write, so it looks at all of them; not at copies, because Paddle 2.6 copies a
# tensor with the padding of its allocation.
set -euo pipefail
cd "$(dirname "$0")/.."
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(tests/gpu)
for tool in ${TOOLS:-memcheck synccheck}; do
  echo "== compute-sanitizer --tool $tool"
  looked_at=(--kernel-name kernel_substring=paddle_kv)
  [ "$tool" = initcheck ] && looked_at=(--check-api-memory-access no)
  compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 --report-api-errors no \
    "${looked_at[@]}" ${PYTHON:-python3} -W ignore -m pytest -q -p no:cacheprovider \
    -m "not concurrent_kernels" "${targets[@]}"
done
