#!/usr/bin/env bash
# Builds the package's libraries and the program for one compute capability, into a folder that goes to a machine with
# that GPU, the same torch and no time to compile: PREBUILT=FOLDER tools/gpu.sh ... takes them there.
#   tools/prebuilt.sh FOLDER
#   ARCHITECTURE=90   INSTANCES="Bf16;Half;float"   HEAD_DIMS="64x64;128x128"   PYTHON=.venv/bin/python   JOBS=1
# It needs torch and the libraries of C, C++ and OpenMP; SentencePiece's is included if it is installed. about.json has
# the versions of the build. If it does not load, tools/gpu.sh builds from source; the program then needs the headers of
# `make bundle`, which are included if present.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?tools/prebuilt.sh FOLDER}
python=$(command -v "${PYTHON:-.venv/bin/python}")
build=${BUILD:-build-prebuilt}
instances=${INSTANCES:-Bf16;Half;float} dims=${HEAD_DIMS:-64x64;128x128} architecture=${ARCHITECTURE:-90}
cmake -S . -B "$build" -G Ninja -DNSA_BUILD_CUDA=ON -DNSA_BUILD_PYTHON=ON -DNSA_BUILD_LM=ON -DNSA_BUILD_TESTS=OFF \
  -DNSA_PYTHON="$python" -DCMAKE_CUDA_ARCHITECTURES="$architecture-real" -DNSA_CUDA_INSTANCES="$instances" \
  -DNSA_CUDA_HEAD_DIMS="$dims" -DNSA_CPU_ISAS="${ISAS:-avx2}" -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON >/dev/null
ninja -C "$build" -j "${JOBS:-1}"
rm -rf "$out"
mkdir -p "$out"/{lib,bin}
cp "$build"/lib/libnsa.so.0 "$build"/lib/libnsa_program.so python/nsa/_C.so "$out/lib/"
cp "$build/bin/nsa" "$out/bin/"
ldd "$build/lib/libnsa_program.so" | awk '$1 ~ /^libsentencepiece/ {print $3}' | xargs -r cp -L -t "$out/lib"
strip --strip-unneeded "$out"/lib/* "$out/bin/nsa"
if [[ -d bundle/usr ]]; then
  cp -r bundle "$out/"
  rm -rf "$out"/bundle/usr/{src,include/g{test,mock}} "$out"/bundle/usr/lib/*/lib{g{test,mock},sentencepiece}*
fi
"$python" - "$out" "$("$python" tools/gpu/check_prebuilt.py --sources)" "$(git rev-parse --short HEAD)" "$architecture" "$instances" "$dims" <<'PY'
import json, sys, time, torch
out, sources, commit, architecture, instances, dims = sys.argv[1:]
about = {"commit": commit, "sources": sources, "torch": torch.__version__, "architecture": architecture}
about |= {"instances": instances, "head_dims": dims, "date": time.strftime("%Y-%m-%d")}
open(f"{out}/about.json", "w").write(json.dumps(about, indent=1) + "\n")
PY
du -sh "$out"
