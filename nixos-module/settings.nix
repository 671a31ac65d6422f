# Options become the configuration file, and what does not fit together is refused before anything is built.
{ config, lib, pkgs, ... }:
let
  cfg = config.services.kdtree;
  toml = pkgs.formats.toml { };
  written = toml.generate "kdtree.toml" cfg.settings;
  loopback = lib.elem cfg.host [ "127.0.0.1" "::1" "localhost" ];
  stored = path: path != null && lib.hasPrefix builtins.storeDir path;
in
{
  options.services.kdtree.configFile = lib.mkOption {
    type = lib.types.path;
    internal = true;
    readOnly = true;
    description = "The checked configuration file.";
  };

  config = lib.mkIf cfg.enable {
    services.kdtree.settings = lib.mkMerge [
      {
        server = { inherit (cfg) host port; drain_s = cfg.drain; };
        gate = {
          inherit (cfg.gate) enable;
          max_tokens = cfg.gate.maxTokens;
          on_failure = cfg.gate.onFailure;
        };
        # Never `auto`: with GPUs configured their absence is an error, without them a visible card is left alone.
        engine.device = if cfg.gpus > 0 then "cuda" else "cpu";
      }
      (lib.mkIf (cfg.gpus > 0) { engine.ranks = lib.mkDefault cfg.gpus; })
      (lib.mkIf (cfg.model != null) { engine.model = cfg.model; })
      (lib.mkIf (cfg.drafter != null) { engine.drafter = cfg.drafter; })
      (lib.mkIf (cfg.gate.prompts != null) { gate.prompts = "${cfg.gate.prompts}"; })
      (lib.mkIf (cfg.apiKeyFile != null) { server.api_key_file = "/run/kdtree/api-keys"; })
    ];

    # Wrong keys and values fail the build of the system, not the start of the service.
    services.kdtree.configFile = pkgs.runCommand "kdtree.toml" { } ''
      ${lib.getExe cfg.package} config --check ${written}
      cp ${written} $out
    '';

    assertions = [
      {
        assertion = loopback || cfg.apiKeyFile != null;
        message = "services.kdtree: host ${cfg.host} is reachable from outside; set apiKeyFile, or listen on 127.0.0.1.";
      }
      {
        assertion = !stored cfg.model && !stored cfg.drafter && !stored cfg.apiKeyFile;
        message = "services.kdtree: model, drafter and apiKeyFile must lie outside ${builtins.storeDir}: everybody can read the store, and it would hold the weights a second time.";
      }
      {
        assertion = cfg.drafter == null || cfg.model != null;
        message = "services.kdtree: drafter is set without model; the built-in model has its own drafter.";
      }
      {
        assertion = cfg.watchdog >= 5;
        message = "services.kdtree: watchdog is ${toString cfg.watchdog} s, wanted at least 5: a long prefill chunk must not look like a hang.";
      }
    ];

    networking.firewall.allowedTCPPorts = lib.mkIf cfg.openFirewall [ cfg.port ];
  };
}
