# A real systemd as PID 1, in namespaces of its own, over a throw-away overlay of a clean Debian root. Sourced after prepare.sh.
#   boot_overlay        boots it; afterwards `inside COMMAND…` runs a command in it
#   $OVERLAY_SETUP      a function called with the root's path before the boot, to put files there
# Enforced in there, measured: the file system, device and credential sandbox, dynamic users, watchdog and start time-outs. Not there:
# the memory controller (MemoryMax), which only the VM test has.

OVERLAY_PID='' OVERLAY_UNSHARE='' OVERLAY_WORK=''

boot_overlay() {
  OVERLAY_WORK=$(mktemp -d)
  cat > "$OVERLAY_WORK/init" <<'INIT'
#!/bin/bash
set -e
work=$1 lower=$2 files=$3 root=$1/root/m
mount --make-rprivate /
mkdir -p "$work/root"; mount -t tmpfs tmpfs "$work/root"; mkdir "$work/root"/{u,w,m}
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$work/root/u,workdir=$work/root/w" "$root"
mkdir -p "$root/nix"; mount --bind /nix "$root/nix"
mount -t proc proc "$root/proc"; mount -t sysfs -o ro sysfs "$root/sys"
for d in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$d"; done; chmod 1777 "$root/tmp"
for n in null zero full random urandom tty; do touch "$root/dev/$n"; mount --bind "/dev/$n" "$root/dev/$n"; done
mkdir "$root"/dev/{shm,pts}; ln -s /proc/self/fd "$root/dev/fd"; chmod 1777 "$root/dev/shm"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
ip link set lo up
rm -rf "$root"/etc/systemd/system/* "$root/var/log/journal"; : > "$root/etc/fstab"
cp -a "$files"/. "$root/"
# Not chroot: nobody inside a chroot may make a user namespace, which PrivateUsers needs.
cd "$root"; mkdir -p .host; pivot_root . .host; cd /; umount -l /.host; rmdir /.host
# As a booted system: credentials reach a service by mount propagation.
mount --make-rshared /
exec env -i container=unshare PATH=/usr/sbin:/usr/bin /lib/systemd/systemd --log-target=journal --unit=multi-user.target
INIT
  chmod +x "$OVERLAY_WORK/init"; mkdir "$OVERLAY_WORK/files"
  "${OVERLAY_SETUP:-true}" "$OVERLAY_WORK/files"
  unshare --mount --pid --fork --uts --ipc --net --cgroup "$OVERLAY_WORK/init" "$OVERLAY_WORK" "$APPLIANCE/rootfs" "$OVERLAY_WORK/files" \
    </dev/null >"$OVERLAY_WORK/log" 2>&1 &
  OVERLAY_UNSHARE=$!
  trap end_overlay EXIT
  local state=''
  for _ in $(seq 200); do
    OVERLAY_PID=$(pgrep -P "$OVERLAY_UNSHARE" || true)
    [ -n "$OVERLAY_PID" ] && grep -qs '^systemd$' "/proc/$OVERLAY_PID/comm" && break
    sleep .05
  done
  for _ in $(seq 400); do
    state=$(inside systemctl is-system-running 2>/dev/null || true)
    case $state in running|degraded) return ;; esac
    sleep .05
  done
  echo "overlay.sh: systemd did not come up (state ${state:-none}):" >&2; cat "$OVERLAY_WORK/log" >&2; return 1
}

inside() { nsenter -t "$OVERLAY_PID" -a -r -w env -i -C / HOME=/root PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"; }

# PID 1 of the namespace ignores SIGTERM; its end takes everything in it along.
end_overlay() {
  local status=$?
  set +e
  [ -n "$OVERLAY_PID" ] && kill -9 "$OVERLAY_PID"
  wait "$OVERLAY_UNSHARE" 2>/dev/null
  rm -rf "$OVERLAY_WORK"
  exit "$status"
}
