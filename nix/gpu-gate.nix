# The gate on a GPU: a program for the operator's machine, and a derivation for builders that have the system feature `cuda`.
{ pkgs, kdtree }:
let
  program = pkgs.writeShellApplication {
    name = "kdtree-gpu-gate";
    runtimeInputs = [ kdtree ];
    text = ''exec kdtree gate --device cuda "$@"'';
  };
  build = pkgs.runCommand "kdtree-gpu-gate-result" { requiredSystemFeatures = [ "cuda" ]; nativeBuildInputs = [ kdtree ]; } ''
    export HOME=$PWD STATE_DIRECTORY=$PWD
    kdtree gate --device cuda | tee $out
  '';
in
program // { inherit build; }
