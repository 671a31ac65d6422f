# What `nix flake check` builds. Everything here works without a GPU and without unfree packages.
{ self, nixpkgs, lib, pkgs, build, kdtree-cpu, system }:
let
  module = self.nixosModules.default;
  machine = settings: (nixpkgs.lib.nixosSystem {
    inherit system;
    modules = [ module ./example.nix { services.kdtree = settings; } ];
  }).config;
  # Whether a configuration evaluates down to its system.
  evaluates = settings: (builtins.tryEval (builtins.seq (machine settings).system.build.toplevel.drvPath true)).success;
  refused = import ../nixos-module/tests/refused.nix;
  wrongly = lib.filter (name: evaluates refused.${name}) (lib.attrNames refused);
in
{
  package = kdtree-cpu;
  tests = build { goal = "test"; };
  clippy = build { goal = "clippy"; };

  formatting = pkgs.runCommand "kdtree-rustfmt" { nativeBuildInputs = [ pkgs.cargo pkgs.rustfmt ]; } ''
    cp -r --no-preserve=mode ${self} work; cd work
    HOME=$PWD cargo fmt --check
    touch $out
  '';

  nix-formatting = pkgs.runCommand "kdtree-nixpkgs-fmt" { nativeBuildInputs = [ pkgs.nixpkgs-fmt ]; } ''
    cd ${self}; nixpkgs-fmt --check flake.nix nix nixos-module
    touch $out
  '';

  # The gate of the CPU build, on its built-in model.
  gate = pkgs.runCommand "kdtree-gate" { nativeBuildInputs = [ kdtree-cpu ]; } ''
    export HOME=$PWD STATE_DIRECTORY=$PWD
    kdtree gate --device cpu --json certificate.json
    cp certificate.json $out
  '';

  # Correct machines evaluate, each wrong one is refused.
  module =
    assert lib.assertMsg (evaluates { }) "the example machine does not evaluate";
    assert lib.assertMsg (evaluates { gpus = 8; model = "/srv/models/Kimi-K2.6"; drafter = "/srv/models/Kimi-K2.6-DFlash"; package = kdtree-cpu; })
      "a machine with GPUs and a model does not evaluate";
    assert lib.assertMsg (wrongly == [ ]) "accepted, but must be refused: ${toString wrongly}";
    pkgs.runCommand "kdtree-module" { } "echo ${toString (lib.length (lib.attrNames refused))} refused > $out";

  # The committed units are the module's; the options in the documentation are the module's.
  units = pkgs.runCommand "kdtree-units" { } ''
    diff -ru ${self}/dist ${self.packages.${system}.dist}
    touch $out
  '';
  options-table = pkgs.runCommand "kdtree-options" { } ''
    sed -n '/^| option | default/,/^$/p' ${self}/docs/operating.md | sed '/^$/d' > table
    diff -u table ${self.packages.${system}.options-table} || { echo 'docs/operating.md: replace its table by the output of nix build .#options-table' >&2; exit 1; }
    touch $out
  '';

  lock-values =
    let
      nodes = (builtins.fromJSON (builtins.readFile ../flake.lock)).nodes;
      found = lib.mapAttrs (name: _: nodes.${name}.locked) wanted;
      wanted = builtins.fromJSON (builtins.readFile ./lock-values.json);
    in
    assert lib.assertMsg (found == wanted) "flake.lock: found ${builtins.toJSON found}, wanted ${builtins.toJSON wanted} (nix/lock-values.json)";
    assert lib.assertMsg (lib.attrNames nodes == [ "nixpkgs" "root" ]) "flake.lock has inputs besides nixpkgs";
    pkgs.runCommand "kdtree-lock" { } "touch $out";

  vm = import ../nixos-module/tests/vm.nix { inherit pkgs module kdtree-cpu; kdtree-faults = build { faults = true; }; };
}
