# dist/: the module's units for systemd without NixOS, with the paths of docs/operating.md. `nix flake check` compares the committed
# files with these, so unit and module cannot drift apart.
{ lib, pkgs, module, nixosSystem }:
let
  evaluated = nixosSystem {
    system = pkgs.stdenv.hostPlatform.system;
    modules = [ module ./example.nix { services.kdtree.host = lib.mkForce "127.0.0.1"; } ];
  };
  inherit (evaluated.config.systemd) services timers;
  cfg = evaluated.config.services.kdtree;
  render = import ./render-unit.nix { inherit lib; };
  outside = text: lib.replaceStrings
    (map (s: builtins.unsafeDiscardStringContext "${s}")
      [ "${cfg.package}/bin/" "${cfg.configFile}" "${pkgs.bash}/bin/sh" "${pkgs.coreutils}/bin/" "${pkgs.systemd}/bin/" ])
    [ "/usr/local/bin/" "/etc/kdtree/kdtree.toml" "/bin/sh" "/usr/bin/" "/usr/bin/" ]
    (builtins.unsafeDiscardStringContext text);
  note = "# Made from nixos-module/ by `nix build .#dist`; change it there. Install: docs/operating.md.\n";
  hardening = gpus: import ../nixos-module/hardening.nix { inherit lib gpus; };
  # What the sandbox of a server on cards allows beyond that of one without.
  beyond = name: lib.filter (value: !(lib.elem value (hardening 0).${name})) (hardening 2).${name};
  drop-in = lib.concatMapStrings (name: lib.concatMapStrings (value: "${name}=${value}\n") (beyond name)) [ "DeviceAllow" "RestrictAddressFamilies" ];
  files = {
    "kdtree.service" = note + outside (render "service" services.kdtree);
    "kdtree-health.service" = note + outside (render "service" services.kdtree-health);
    "kdtree-restart.service" = note + outside (render "service" services.kdtree-restart);
    "kdtree-health.timer" = note + outside (render "timer" timers.kdtree-health);
    "gpus.conf" = note + "# Drop-in for /etc/systemd/system/kdtree.service.d/ on a machine that serves on GPUs.\n[Service]\n" + drop-in;
    "kdtree.toml" = ''
      # The configuration of the plain systemd install; `kdtree config` prints every key and what it means.
      [engine]
      # "cuda" on a machine with GPUs: a missing GPU is then an error, never a fall-back.
      device = "cpu"

      [server]
      host = "127.0.0.1"
      port = ${toString cfg.port}
      api_key_file = "/run/kdtree/api-keys"
      drain_s = ${toString cfg.drain}

      [gate]
      on_failure = "block"
    '';
  };
in
pkgs.runCommand "kdtree-dist" { } ("mkdir $out\n" + lib.concatMapStrings
  (name: "cp ${pkgs.writeText name files.${name}} $out/${name}\n")
  (lib.attrNames files)
  + "if grep -rn ${builtins.storeDir} $out; then echo 'a store path is left in dist' >&2; exit 1; fi\n")
