#!/usr/bin/env bash
# docs/operating.md, followed literally under a real systemd: its code blocks are cut out and run. Both installs end with a completion and
# then refuse a build with a planted kernel error. usage: bash nixos-module/tests/newcomer.sh   closes with "N passed, N failed"
. "$(dirname "$0")/prepare.sh"
. "$TESTS/count.sh"
. "$TESTS/overlay.sh"
prepare_rootfs
DOCS=$ROOT/docs/operating.md
# The block whose fence says so.
block() { awk -v fence="\`\`\`$1" '$0 == fence { on = 1; next } /^```/ { on = 0 } on' "$DOCS"; }
for name in 'nix flake.nix' 'sh nixos' 'sh install' 'sh ask' 'sh upgrade'; do
  [ -n "$(block "$name")" ] || { echo "newcomer.sh: docs/operating.md has no block \`\`\`$name" >&2; exit 1; }
done
GOOD=$(nix_ build --no-link --print-out-paths "$ROOT#kdtree-cpu")/bin/kdtree
BAD=$(nix_ build --no-link --print-out-paths "$ROOT#kdtree-faults")/bin/kdtree

# The machine's flake as the page shows it, and the same with a build that computes wrong numbers.
FLAKES=$(mktemp -d)
for kind in good bad; do
  mkdir "$FLAKES/$kind"; block 'nix flake.nix' > "$FLAKES/$kind/flake.nix"
  echo '{ boot.loader.grub.device = "nodev"; fileSystems."/" = { device = "/dev/disk/by-label/nixos"; fsType = "ext4"; }; system.stateVersion = "26.05"; }' \
    > "$FLAKES/$kind/configuration.nix"
done
sed -i 's|enable = true;|&\n            package = kdtree.packages.x86_64-linux.kdtree-faults;\n            environment.KDTREE_FAULT = "kernel-error=1";|' "$FLAKES/bad/flake.nix"
system() {
  "$NIX" build --offline --no-link --print-out-paths --no-write-lock-file --override-input kdtree "$ROOT" \
    --override-input kdtree/nixpkgs "path:$APPLIANCE/nixpkgs" "path:$FLAKES/$1#nixosConfigurations.server.config.system.build.toplevel"
}
GOOD_SYSTEM=$(system good) BAD_SYSTEM=$(system bad)
rm -rf "$FLAKES"

setup() {
  mkdir -p "$1/usr/local/bin" "$1/root/kdtree/target/release" "$1/root/kdtree/dist" "$1/etc/nixos"
  cp "$ROOT"/dist/* "$1/root/kdtree/dist/"; cp "$GOOD" "$1/root/kdtree/target/release/kdtree"; cp "$BAD" "$1/root/bad"
  install -m 0755 "$TESTS/switch.sh" "$1/usr/local/bin/switch"
  # `nixos-rebuild switch --flake …` with the build done beforehand: what remains is the switch.
  printf '#!/bin/sh\n[ "$1" = switch ] && exec switch "$(cat /etc/nixos/system)"\nexit 2\n' > "$1/usr/local/bin/nixos-rebuild"
  chmod +x "$1/usr/local/bin/nixos-rebuild"
  echo "$GOOD_SYSTEM" > "$1/etc/nixos/system"; cp "$ROOT/docs/operating.md" "$1/root/"
}
OVERLAY_SETUP=setup
boot_overlay
inside_block() { inside bash -euc "cd /root/kdtree; ${2:-true}"$'\n'"$(block "$1")"; }
pid() { inside systemctl show -P MainPID kdtree.service; }
text_of() { jq -er '.choices[0].message | (.content // .reasoning_content) | select(length > 0)'; }

# -- systemd without NixOS
verified() { local err; err=$(inside bash -c 'systemd-analyze verify --man=no /etc/systemd/system/kdtree*.{service,timer}' 2>&1); echo "$err"; [ -z "$err" ]; }
asked() { inside_block "$1" | tail -1 | text_of; }
ok "the plain install's commands run" inside_block 'sh install'
ok "systemd finds nothing to say about its units" verified
ok "the service answers" asked 'sh ask'
ok "the health check passes" inside systemctl start kdtree-health.service
ok "an upgrade to the same build runs" inside_block 'sh upgrade'
ok "the service answers after it" asked 'sh ask'
BEFORE=$(pid)
inside cp /root/bad /root/kdtree/target/release/kdtree
ok "an upgrade to a bad kernel is refused" no inside_block 'sh upgrade' 'export KDTREE_FAULT=kernel-error=1'
ok "the installed binary is the old one" inside cmp /usr/local/bin/kdtree "$GOOD"
ok "the server was not touched" test "$(pid)" = "$BEFORE"
ok "it still answers" asked 'sh ask'
inside bash -c 'systemctl disable --now kdtree.service kdtree-health.timer; rm -rf /etc/systemd/system/kdtree* /var/lib/private/kdtree /var/lib/kdtree; systemctl daemon-reload' 2>/dev/null

# -- NixOS
inside bash -c 'umask 077; echo nixos-key > /etc/kdtree/api-keys'
ok "NixOS: the flake of the page is switched to, and the service answers" asked 'sh nixos'
BEFORE=$(pid)
inside bash -c "echo $BAD_SYSTEM > /etc/nixos/system"
ok "NixOS: a bad kernel's switch is refused" fails_with 'switch refused, the running server is untouched' inside nixos-rebuild switch --flake /etc/nixos#server
ok "NixOS: the server was not touched" test "$(pid)" = "$BEFORE"
ok "NixOS: it still answers" asked 'sh ask'
summary
