# The sandbox of the server and of its probe. `gpus` opens NVIDIA's devices and nothing else.
{ lib, gpus ? 0 }:
{
  DynamicUser = true;
  NoNewPrivileges = true;
  CapabilityBoundingSet = "";
  AmbientCapabilities = "";
  UMask = "0077";

  ProtectSystem = "strict";
  # An empty /home, into which a model directory can still be bound.
  ProtectHome = "tmpfs";
  ProtectClock = true;
  ProtectControlGroups = true;
  ProtectHostname = true;
  ProtectKernelLogs = true;
  ProtectKernelModules = true;
  ProtectKernelTunables = true;
  ProtectProc = "invisible";
  PrivateTmp = true;
  PrivateUsers = true;
  RemoveIPC = true;

  # PrivateDevices would hide the cards (and what hides the cards makes a server fall back to the CPU unnoticed).
  DevicePolicy = "closed";
  DeviceAllow = lib.optionals (gpus > 0) [
    "char-nvidia"
    "char-nvidiactl"
    "char-nvidia-frontend"
    "char-nvidia-uvm"
    "char-nvidia-caps"
  ];

  LockPersonality = true;
  MemoryDenyWriteExecute = true;
  RestrictNamespaces = true;
  RestrictRealtime = true;
  RestrictSUIDSGID = true;
  # NCCL, which more than one card needs, asks for the network's interfaces over netlink before it starts.
  RestrictAddressFamilies = [ "AF_INET" "AF_INET6" "AF_UNIX" ] ++ lib.optional (gpus > 1) "AF_NETLINK";
  SystemCallArchitectures = "native";
  # @resources: thread affinity and memory policy.
  SystemCallFilter = [ "@system-service @resources" "~@privileged" ];
  SystemCallErrorNumber = "EPERM";
}
