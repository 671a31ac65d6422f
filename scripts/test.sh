#!/usr/bin/env bash
# Everything that a machine without a GPU can prove: formatting, lints, the whole test suite with the fault switches built in.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo fmt --all --check
# Lints look at Rust alone; cargo would compile the kernels once for them and once for the tests.
KDTREE_NVCC=none cargo clippy --all-targets --features faults -- -D warnings
cargo test --features faults --no-fail-fast
