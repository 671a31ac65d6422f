#!/usr/bin/env bash
# What the tests here need, from Debian, PyPI and the Rust registry only: Nix in a private prefix, the stand-in for nixpkgs, nixpkgs-fmt, and
# (with `rootfs`) a clean Debian root with a current systemd. Sourced by the tests; everything lands in $APPLIANCE and is reused.
# After it: $NIX, $ROOT (the repository), $APPLIANCE, and the function `nix_` that runs Nix against the stand-in, in its sandbox.
set -euo pipefail
TESTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$TESTS/../.." && pwd)
APPLIANCE=${KDTREE_APPLIANCE_DIR:-$ROOT/target/appliance}
mkdir -p "$APPLIANCE"
NIX=$APPLIANCE/nix/bin/nix
SUITE=trixie
[ "$(id -u)" = 0 ] || { echo "prepare.sh: needs root (namespaces, Nix's sandbox); found uid $(id -u)" >&2; exit 1; }

# Commands that a minimal Debian lacks, installed once and all together.
need() {
  local missing=() pair
  for pair in "$@"; do command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}"); done
  [ ${#missing[@]} = 0 ] && return
  apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# One suite of Debian, from the mirror that this machine uses.
debian_uri() { awk '/^URIs:/ { print $2; exit }' /etc/apt/sources.list.d/debian.sources 2>/dev/null || true; }
MIRROR=$(debian_uri)
[ -n "$MIRROR" ] || { echo "prepare.sh: no Debian mirror in /etc/apt/sources.list.d/debian.sources" >&2; exit 1; }
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

# Nix of a newer Debian, unpacked with every library it needs; the host's own libraries are not touched.
prepare_nix() {
  [ -x "$NIX" ] && return
  local work prefix=$APPLIANCE/nix deb lib
  work=$(mktemp -d); mkdir -p "$work"/{lists/partial,cache/archives/partial} "$prefix"
  printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' "$MIRROR" "$SUITE" "$KEYRING" > "$work/suite.sources"
  local apt=(apt-get -o "Dir::Etc::sourcelist=$work/suite.sources" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$work/lists"
    -o "Dir::Cache=$work/cache" -o Dir::State::status=/dev/null -o APT::Sandbox::User=root -qq)
  "${apt[@]}" update
  "${apt[@]}" -y --no-install-recommends --download-only install nix-bin >/dev/null
  for deb in "$work"/cache/archives/*.deb; do
    case ${deb##*/} in perl*|libperl*|passwd*|adduser*|debconf*|libdbi*|libdbd*|libwww*|openssl-*|login.defs*) ;; *) dpkg -x "$deb" "$prefix" ;; esac
  done
  lib=$prefix/usr/lib/x86_64-linux-gnu
  patchelf --force-rpath --set-rpath "$lib" --set-interpreter "$prefix/usr/lib64/ld-linux-x86-64.so.2" "$prefix/usr/bin/nix"
  mkdir -p "$prefix/bin"
  printf '#!/bin/sh\nexport NIX_CONF_DIR=%s/etc/nix\nexec %s/usr/bin/nix "$@"\n' "$prefix" "$prefix" > "$NIX"
  chmod +x "$NIX"; rm -rf "$work"
}

configure_nix() {
  mkdir -p "$APPLIANCE/nix/etc/nix" "$APPLIANCE/tools/bin"
  printf '%s\n' 'experimental-features = nix-command flakes' 'build-users-group =' 'substituters =' 'flake-registry =' 'warn-dirty = false' \
    'sandbox = true' 'sandbox-fallback = false' "sandbox-paths = $(sandbox_paths)" 'max-jobs = auto' > "$APPLIANCE/nix/etc/nix/nix.conf"
}

# What builds of the stand-in see of the host: its tools, cargo's caches, and the CUDA compiler where there is one.
sandbox_paths() {
  local path paths=(/bin /usr /lib /lib64 /etc/alternatives "$(cargo_home)" "$(rustup_home)" "$APPLIANCE/tools")
  [ -n "$(cuda_bin)" ] && paths+=("$(dirname "$(cuda_bin)")" )
  for path in "${paths[@]}"; do [ -e "$path" ] && printf '%s ' "$path"; done
}
cargo_home() { realpath "${CARGO_HOME:-$HOME/.cargo}"; }
rustup_home() { realpath "${RUSTUP_HOME:-$HOME/.rustup}"; }
cuda_bin() { [ -n "${KDTREE_NVCC:-}" ] && [ "$KDTREE_NVCC" != none ] && dirname "$(realpath "$KDTREE_NVCC")" || true; }

# The formatter of the flake; the flake's own `nix fmt` is nixpkgs' copy of the same program.
prepare_nixpkgs_fmt() {
  [ -x "$APPLIANCE/tools/bin/nixpkgs-fmt" ] || cargo install --quiet --debug --locked --root "$APPLIANCE/tools" nixpkgs-fmt@1.3.0
}

# The stand-in outside the repository, with the paths of this host's tools written into it.
prepare_stand_in() {
  local cargo
  cargo=$(dirname "$(rustup which cargo 2>/dev/null || command -v cargo)")
  rm -rf "$APPLIANCE/nixpkgs"; cp -r "$TESTS/nixpkgs-stub" "$APPLIANCE/nixpkgs"
  jq -n --arg path "$cargo:$APPLIANCE/tools/bin:/usr/sbin:/usr/bin:/sbin:/bin" --arg cargoHome "$(cargo_home)" \
    --arg rustupHome "$(rustup_home)" --arg cudaBin "$(cuda_bin)" '$ARGS.named' > "$APPLIANCE/nixpkgs/host-tools.json"
}

# A clean Debian with a current systemd (the host's may be older than the units' oldest).
prepare_rootfs() {
  [ -e "$APPLIANCE/rootfs/.complete" ] && return
  need mmdebstrap:mmdebstrap
  rm -rf "$APPLIANCE/rootfs"
  printf 'deb [signed-by=%s] %s %s main\n' "$KEYRING" "$MIRROR" "$SUITE" > "$APPLIANCE/rootfs.list"
  mmdebstrap --quiet --variant=minbase --include=systemd,systemd-sysv,curl,jq,procps "$SUITE" "$APPLIANCE/rootfs" "$APPLIANCE/rootfs.list" >/dev/null
  touch "$APPLIANCE/rootfs/.complete"
}

nix_() { "$NIX" "$@" --offline --no-write-lock-file --override-input nixpkgs "path:$APPLIANCE/nixpkgs"; }

need patchelf:patchelf jq:jq curl:curl unshare:util-linux
prepare_nix
configure_nix
prepare_stand_in
# Dependencies are in cargo's cache before the network is gone.
(cd "$ROOT" && cargo fetch --locked --quiet)
