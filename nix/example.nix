# A machine that serves the built-in model to its own network, behind keys. Evaluated by `nix flake check`.
{ lib, ... }:
{
  services.kdtree = {
    enable = true;
    host = lib.mkDefault "0.0.0.0";
    openFirewall = true;
    apiKeyFile = lib.mkDefault "/etc/kdtree/api-keys";
  };
  # What every NixOS machine has of its own.
  boot.loader.grub.device = "nodev";
  fileSystems."/" = { device = "/dev/disk/by-label/nixos"; fsType = "ext4"; };
  system.stateVersion = "26.05";
}
