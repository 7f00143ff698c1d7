#!/usr/bin/env bash
# Gives a wheel the tag of the oldest Linux it runs on, and checks that it needs nothing else.
#   tools/repair_wheel.sh WHEEL FOLDER
# The libraries named here are in the process before ours, because `import torch` comes first. Copies of them would be a
# second torch, or a second OpenMP runtime with a pool of threads of its own.
set -euo pipefail
exclude=()
for library in libgomp.so.1 libc10.so libtorch_cpu.so; do exclude+=(--exclude "$library"); done
auditwheel repair "${exclude[@]}" --wheel-dir "$2" "$1"
