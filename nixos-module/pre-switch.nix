# Before `nixos-rebuild switch` touches the running server, the new build proves itself: its gate on its built-in model. This shows
# that binary and kernels are sound; that the model which will be served is, only the gate inside the service can show.
{ config, lib, pkgs, ... }:
let
  cfg = config.services.kdtree;
  # Behind the running server in everything, since it shares the machine with it.
  gate = "${pkgs.coreutils}/bin/nice -n 19 ${lib.getExe cfg.package} gate --max-tokens ${toString cfg.gate.maxTokens} --json $report";
  environment = lib.concatStringsSep "\n" (lib.mapAttrsToList (name: value: "export ${name}=${lib.escapeShellArg value}") cfg.environment);
in
{
  config = lib.mkIf (cfg.enable && cfg.gate.beforeSwitch) {
    system.preSwitchChecks.kdtree = ''
      case "''${2-}" in dry-activate) exit 0 ;; esac
      ${environment}
      # The built-in model, whatever is served.
      unset KDTREE_CONFIG KDTREE_MODEL KDTREE_DRAFTER KDTREE_VERIFY
      # Certificates kept here let an unchanged build pass at once.
      ${pkgs.coreutils}/bin/mkdir -p -m 0700 /var/cache/kdtree-pre-switch || exit 1
      export STATE_DIRECTORY=/var/cache/kdtree-pre-switch
      report=/var/cache/kdtree-pre-switch/report.json
      ${pkgs.coreutils}/bin/rm -f $report
      ${lib.optionalString (cfg.gpus > 0) ''
        # On a card when the running server leaves room for the small model. A run that came to a verdict has written its report.
        ${gate} --device cuda
        status=$?
        if [ ! -s $report ]; then
          echo "kdtree: no room on a GPU for the gate before the switch: the CPU shows what it can, the gate inside the service tests the kernels" >&2
        fi
      ''}
      if [ ! -s $report ]; then
        ${gate} --device cpu
        status=$?
      fi
      if [ "$status" != 0 ]; then
        echo "kdtree: the new build fails its gate (status $status): switch refused, the running server is untouched" >&2
        exit 1
      fi
    '';
  };
}
