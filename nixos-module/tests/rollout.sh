#!/usr/bin/env bash
# The rollout test: the module's units with the real binary under a real systemd, every promise and every planted fault.
# usage: bash nixos-module/tests/rollout.sh [--mutate [MUTANT…]]          closes with "N passed, N failed"
# --mutate breaks the units one line at a time and wants the check of each promise to fail; run it when checks or units change.
. "$(dirname "$0")/prepare.sh"
. "$TESTS/overlay.sh"
prepare_rootfs
MACHINES=$(nix_ build --no-link --print-out-paths "$ROOT#legacyPackages.x86_64-linux.rollout-machines")

setup() {
  mkdir -p "$1/usr/local/bin" "$1/etc/kdtree" "$1/home/alice" "$1/root"
  install -m 0755 "$TESTS/switch.sh" "$1/usr/local/bin/switch"
  install -m 0644 "$TESTS/rollout-checks.sh" "$1/root/checks.sh"
  cp -r "$ROOT/models/k26-mini" "$1/home/alice/model"
  cp -r "$ROOT/docs/monitoring" "$1/root/monitoring" 2>/dev/null || true
  echo old-key > "$1/etc/kdtree/api-keys"; chmod 0600 "$1/etc/kdtree/api-keys"
}
OVERLAY_SETUP=setup
boot_overlay
inside env MACHINES="$MACHINES" bash /root/checks.sh "$@"
