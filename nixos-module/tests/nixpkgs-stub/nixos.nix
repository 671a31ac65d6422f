# The NixOS options that the module may set, typed strictly where a mistake would matter, and the unit renderer.
{ lib, pkgs }:
{ modules, specialArgs ? { }, system ? "x86_64-linux", ... }:
let
  inherit (lib) mkOption types concatMapStrings optionalAttrs;
  atom = types.oneOf [ types.bool types.int types.float types.str types.path types.package ];
  section = types.attrsOf (types.either atom (types.listOf atom));
  strs = mkOption { type = types.listOf types.str; default = [ ]; };
  text = mkOption { type = types.lines; default = ""; };
  free = mkOption { type = types.attrsOf types.anything; default = { }; };
  unitOpts = { name, ... }: {
    options = {
      enable = mkOption { type = types.bool; default = true; };
      description = mkOption { type = types.str; default = ""; };
      documentation = strs;
      after = strs;
      before = strs;
      wants = strs;
      requires = strs;
      requisite = strs;
      bindsTo = strs;
      partOf = strs;
      upholds = strs;
      conflicts = strs;
      wantedBy = strs;
      requiredBy = strs;
      upheldBy = strs;
      onFailure = strs;
      onSuccess = strs;
      aliases = strs;
      unitConfig = mkOption { type = section; default = { }; };
      startLimitIntervalSec = mkOption { type = types.nullOr types.int; default = null; };
      startLimitBurst = mkOption { type = types.nullOr types.int; default = null; };
    };
  };
  serviceOpts = { name, ... }: {
    imports = [ unitOpts ];
    options = {
      serviceConfig = mkOption { type = section; default = { }; };
      environment = mkOption { type = types.attrsOf (types.nullOr (types.oneOf [ types.str types.path types.package ])); default = { }; };
      path = mkOption { type = types.listOf (types.oneOf [ types.package types.str ]); default = [ ]; };
      script = text;
      preStart = text;
      postStart = text;
      reload = text;
      preStop = text;
      postStop = text;
      scriptArgs = mkOption { type = types.str; default = ""; };
      restartIfChanged = mkOption { type = types.bool; default = true; };
      reloadIfChanged = mkOption { type = types.bool; default = false; };
      stopIfChanged = mkOption { type = types.bool; default = true; };
      restartTriggers = mkOption { type = types.listOf types.unspecified; default = [ ]; };
      reloadTriggers = mkOption { type = types.listOf types.unspecified; default = [ ]; };
      startAt = mkOption { type = types.either types.str (types.listOf types.str); default = [ ]; };
    };
  };
  timerOpts = { imports = [ unitOpts ]; options.timerConfig = mkOption { type = section; default = { }; }; };
  base = { config, ... }: {
    options = {
      assertions = mkOption { type = types.listOf types.unspecified; default = [ ]; };
      warnings = strs;
      systemd.services = mkOption { type = types.attrsOf (types.submodule serviceOpts); default = { }; };
      systemd.timers = mkOption { type = types.attrsOf (types.submodule timerOpts); default = { }; };
      systemd.targets = mkOption { type = types.attrsOf (types.submodule unitOpts); default = { }; };
      system.preSwitchChecks = mkOption { type = types.attrsOf types.str; default = { }; };
      systemd.tmpfiles.rules = strs;
      systemd.tmpfiles.settings = free;
      systemd.units = mkOption { type = types.attrsOf types.anything; default = { }; };
      users.users = free;
      users.groups = free;
      environment = free;
      networking = free;
      hardware = free;
      boot = free;
      fileSystems = free;
      nixpkgs = free;
      services.xserver = free;
      services.openssh = free;
      nix = free;
      security = free;
      virtualisation = free;
      time = free;
      system.stateVersion = mkOption { type = types.str; default = "26.05"; };
      system.build = free;
    };
  };
  val = v: if v == true then "true" else if v == false then "false" else toString v;
  lines = s: concatMapStrings (k: concatMapStrings (v: "${k}=${val v}\n") (if builtins.isList s.${k} then s.${k} else [ s.${k} ])) (builtins.attrNames s);
  list = k: v: optionalAttrs (v != [ ]) { ${k} = toString v; };
  unitSection = u: list "Requires" u.requires // list "Wants" u.wants // list "Upholds" u.upholds // list "After" u.after // list "Before" u.before // list "BindsTo" u.bindsTo // list "PartOf" u.partOf // list "Conflicts" u.conflicts // list "Requisite" u.requisite // list "OnFailure" u.onFailure // list "OnSuccess" u.onSuccess // list "Documentation" u.documentation // optionalAttrs (u.description != "") { Description = u.description; } // optionalAttrs (u.startLimitIntervalSec != null) { StartLimitIntervalSec = u.startLimitIntervalSec; } // optionalAttrs (u.startLimitBurst != null) { StartLimitBurst = u.startLimitBurst; } // u.unitConfig;
  frame = u: body: "[Unit]\n${lines (unitSection u)}\n${body}" + lib.optionalString (u.wantedBy != [ ]) "\n[Install]\nWantedBy=${toString u.wantedBy}\n";
  job = n: t: "${pkgs.writeShellScript n "set -e\n${t}"}";
  service = name: s:
    let
      path = s.path ++ [ pkgs.coreutils pkgs.findutils pkgs.gnugrep pkgs.gnused pkgs.systemd ];
      env = { PATH = "${lib.makeBinPath path}"; } // s.environment;
      sc = optionalAttrs (s.preStart != "") { ExecStartPre = [ (job "${name}-pre-start" s.preStart) ]; } // optionalAttrs (s.script != "") { ExecStart = job "${name}-start" s.script + " " + s.scriptArgs; } // optionalAttrs (s.postStart != "") { ExecStartPost = [ (job "${name}-post-start" s.postStart) ]; } // optionalAttrs (s.reload != "") { ExecReload = job "${name}-reload" s.reload; } // optionalAttrs (s.preStop != "") { ExecStop = job "${name}-pre-stop" s.preStop; } // s.serviceConfig;
    in
    frame s ("[Service]\n" + concatMapStrings (n: lib.optionalString (env.${n} != null) "Environment=${builtins.toJSON "${n}=${env.${n}}"}\n") (builtins.attrNames env) + lines sc);
  ev = lib.evalModules { modules = [ base ] ++ modules; specialArgs = { inherit pkgs; modulesPath = ./.; utils.escapeSystemdExecArgs = lib.concatMapStringsSep " " (a: builtins.replaceStrings [ "%" "$" ] [ "%%" "$$" ] (builtins.toJSON (toString a))); } // specialArgs; };
  failed = builtins.filter (a: !a.assertion) ev.config.assertions;
  config = if failed != [ ] then throw "Failed assertions:\n${concatMapStrings (a: "- ${a.message}\n") failed}" else ev.config;
  units = lib.mapAttrs' (n: s: lib.nameValuePair "${n}.service" { text = service n s; inherit (s) wantedBy requiredBy; }) config.systemd.services
    // lib.mapAttrs' (n: t: lib.nameValuePair "${n}.timer" { text = frame t "[Timer]\n${lines t.timerConfig}"; inherit (t) wantedBy requiredBy; }) config.systemd.timers
    // lib.mapAttrs' (n: t: lib.nameValuePair "${n}.target" { text = frame t ""; inherit (t) wantedBy requiredBy; }) config.systemd.targets;
  # a directory of unit files with the .wants/.requires links, as `systemctl` would see it
  unitDir = pkgs.runCommand "units" { } ("mkdir -p $out\n" + concatMapStrings (n: "cp ${pkgs.writeText n units.${n}.text} $out/${n}\n" + concatMapStrings (t: "mkdir -p $out/${t}.wants; ln -s ../${n} $out/${t}.wants/${n}\n") units.${n}.wantedBy + concatMapStrings (t: "mkdir -p $out/${t}.requires; ln -s ../${n} $out/${t}.requires/${n}\n") units.${n}.requiredBy) (builtins.attrNames units));
  # `preSwitchChecks INCOMING ACTION`: every fragment in a subshell of its own; the first failure ends it.
  preSwitchChecks = pkgs.writeShellScript "pre-switch-checks" (concatMapStrings
    (n: "(\n${config.system.preSwitchChecks.${n}}\n) || { echo \"Pre-switch check '${n}' failed\" >&2; exit 1; }\n")
    (builtins.attrNames config.system.preSwitchChecks));
  # What a switch needs: units and checks.
  toplevel = pkgs.runCommand "nixos-system" { } "mkdir $out; ln -s ${unitDir} $out/units; ln -s ${preSwitchChecks} $out/pre-switch-checks";
in
{ inherit (ev) options; inherit pkgs lib; config = config // { systemd = config.systemd // { units = units; }; system = config.system // { build = config.system.build // { inherit unitDir toplevel; }; }; }; }
