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
# SHA-256 over every fatbin in a binary, found by its header (magic, version, header size, size of what follows), and their number.
fatbins() {
  python3 - "$1" <<'PY'
import hashlib, struct, sys
data, at, found, digest = open(sys.argv[1], "rb").read(), 0, 0, hashlib.sha256()
while (at := data.find(struct.pack("<I", 0xBA55ED50), at)) >= 0:
    _, version, head, size = struct.unpack_from("<IHHQ", data, at)
    if version == 1 and head == 16 and size < len(data) - at:
        digest.update(data[at : at + head + size]); found += 1
    at += 4
print(found, digest.hexdigest())
PY
}
find "$TWO" -path "$TWO/.git" -prune -o -type f -exec touch -d '2001-01-01' {} +
git -C "$TWO" -c user.name=x -c user.email=x@localhost commit -q --allow-empty -m 'another history'
for package in "${packages[@]}"; do
  first=$(nix_ build --no-link --print-out-paths "$ONE#$package"); one=$(sha256sum "$first/bin/kdtree" | cut -d' ' -f1)
  # --rebuild compiles again although the result is there, and fails when a byte differs.
  ok "$package: compiled again from the other checkout, every byte the same" nix_ build --no-link --rebuild "$TWO#$package"
  second=$(nix_ build --no-link --print-out-paths "$TWO#$package"); two=$(sha256sum "$second/bin/kdtree" | cut -d' ' -f1)
  echo "      $one  $first/bin/kdtree"; echo "      $two  $second/bin/kdtree"
  [ "$package" = kdtree-cpu ] || {
    echo "      fatbins: $(fatbins "$first/bin/kdtree")"; echo "      fatbins: $(fatbins "$second/bin/kdtree")"
    ok "$package: it holds fatbins" no grep -q '^0 ' <<< "$(fatbins "$first/bin/kdtree")"
    ok "$package: fatbins are equal" test "$(fatbins "$first/bin/kdtree")" = "$(fatbins "$second/bin/kdtree")"
  }
  ok "$package: hashes are equal" test "$one" = "$two"
  ok "$package: no path of a builder is in it" no grep -aqE '/tmp/nix-build|/root/\.cargo|/home/' "$first/bin/kdtree"
done
summary
