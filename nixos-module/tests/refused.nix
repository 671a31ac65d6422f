# Settings of `services.kdtree` that must not evaluate, by the reason.
{
  port-out-of-range.port = 70000;
  unknown-option.modle = "/srv/model";
  model-not-absolute.model = "models/k2.6";
  model-copied-into-the-store.model = ./refused.nix;
  model-in-the-store.model = "${builtins.storeDir}/model";
  key-file-in-the-store.apiKeyFile = "${builtins.storeDir}/keys";
  open-to-the-network-without-keys = { host = "0.0.0.0"; apiKeyFile = null; };
  drafter-without-model.drafter = "/srv/drafter";
  unknown-consequence.gate.onFailure = "ignore";
  no-tokens.gate.maxTokens = 0;
  watchdog-too-short.watchdog = 1;
  interval-of-nothing.health.interval = 0;
  negative-gpus.gpus = -1;
  number-as-environment.environment.RUST_LOG = 3;
  port-set-twice.settings.server.port = 9000;
  device-fallback.settings.engine.device = "auto";
}
