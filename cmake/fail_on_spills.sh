#!/bin/sh
# fail_on_spills.sh COMPILER ARGUMENT...: runs the compiler, and fails where ptxas tells of spilled registers. ptxas itself
# could make that an error, but its options are stored beside the PTX and obeyed by drivers that compile it: a kernel that
# spills on a GPU of tomorrow would not run there at all.
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
"$@" 2>"$log"
status=$?
cat "$log" >&2
if [ "$status" -eq 0 ] && grep -q 'spilled to local memory' "$log"; then
  while [ $# -gt 1 ]; do  # not to be taken for a result by the next build
    [ "$1" = -o ] && rm -f "$2"
    shift
  done
  status=1
fi
exit "$status"
