#!/bin/sh
# Installs the CUDA 13.0 compiler from PyPI wheels (about 110 MB), for CI and for machines without a toolkit.
# Usage: scripts/install-nvcc.sh [FOLDER]     (default: .nvcc); prints the line that makes cargo use it.
set -eu
folder=${1:-.nvcc}
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
  nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 \
  nvidia-cuda-cuobjdump==13.2.86 nvidia-cuda-nvdisasm==13.2.86
nvcc=$(cd "$folder" && echo "$PWD"/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
[ -x "$nvcc" ] || { echo "install-nvcc: the wheels brought no nvcc at $nvcc" >&2; exit 1; }
"$nvcc" --version | tail -2 >&2
echo "export KDTREE_NVCC=$nvcc"
