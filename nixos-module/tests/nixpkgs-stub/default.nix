# `import nixpkgs { inherit system; config = …; overlays = …; }`
{ system ? "x86_64-linux", config ? { }, overlays ? [ ], ... }:
import ./pkgs.nix { lib = import ./lib.nix; inherit system config overlays; }
