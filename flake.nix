{
  description = "kdtree: Kimi K2.6 with DFlash + DDTree speculation, one binary, OpenAI API, rollout gate";

  # One input. Its pinned values are checked against nix/lock-values.json by nixos-module/tests/lock.sh.
  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-unstable";

  outputs = { self, nixpkgs }:
    let
      system = "x86_64-linux";
      lib = nixpkgs.lib;
      # Free packages only: the CPU build and everything that checks it.
      pkgs = import nixpkgs { inherit system; };
      # The CUDA toolkit is unfree; only the CUDA build and the development shell look here.
      unfree = import nixpkgs { inherit system; config.allowUnfree = true; };

      build = arguments: pkgs.callPackage ./nix/package.nix arguments;
      kdtree = unfree.callPackage ./nix/package.nix { cudaSet = unfree.cudaPackages_13_0; };
      kdtree-cpu = build { };
      gpu-gate = import ./nix/gpu-gate.nix { inherit pkgs kdtree; };

      app = description: package: arguments: {
        type = "app";
        program = lib.getExe (pkgs.writeShellScriptBin "kdtree-app" ''exec ${lib.getExe package} ${lib.escapeShellArgs arguments} "$@"'');
        meta.description = description;
      };
    in
    {
      packages.${system} = {
        inherit kdtree kdtree-cpu gpu-gate;
        default = kdtree;
        # With the fault switches of the tests compiled in. Not for serving.
        kdtree-faults = build { faults = true; };
        # For builders that declare the system feature `cuda`. Outside `checks`, so that `nix flake check` works without a GPU.
        gpu-gate-build = gpu-gate.build;
        # Units for systemd without NixOS, and the table of options in docs/operating.md.
        dist = import ./nix/dist.nix { inherit lib pkgs; module = self.nixosModules.default; nixosSystem = lib.nixosSystem; };
        options-table = import ./nix/options-table.nix { inherit lib pkgs; options = self.nixosConfigurations.example.options.services.kdtree; };
      };

      apps.${system} = rec {
        default = serve;
        serve = app "Serve the OpenAI API" kdtree [ "serve" ];
        gate = app "Run the rollout gate" kdtree [ "gate" ];
        bench = app "Measure kernel, round or server" kdtree [ "bench" ];
        doctor = app "Say what this machine has and lacks" kdtree [ "doctor" ];
        gpu-gate = {
          type = "app";
          program = lib.getExe self.packages.${system}.gpu-gate;
          meta.description = "Run the rollout gate on this machine's GPU; fails without one";
        };
      };

      devShells.${system}.default = unfree.mkShell {
        packages = [ unfree.cargo unfree.rustc unfree.clippy unfree.rustfmt unfree.cudaPackages_13_0.cuda_nvcc unfree.cudaPackages_13_0.cuda_cudart unfree.nixpkgs-fmt ];
        KDTREE_NVCC = "${unfree.cudaPackages_13_0.cuda_nvcc}/bin/nvcc";
      };

      checks.${system} = import ./nix/checks.nix { inherit self nixpkgs lib pkgs build kdtree-cpu system; };

      # Machines for nixos-module/tests/rollout.sh.
      legacyPackages.${system}.rollout-machines = import ./nixos-module/tests/machines.nix {
        inherit lib pkgs system kdtree-cpu;
        inherit (lib) nixosSystem;
        inherit (self.packages.${system}) kdtree-faults;
        module = self.nixosModules.default;
      };

      nixosModules.default = import ./nixos-module self;
      nixosModules.kdtree = self.nixosModules.default;

      overlays.default = final: _prev: {
        kdtree = final.callPackage ./nix/package.nix { cudaSet = final.cudaPackages_13_0; };
        kdtree-cpu = final.callPackage ./nix/package.nix { };
      };

      # The example of docs/operating.md: one server with keys, on the CPU.
      nixosConfigurations.example = lib.nixosSystem {
        inherit system;
        modules = [ self.nixosModules.default ./nix/example.nix ];
      };

      formatter.${system} = pkgs.nixpkgs-fmt;
    };
}
