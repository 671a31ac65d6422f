# The machines that rollout.sh switches between: one that serves, its changed successors, and one per planted fault.
{ nixosSystem, lib, pkgs, module, kdtree-cpu, kdtree-faults, system }:
let
  # Short times, so that the test does not wait for what it wants to see.
  base = {
    services.kdtree = {
      enable = true;
      package = lib.mkDefault kdtree-cpu;
      apiKeyFile = "/etc/kdtree/api-keys";
      gate.maxTokens = lib.mkDefault 4;
      watchdog = lib.mkDefault 10;
      drain = lib.mkDefault 20;
      startTimeout = 60;
      health = { enable = lib.mkDefault false; interval = 2; timeout = 2; attempts = 2; };
      settings.engine = { threads = 2; max_waiting = 4; max_running = lib.mkDefault 2; kv_tokens = 8192; };
    };
    boot.loader.grub.device = "nodev";
    fileSystems."/" = { device = "/dev/disk/by-label/nixos"; fsType = "ext4"; };
    system.stateVersion = "26.05";
  };
  faulty = fault: { package = kdtree-faults; environment.KDTREE_FAULT = fault; };
  prompts = pkgs.writeText "prompts.jsonl" ''
    {"text": "The capital of France is"}
    {"user": "Name three colours.", "thinking": false}
  '';
  changes = {
    first = { };
    prompts.gate.prompts = prompts;
    # Another binary, nothing planted.
    binary.package = kdtree-faults;
    warm.warmup = { prompts = [ "You are a helpful assistant who pays 100% in $HOME." "1, 2, 3," ]; maxTokens = 2; };
    # A kernel that computes wrong numbers.
    blocked = faulty "kernel-error=1";
    baseline = faulty "kernel-error=1" // { gate.onFailure = "baseline"; };
    # An engine that stops moving, with a watchdog, and without one but with the health check.
    hung = faulty "engine-hang=3";
    mute = faulty "engine-hang=3" // { watchdog = 600; drain = 3; health.enable = true; };
    dead = faulty "engine-panic=3";
    # One request at a time, slowly: the probe waits in the queue while tokens advance.
    busy = faulty "slow-round=400" // { health.enable = true; settings.engine = { max_running = 1; budget = "off"; }; };
    hidden.settings.engine.model = "/home/alice/model";
    cards.gpus = 2;
    cards.package = kdtree-cpu;
  };
  build = change: (nixosSystem { inherit system; modules = [ module base { services.kdtree = change; } ]; }).config.system.build.toplevel;
in
pkgs.runCommand "kdtree-rollout-machines" { } ("mkdir $out\n" + lib.concatMapStrings
  (name: "ln -s ${build changes.${name}} $out/${name}\n")
  (lib.attrNames changes))
