#!/bin/sh
# Builds the stand-ins for libcuda, libcudart, libnccl and NVTX in a folder: build.sh FOLDER.
set -eu
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")"
compile() { gcc -O1 -g -Wall -Wextra -Werror -shared -fPIC "-Wl,-rpath,\$ORIGIN" "$@"; }
compile -Wl,-soname,libcuda.so.1 -o "$out/libcuda.so.1" cuda.c -lpthread
compile -Wl,-soname,libcudart.so.12 -o "$out/libcudart.so.12" cudart.c "$out/libcuda.so.1" -lpthread
compile -o "$out/libnccl.so.2" nccl.c "$out/libcudart.so.12" "$out/libcuda.so.1" -lpthread -lm
compile -DSTANDIN_OLD -o "$out/libnccl-old.so.2" nccl.c "$out/libcudart.so.12" "$out/libcuda.so.1" -lpthread -lm
compile -o "$out/libnvtx3interop.so.1" nvtx.c "$out/libcuda.so.1"
mkdir -p "$out/null"
compile -Wl,-soname,libcuda.so.1 -o "$out/null/libcuda.so.1" null.c
