# The options. docs/operating.md shows them as a table made from this file.
self:
{ config, lib, pkgs, ... }:
let
  inherit (lib) mkOption mkEnableOption literalExpression types;
  cfg = config.services.kdtree;
  packages = self.packages.${pkgs.stdenv.hostPlatform.system};

  # Weights stay outside the store: a path literal would copy them into it.
  outside = types.strMatching "/.*";
  seconds = types.ints.positive;
in
{
  options.services.kdtree = {
    enable = mkEnableOption "the kdtree server";

    package = mkOption {
      type = types.package;
      default = if cfg.gpus > 0 then packages.kdtree else packages.kdtree-cpu;
      defaultText = literalExpression "kdtree with GPUs, kdtree-cpu without";
      description = "The kdtree build to run.";
    };

    host = mkOption {
      type = types.str;
      default = "127.0.0.1";
      example = "0.0.0.0";
      description = "Address to listen on. Beyond loopback an `apiKeyFile` is required.";
    };

    port = mkOption {
      type = types.port;
      default = 8000;
      description = "TCP port to listen on.";
    };

    openFirewall = mkOption {
      type = types.bool;
      default = false;
      description = "Open `port` in the firewall.";
    };

    model = mkOption {
      type = types.nullOr outside;
      default = null;
      example = "/srv/models/Kimi-K2.6";
      description = "Directory of the target model, outside the store; null serves the model built into the binary.";
    };

    drafter = mkOption {
      type = types.nullOr outside;
      default = null;
      example = "/srv/models/Kimi-K2.6-DFlash";
      description = "Directory of the DFlash drafter; null drafts only with the built-in model.";
    };

    gpus = mkOption {
      type = types.ints.unsigned;
      default = 0;
      example = 8;
      description = "GPUs to serve on, one tensor-parallel rank each; 0 serves on the CPU. A missing GPU keeps the service from starting: it never falls back to the CPU.";
    };

    apiKeyFile = mkOption {
      type = types.nullOr outside;
      default = null;
      example = "/run/secrets/kdtree-api-keys";
      description = "File of API keys, one a line, outside the store; handed over as a systemd credential. `systemctl reload kdtree` reads it again.";
    };

    settings = mkOption {
      type = (pkgs.formats.toml { }).type;
      default = { };
      example = literalExpression ''{ engine.budget = "tree:16"; engine.max_model_len = 131072; }'';
      description = "Any other key of the configuration file (`kdtree config` prints them all). Checked by `kdtree config --check` when the system is built.";
    };

    environment = mkOption {
      type = types.attrsOf types.str;
      default = { };
      example = { RUST_LOG = "kdtree=debug"; };
      description = "Environment variables of the server and of the gate before a switch.";
    };

    gate = {
      enable = mkOption {
        type = types.bool;
        default = true;
        description = "Run the gate inside the service before it reports ready.";
      };
      prompts = mkOption {
        type = types.nullOr types.path;
        default = null;
        description = "File of gate prompts, one JSON object a line; null = the built-in set.";
      };
      maxTokens = mkOption {
        type = types.ints.between 2 4096;
        default = 24;
        description = "Tokens the gate generates per prompt.";
      };
      onFailure = mkOption {
        type = types.enum [ "block" "baseline" ];
        default = "block";
        description = "After a failed gate: `block` stays down and is not restarted, `baseline` serves with the baseline kernel and says so.";
      };
      beforeSwitch = mkOption {
        type = types.bool;
        default = true;
        description = "Run the new build's gate on its built-in model before `nixos-rebuild switch` touches the running server; a failure refuses the switch.";
      };
    };

    warmup = {
      prompts = mkOption {
        type = types.listOf types.str;
        default = [ ];
        example = [ "You are a helpful assistant." ];
        description = "Prompts completed over HTTP right after the start, before the unit counts as started, for example the system prompts of your applications. The engine's own warm-up runs in any case.";
      };
      maxTokens = mkOption {
        type = types.ints.positive;
        default = 1;
        description = "Tokens generated per warm-up prompt.";
      };
      timeout = mkOption {
        type = seconds;
        default = 120;
        description = "Seconds one warm-up prompt may take. A failed warm-up is logged and does not stop the service.";
      };
    };

    health = {
      enable = mkOption {
        type = types.bool;
        default = true;
        description = "Ask for a real completion every `health.interval` seconds and restart a server that generates nothing.";
      };
      interval = mkOption {
        type = seconds;
        default = 60;
        description = "Seconds between two checks.";
      };
      timeout = mkOption {
        type = seconds;
        default = 30;
        description = "Seconds the completion may take. A server whose tokens advance meanwhile, that answers 429, or whose connections are all taken, is busy and healthy.";
      };
      attempts = mkOption {
        type = types.ints.positive;
        default = 3;
        description = "Attempts that must fail in a row before the server is restarted.";
      };
      prompt = mkOption {
        type = types.str;
        default = "1, 2, 3,";
        description = "Prompt of the health check.";
      };
    };

    limits = {
      memoryMax = mkOption {
        type = types.nullOr types.str;
        default = null;
        example = "96G";
        description = "Most memory of the service (MemoryMax=); null = no limit.";
      };
      tasksMax = mkOption {
        type = types.ints.positive;
        default = 4096;
        description = "Most threads of the service (TasksMax=).";
      };
      openFiles = mkOption {
        type = types.ints.positive;
        default = 65536;
        description = "Most open files and connections (LimitNOFILE=).";
      };
      cpuQuota = mkOption {
        type = types.nullOr types.str;
        default = null;
        example = "800%";
        description = "CPU time of the service (CPUQuota=); null = no limit.";
      };
    };

    drain = mkOption {
      type = seconds;
      default = 30;
      description = "Seconds running requests may take to end when the service stops.";
    };

    startTimeout = mkOption {
      type = seconds;
      default = 300;
      description = "Seconds without progress after which a start fails. Loading, warm-up and gate extend it while they advance.";
    };

    watchdog = mkOption {
      type = seconds;
      default = 60;
      description = "Seconds without a sign of life from the engine thread after which systemd kills and restarts the service.";
    };
  };
}
