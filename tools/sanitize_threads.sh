#!/usr/bin/env bash
# Runs the host code that starts threads, or is called from several, under ThreadSanitizer: needs a C++ compiler, no GPU.
#
#   tools/sanitize_threads.sh                    ThreadSanitizer
#   SANITIZER=address tools/sanitize_threads.sh  AddressSanitizer and the undefined behaviour one
#
# The queue of transfers and its engines are compiled with a CUDA runtime of threads (tests/native/fake_cuda) in place of
# the real one.
# Python is left out: neither the interpreter nor Paddle is built for a sanitizer, and both would drown the report.
set -euo pipefail
cd "$(dirname "$0")/.."
sanitizer=${SANITIZER:-thread}
[ "$sanitizer" != address ] || sanitizer=address,undefined
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
flags=(-std=c++17 -O1 -g -fno-omit-frame-pointer "-fsanitize=$sanitizer" -fno-sanitize-recover=all -pthread
  -Wall -Werror -Itests/native -Itests/native/fake_cuda -Icustom_ops/include '-DPADDLE_KV_BUILT_CUDA_ARCHS="80"')
object() { echo "$folder/${1//\//_}.o"; }
# The longest first.
programs=({engine_failures,engine_order,engines,transfer_queue,queue_stress,queue_calls}_test
  {host_threads,queue_preparation,marks,pointer_facts}_test)
declare -A sources=()  # each is compiled once, for all programs
listed=$(python3 tests/native/sources.py "${programs[@]}")
while read -r program files; do sources[$program]=$files; done <<<"$listed"
# shellcheck disable=SC2086  CXX may be "ccache g++", and the sources of a program are words
for source in $(printf '%s\n' ${sources[*]} | sort -u); do
  [ "$(jobs -rp | wc -l)" -lt "$(nproc)" ] || wait -n || true  # without an object the linker fails
  ${CXX:-g++} "${flags[@]}" -x c++ -c "$source" -o "$(object "$source")" &
done
wait
for program in "${programs[@]}"; do
  objects=()
  for source in ${sources[$program]}; do objects+=("$(object "$source")"); done
  ${CXX:-g++} "${flags[@]}" "${objects[@]}" -o "$folder/$program"
done
# ThreadSanitizer cannot place its shadow memory where the kernel randomises addresses by more bits than it knows.
run=(env)
setarch -R true 2>/dev/null && run=(setarch -R)
sanitized() {  # program: its report is shown when it is over
  local started=$SECONDS found=0
  # Most pages of its shadow memory, several times what tests move, are touched once: fewer of them are quicker.
  local options="halt_on_error=1 second_deadlock_stack=1 no_huge_pages_for_shadow=0 ${TSAN_OPTIONS:-}"
  TSAN_OPTIONS=$options timeout 600 "${run[@]}" "$folder/$1" >"$folder/$1.log" 2>&1 || found=$?
  echo "== $1, -fsanitize=$sanitizer, $((SECONDS - started)) s"
  cat "$folder/$1.log"
  [ "$found" = 0 ] || echo "== $1 failed: exit status $found"
  return "$found"
}
running=()
for program in "${programs[@]}"; do
  [ "$(jobs -rp | wc -l)" -lt "$(nproc)" ] || wait -n || true  # each is asked for its end below
  sanitized "$program" &
  running+=($!)
done
failed=0
for program in "${running[@]}"; do wait "$program" || failed=1; done  # all end before their folder goes
[ "$failed" = 0 ] || exit 1
echo "nothing found"
