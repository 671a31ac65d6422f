# kdtree-health.timer asks for a real completion; kdtree-restart.service restarts a server that gave none, and says why.
{ config, lib, pkgs, ... }:
let
  cfg = config.services.kdtree;
  common = import ./common.nix { inherit lib; };
  keys = cfg.apiKeyFile != null;
  systemctl = "${pkgs.systemd}/bin/systemctl";
  # All attempts, the pauses between them, and room to start.
  deadline = cfg.health.attempts * (3 * cfg.health.timeout + 5) + 10;
in
{
  config = lib.mkIf (cfg.enable && cfg.health.enable) {
    systemd.timers.kdtree-health = {
      description = "Health check of kdtree";
      wantedBy = [ "timers.target" ];
      timerConfig = {
        OnActiveSec = cfg.health.interval;
        OnUnitInactiveSec = cfg.health.interval;
        AccuracySec = 1;
      };
    };

    systemd.services.kdtree-health = {
      description = "Health check of kdtree: a real completion with a deadline";
      after = [ "kdtree.service" ];
      onFailure = [ "kdtree-restart.service" ];
      serviceConfig = import ./hardening.nix { inherit lib; } // {
        Type = "oneshot";
        # Starting and stopping have deadlines of their own; a stopped server is not woken.
        ExecCondition = "+${systemctl} is-active --quiet kdtree.service";
        ExecStart = common.commandLine [ (lib.getExe cfg.package) "health" "--url" (common.url cfg) "--timeout" cfg.health.timeout "--attempts" cfg.health.attempts "--prompt" cfg.health.prompt ]
          + lib.optionalString keys " --api-key-file %d/api-keys";
        # 3: the probe itself is refused (a wrong key). A restart would change nothing.
        SuccessExitStatus = 3;
        TimeoutStartSec = deadline;
        TasksMax = 64;
      } // lib.optionalAttrs keys { LoadCredential = "api-keys:${cfg.apiKeyFile}"; };
    };

    systemd.services.kdtree-restart = {
      description = "Restart of kdtree after failed health checks";
      serviceConfig = {
        Type = "oneshot";
        # The reason stands in the journal of both units: the attempts in kdtree-health's, this line in kdtree-restart's.
        ExecStart = [
          "${pkgs.bash}/bin/sh -c 'echo \"kdtree.service generated nothing in ${toString cfg.health.attempts} attempts of ${toString cfg.health.timeout} s (journalctl -u kdtree-health): restarting it\"'"
          "${systemctl} try-restart kdtree.service"
        ];
        TimeoutStartSec = cfg.startTimeout + cfg.drain + 30;
      };
    };
  };
}
