#!/usr/bin/env bash
# Every test of the appliance in one go, for CI: flake, rollout, newcomer's path. The clean root is made while the packages compile.
# usage: bash nixos-module/tests/all.sh         exit status 0 = all passed
. "$(dirname "$0")/prepare.sh"
status=0
# What does not need the processor for long goes beside the compiler.
(prepare_rootfs; prepare_nixpkgs_fmt) > "$APPLIANCE/beside.log" 2>&1 & beside=$!
nix_ build --no-link "$ROOT#kdtree-cpu" "$ROOT#kdtree-faults" || status=1
wait $beside || { cat "$APPLIANCE/beside.log" >&2; exit 1; }
for test in flake rollout newcomer; do
  began=$(date +%s); echo "== $test"
  bash "$TESTS/$test.sh" || status=1
  echo "== $test: $(($(date +%s) - began)) s"
done
exit $status
