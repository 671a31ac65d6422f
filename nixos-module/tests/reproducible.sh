#!/usr/bin/env bash
# Two checkouts in different folders, at different times: the sandboxed builds must give the same binary and the same fatbins.
# usage: bash nixos-module/tests/reproducible.sh [PACKAGE…]     (default: kdtree-cpu, and kdtree where KDTREE_NVCC names a compiler)
. "$(dirname "$0")/prepare.sh"
. "$TESTS/count.sh"
packages=("$@")
if [ ${#packages[@]} = 0 ]; then packages=(kdtree-cpu); [ -n "$(cuda_bin)" ] && packages+=(kdtree); fi
ONE=$(mktemp -d) TWO=$(mktemp -d -p /var/tmp another-place-XXXXXX)
trap 'rm -rf "$ONE" "$TWO"' EXIT
git clone -q "$ROOT" "$ONE"; git clone -q "$ROOT" "$TWO"
# Other times and another history; the same files.
find "$TWO" -path "$TWO/.git" -prune -o -type f -exec touch -d '2001-01-01' {} +
git -C "$TWO" -c user.name=x -c user.email=x@localhost commit -q --allow-empty -m 'another history'
for package in "${packages[@]}"; do
  first=$(nix_ build --no-link --print-out-paths "$ONE#$package"); one=$(sha256sum "$first/bin/kdtree" | cut -d' ' -f1)
  # --rebuild compiles again although the result is there, and fails when a byte differs.
  ok "$package: compiled again from the other checkout, every byte the same" nix_ build --no-link --rebuild "$TWO#$package"
  second=$(nix_ build --no-link --print-out-paths "$TWO#$package"); two=$(sha256sum "$second/bin/kdtree" | cut -d' ' -f1)
  echo "      $one  $first/bin/kdtree"; echo "      $two  $second/bin/kdtree"
  ok "$package: hashes are equal" test "$one" = "$two"
  ok "$package: no path of a builder is in it" no grep -aqE '/tmp/nix-build|/root/\.cargo|/home/' "$first/bin/kdtree"
done
summary
