# kdtree.service: loads once, warms up, passes the gate, serves, drains.
{ config, lib, pkgs, ... }:
let
  cfg = config.services.kdtree;
  common = import ./common.nix { inherit lib; };
  kdtree = lib.getExe cfg.package;
  models = lib.filter (path: path != null) [ cfg.model cfg.drafter ];
  keys = cfg.apiKeyFile != null;
  sh = "${pkgs.bash}/bin/sh";
  install = "${pkgs.coreutils}/bin/install";

  # Named here, before a driver library is asked: its own message would be "no device".
  cards = lib.concatMapStringsSep "; "
    (n: ''test -c /dev/nvidia${toString n} || { echo "kdtree: /dev/nvidia${toString n} is missing: ${toString cfg.gpus} GPUs are configured (services.kdtree.gpus)" >&2; exit 1; }'')
    (lib.range 0 (cfg.gpus - 1));
  warmup = common.commandLine ([ kdtree "health" "--url" (common.url cfg) "--attempts" 1 "--timeout" cfg.warmup.timeout "--max-tokens" cfg.warmup.maxTokens ]
    ++ lib.optionals keys [ "--api-key-file" "/run/kdtree/api-keys" ]
    ++ lib.concatMap (prompt: [ "--prompt" prompt ]) cfg.warmup.prompts);
in
{
  config = lib.mkIf cfg.enable {
    systemd.services.kdtree = {
      description = "kdtree, an OpenAI server for Kimi K2.6";
      wantedBy = [ "multi-user.target" ];
      wants = [ "network-online.target" ];
      after = [ "network-online.target" ];
      # The back-off below never gives up; a gate that fails does (RestartPreventExitStatus).
      startLimitIntervalSec = 0;
      unitConfig = lib.optionalAttrs (models != [ ]) { RequiresMountsFor = models; };
      environment = cfg.environment;

      serviceConfig = import ./hardening.nix { inherit lib; inherit (cfg) gpus; } // {
        Type = "notify";
        NotifyAccess = "main";
        ExecStart = "${kdtree} serve --config ${cfg.configFile}";
        KillSignal = "SIGTERM";
        # A server that does not drain in time is killed, and a hung one leaves a core to look at.
        TimeoutStopSec = cfg.drain + 15;
        TimeoutStartSec = cfg.startTimeout;
        WatchdogSec = cfg.watchdog;

        Restart = "on-failure";
        RestartSec = 1;
        RestartSteps = 8;
        RestartMaxDelaySec = 300;
        # 78: the gate failed. The same binary would fail again.
        RestartPreventExitStatus = 78;

        StateDirectory = "kdtree";
        StateDirectoryMode = "0700";
        RuntimeDirectory = "kdtree";
        RuntimeDirectoryMode = "0700";
        CacheDirectory = "kdtree";
        CacheDirectoryMode = "0700";

        # A model under /home or /root is bound into the sandbox; one that is missing is named by the server itself.
        BindReadOnlyPaths = map (path: "-${path}") models;

        TasksMax = cfg.limits.tasksMax;
        LimitNOFILE = cfg.limits.openFiles;
        LimitMEMLOCK = "infinity";
        OOMPolicy = "stop";
      } // lib.optionalAttrs (cfg.limits.memoryMax != null) {
        MemoryMax = cfg.limits.memoryMax;
      } // lib.optionalAttrs (cfg.limits.cpuQuota != null) {
        CPUQuota = cfg.limits.cpuQuota;
      } // lib.optionalAttrs (cfg.gpus > 0 || keys) {
        ExecStartPre = lib.optional (cfg.gpus > 0) "${sh} -c '${cards}'"
          # Credentials are fixed for the life of a service; the server reads a copy, which a reload replaces.
          ++ lib.optional keys "${install} -m 0400 %d/api-keys %t/kdtree/api-keys";
      } // lib.optionalAttrs (cfg.warmup.prompts != [ ]) {
        # "-": a cold cache is no reason to be down.
        ExecStartPost = "-${warmup}";
      } // lib.optionalAttrs keys {
        LoadCredential = "api-keys:${cfg.apiKeyFile}";
        # "+": as root outside the sandbox, which cannot see the key file. Writing into the copy keeps its owner and mode.
        ExecReload = "+${sh} -c 'cat \"${cfg.apiKeyFile}\" > %t/kdtree/api-keys && kill -HUP $MAINPID'";
      };
    };
  };
}
