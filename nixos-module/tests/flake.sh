#!/usr/bin/env bash
# The flake over the stand-in for nixpkgs: lock file, whole evaluation, real builds of what `nix flake check` builds, and each check seen
# failing. usage: bash nixos-module/tests/flake.sh            closes with "N passed, N failed"
# The checks `tests` and `clippy` are evaluated here and built only with KDTREE_FLAKE_ALL=1: CI runs both outside Nix anyway.
. "$(dirname "$0")/prepare.sh"
. "$TESTS/count.sh"
prepare_nixpkgs_fmt
CHECK=checks.x86_64-linux
COPY=$(mktemp -d)
trap 'rm -rf "$COPY"' EXIT
# What git tracks, to spoil.
(cd "$ROOT" && git ls-files -z | xargs -0 cp --parents -t "$COPY")

locked() { "$NIX" flake metadata --offline --no-update-lock-file "$1" >/dev/null; }
build() { nix_ build --no-link --print-out-paths "$ROOT#$1"; }
eval_() { nix_ eval --raw "$ROOT#$1"; }
# FILE SED CHECK TEXT: with one file changed, this check fails and says why.
spoiled() {
  local file=$1 change=$2 check=$3 text=$4 status=0
  cp "$COPY/$file" "$COPY/.kept"; sed -i "$change" "$COPY/$file"
  cmp -s "$COPY/$file" "$COPY/.kept" && { echo "the change to $file changes nothing"; return 1; }
  fails_with "$text" nix_ build -L --no-link "path:$COPY#$check" || status=1
  mv "$COPY/.kept" "$COPY/$file"; return $status
}

# -- lock file
ok "the lock file belongs to the flake's inputs" locked "$ROOT"
sed -i 's|nixpkgs/nixos-unstable|nixpkgs/nixos-26.05|' "$COPY/flake.nix"
ok "a changed input is noticed" no locked "path:$COPY"
cp "$ROOT/flake.nix" "$COPY/flake.nix"
ok "the locked values are the recorded ones" build $CHECK.lock-values
ok "an edited hash is noticed" spoiled flake.lock 's|sha256-8i|sha256-9i|' $CHECK.lock-values 'flake.lock: found'
ok "a second input is noticed" spoiled flake.lock 's|"nodes": {|"nodes": { "extra": { "locked": {} },|' $CHECK.lock-values 'inputs besides nixpkgs|has an input'

# -- evaluation
ok "the whole flake evaluates" nix_ flake check --no-build "$ROOT"
ok "an unknown option does not" spoiled nix/example.nix 's|openFirewall|openFirewal|' $CHECK.module "openFirewal' does not exist|example machine does not evaluate"
ok "a machine that should be refused and is not is noticed" spoiled nixos-module/tests/refused.nix 's|port = 70000|port = 7000|' $CHECK.module 'must be refused: port-out-of-range'
ok "the CPU package needs nothing unfree" nix_ eval --raw "$ROOT#kdtree-cpu.drvPath"
ok "the CUDA package is refused without consent" fails_with 'unfree license' nix_ eval --impure --raw --expr \
  "let f = builtins.getFlake \"path:$COPY\"; in ((import $APPLIANCE/nixpkgs { overlays = [ f.overlays.default ]; }).kdtree.drvPath)"

# -- builds
ok "the CPU package builds in the sandbox" build kdtree-cpu
KDTREE=$(build kdtree-cpu 2>/dev/null)/bin/kdtree
ok "and runs" "$KDTREE" --version
ok "its gate passes in the sandbox" build $CHECK.gate
for check in module units options-table formatting nix-formatting vm; do ok "check $check" build $CHECK.$check; done
[ "${KDTREE_FLAKE_ALL:-0}" = 0 ] || for check in tests clippy; do ok "check $check" build $CHECK.$check; done

# -- each of them failing
ok "a unit that drifted from the module is noticed" spoiled dist/kdtree.service 's|WatchdogSec=60|WatchdogSec=61|' $CHECK.units 'WatchdogSec=61'
ok "a table that drifted from the options is noticed" spoiled docs/operating.md 's/| `services.kdtree.port`.*//; s/^| `port`.*/| `port` | x |/' $CHECK.options-table 'replace its table'
ok "unformatted Nix is noticed" spoiled nix/example.nix 's|enable = true|enable  =  true|' $CHECK.nix-formatting 'example.nix'
ok "unformatted Rust is noticed" spoiled src/main.rs 's|fn main()|fn  main()|' $CHECK.formatting 'main.rs'
ok "a misspelt setting fails the build and is named" spoiled nix/example.nix 's|openFirewall = true|settings.engine.verfy = "off"|' \
  nixosConfigurations.example.config.services.kdtree.configFile 'unknown field .verfy'
ok "a broken VM script is noticed" spoiled nixos-module/tests/vm.nix 's|start_all()|start_all((|' $CHECK.vm 'SyntaxError'
gate_fails() { fails_with . env HOME="$COPY" STATE_DIRECTORY="$COPY/state" KDTREE_FAULT=kernel-error=1 "$(build kdtree-faults)/bin/kdtree" gate --device cpu; }
ok "a planted kernel error fails the gate" gate_fails
ok "apps name programs that exist" bash -c "for a in serve gate bench doctor gpu-gate; do
  $(declare -f nix_); NIX=$NIX APPLIANCE=$APPLIANCE; nix_ eval --raw '$ROOT#apps.x86_64-linux.'\$a.program || exit 1; done"
summary
