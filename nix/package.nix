# The kdtree binary, and what is checked about its sources. Called with `callPackage` by the flake and by the overlay.
{ lib
, rustPlatform
, autoAddDriverRunpath
, clippy
  # `null` = CPU only: no nvcc, no unfree dependency, the same sources. Not called `cudaPackages`: callPackage would fill that in
  # with nixpkgs' default set, which moves.
, cudaSet ? null
  # "build", or a check over the same dependencies: "test", "clippy".
, goal ? "build"
  # Test-only fault switches (KDTREE_FAULT). Never in what serves.
, faults ? false
}:
let
  manifest = lib.importTOML ../Cargo.toml;
  cuda = cudaSet != null;
  suffix = lib.optionalString (goal != "build") "-${goal}" + lib.optionalString faults "-faults";

  # Only what the build reads, so that a changed document or unit does not rebuild the binary.
  read = [ "Cargo.toml" "Cargo.lock" "build.rs" "src" "kernels" "models" "web" "benches" ]
    ++ lib.optionals (goal != "build") [ "tests" "docs" ];
  root = toString ../.;
  top = path: lib.head (lib.filter (part: builtins.isString part && part != "") (builtins.split "/" (lib.removePrefix root path)));
  src = lib.cleanSourceWith {
    src = ../.;
    name = "kdtree-source";
    filter = path: _type: lib.elem (top (toString path)) read;
  };
in
assert lib.assertMsg (lib.elem goal [ "build" "test" "clippy" ]) "package.nix: goal is build, test or clippy";
assert lib.assertMsg (!cuda || cudaSet.cudaMajorMinorVersion == "13.0") "kdtree's kernels are measured with CUDA 13.0; name cudaPackages_13_0";
rustPlatform.buildRustPackage ({
  pname = "kdtree";
  version = manifest.package.version + suffix;
  inherit src;
  cargoLock.lockFile = ../Cargo.lock;
  buildFeatures = lib.optionals faults [ "faults" ];
  doCheck = goal == "test";

  # nvcc by name and never by search: a CPU build stays one on a builder that has a toolkit. Kernels for sm_90a and sm_120a are
  # compiled by build.rs in this derivation; nothing in them depends on time, path or machine.
  env.KDTREE_NVCC = if cuda then "${cudaSet.cuda_nvcc}/bin/nvcc" else "none";
  nativeBuildInputs = lib.optionals cuda [ cudaSet.cuda_nvcc autoAddDriverRunpath ]
    ++ lib.optional (goal == "clippy") clippy;
  buildInputs = lib.optionals cuda ([ cudaSet.cuda_cudart cudaSet.cuda_cccl ]
    ++ lib.optional (cudaSet ? cuda_crt) cudaSet.cuda_crt);

  # libcuda comes with the driver, in /run/opengl-driver/lib (autoAddDriverRunpath). NCCL, for more than one GPU, is opened by name at
  # run time, which follows this binary's own run path.
  postFixup = lib.optionalString (cuda && goal == "build") ''
    patchelf --add-rpath ${lib.makeLibraryPath [ cudaSet.nccl ]} $out/bin/kdtree
  '';

  meta = {
    description = manifest.package.description;
    homepage = manifest.package.repository;
    license = lib.licenses.mit;
    mainProgram = "kdtree";
    platforms = [ "x86_64-linux" ];
  };
} // lib.optionalAttrs (goal != "build") {
  buildPhase = lib.optionalString (goal == "clippy") "cargo clippy --release --offline --locked --all-targets -- -D warnings";
  installPhase = "touch $out";
})
