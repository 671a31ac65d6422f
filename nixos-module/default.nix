# `services.kdtree`: one server as a systemd service, its health timer, and the check before a switch.
self:
{ ... }:
{
  imports = [
    (import ./options.nix self)
    ./settings.nix
    ./service.nix
    ./health.nix
    ./pre-switch.nix
  ];
}
