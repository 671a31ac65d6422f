{
  description = "Offline stand-in for the nixpkgs input: evaluation and host-tool builds in CI, never a real build";

  outputs = _:
    let
      system = "x86_64-linux";
      lib = import ./lib.nix;
      pkgs = import ./default.nix { inherit system; };
    in
    {
      lib = lib // { nixosSystem = import ./nixos.nix { inherit lib pkgs; }; };
      legacyPackages.${system} = pkgs;
    };
}
