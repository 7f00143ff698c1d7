#!/bin/sh
# architectures.sh PROGRAM "ARCHITECTURE..." COMPILER ARGUMENT...: compiles one instance of the portable attention kernels
# for these architectures, which no default build has code for, and lets PROGRAM (shared_memory.cu) read the report of
# ptxas.
program=$1 architectures=$2
shift 2
logs=$(mktemp -d) || exit 1
trap 'rm -rf "$logs"' EXIT
compile() {  # compile SOURCE ARCHITECTURE COMPILER ARGUMENT...
  name=$(basename "$1").$2 source=$1 code=-gencode=arch=compute_$2,code=sm_$2
  shift 2
  "$@" "$code" -Xptxas=-v -c "$source" -o "$logs/$name.o" >"$logs/$name.log" 2>&1 && return
  cat "$logs/$name.log"
  touch "$logs/failed"
}
for architecture in $architectures; do
  for source in src/cuda/portable/attention_kernels.cu src/cuda/portable/decode/step_kernels.cu; do
    compile "$source" "$architecture" "$@" &
  done
  wait  # two at a time
done
[ ! -e "$logs/failed" ] && cat "$logs"/*.log | "$program"
