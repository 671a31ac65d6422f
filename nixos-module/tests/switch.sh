#!/bin/bash
# What `nixos-rebuild switch` does with units, for a machine without NixOS: checks first, then stop, exchange, start.
# usage: switch SYSTEM; NIXOS_NO_CHECK=1 skips the checks, as on NixOS.
set -u
system=$(readlink -f "$1")
if [ "${NIXOS_NO_CHECK:-0}" != 1 ]; then
  "$system/pre-switch-checks" "$system" switch || { echo "switch: refused by the pre-switch checks" >&2; exit 1; }
fi
units=$(cd "$system/units" && find . -maxdepth 1 -type f -name '*.*' -printf '%f\n')
old=$(cd /etc/systemd/system && find . -maxdepth 1 -type f -name 'kdtree*' -printf '%f\n')
changed=()
for unit in $(printf '%s\n' $units $old | sort -u); do
  cmp -s "$system/units/$unit" "/etc/systemd/system/$unit" || changed+=("$unit")
done
[ ${#changed[@]} = 0 ] && { echo "switch: nothing changed"; exit 0; }
systemctl stop "${changed[@]}" 2>/dev/null
rm -rf /etc/systemd/system/*; cp -a "$system/units/." /etc/systemd/system/; chmod -R u+w /etc/systemd/system
systemctl daemon-reload
systemctl reset-failed 2>/dev/null
status=0
for unit in "${changed[@]}"; do
  [ -n "$(find /etc/systemd/system -path "*.wants/$unit")" ] && { systemctl start "$unit" || status=4; }
done
[ $status = 0 ] || echo "switch: units failed" >&2
exit $status
