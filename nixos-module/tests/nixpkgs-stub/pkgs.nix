# Packages as thin derivations over the host's own tools, built in Nix's sandbox with the host's /usr visible.
# A package or attribute that is missing here is an evaluation error, so that the flake keeps to what it is known to need.
{ lib, system, config ? { }, overlays ? [ ], tools ? builtins.fromJSON (builtins.readFile ./host-tools.json) }:
let
  drv = a:
    let d = derivation ({ inherit system; builder = "/bin/bash"; PATH = tools.path; } // removeAttrs a [ "passthru" "meta" ]);
    in d // { meta = a.meta or { }; pname = a.pname or a.name; version = a.version or ""; } // (a.passthru or { });

  # What nixpkgs refuses without `allowUnfree`, refused here too.
  unfree = name: p:
    if config.allowUnfree or false then p
    else throw "Package ‘${name}’ has an unfree license (‘CUDA EULA’), refusing to evaluate.";

  runCommand = name: env: script: drv ({
    inherit name;
    args = [ "-euo" "pipefail" "-c" ''eval "$buildCommand"'' ];
    buildCommand = script;
  } // removeAttrs env [ "nativeBuildInputs" "buildInputs" "meta" ] // {
    PATH = lib.concatStringsSep ":" (map (p: "${p}/bin") (env.nativeBuildInputs or [ ]) ++ [ tools.path ]);
    meta = env.meta or { };
  });

  # Programs of the host presented as a package: wrappers, because a linked nvcc could not find its headers.
  host = pname: bins: runCommand pname { meta.mainProgram = lib.head bins; } ("mkdir -p $out/bin\n" + lib.concatMapStrings
    (b: ''
      if p=$(type -P ${b}); then printf '#!/bin/sh\nexec %s "$@"\n' "$p" > $out/bin/${b}; chmod +x $out/bin/${b}; fi
    '')
    bins);

  writeTextFile = { name, text, executable ? false, destination ? "" }: runCommand name { inherit text; passAsFile = [ "text" ]; } ''
    d=$out${destination}; mkdir -p "$(dirname "$d")"; cp "$textPath" "$d"; ${lib.optionalString executable ''chmod +x "$d"''}
  '';

  cargoEnv = ''
    export HOME=$PWD CARGO_HOME=${tools.cargoHome} RUSTUP_HOME=${tools.rustupHome} CARGO_NET_OFFLINE=true CARGO_TARGET_DIR=$PWD/target
    export RUSTFLAGS="--remap-path-prefix=$PWD=/build --remap-path-prefix=${tools.cargoHome}=/cargo" CARGO_INCREMENTAL=0
    # nixpkgs strips what it installs.
    export CARGO_PROFILE_RELEASE_DEBUG=0
  '';

  # A value as TOML, tables inline.
  inlineToml = v:
    if lib.isAttrs v then "{ ${lib.concatStringsSep ", " (lib.mapAttrsToList (k: x: "${builtins.toJSON k} = ${inlineToml x}") v)} }"
    else if lib.isList v then "[ ${lib.concatMapStringsSep ", " inlineToml v} ]"
    else builtins.toJSON v;

  # The dependencies alone, compiled once for every package with the same dependencies; nothing else of the manifest counts.
  cargoDependencies = lockFile:
    let
      whole = builtins.fromTOML (builtins.readFile (dirOf lockFile + "/Cargo.toml"));
      kept = lib.filterAttrs (k: _: lib.elem k [ "features" "dependencies" "dev-dependencies" "build-dependencies" "profile" ]) whole
        // { package = { inherit (whole.package) name version edition; build = "build.rs"; }; };
      manifest = lib.concatStringsSep "\n" (lib.mapAttrsToList (k: v: "${k} = ${inlineToml v}") kept) + "\n";
    in
    runCommand "cargo-dependencies"
      { inherit manifest; lock = builtins.readFile lockFile; passAsFile = [ "manifest" "lock" ]; } ''
      mkdir -p work/src; cd work; cp "$manifestPath" Cargo.toml; cp "$lockPath" Cargo.lock
      for f in src/main.rs build.rs; do echo 'fn main() {}' > $f; done; : > src/lib.rs
      ${cargoEnv}
      cargo build --release --locked --offline
      # The crate's own stub must not be taken for the real one.
      rm -rf target/release/.fingerprint/kdtree-* target/release/build/kdtree-* target/release/deps/*kdtree* target/release/*kdtree*
      cp -r target $out
    '';

  buildRustPackage = a:
    let
      flags = lib.optionalString (a.buildNoDefaultFeatures or false) " --no-default-features"
        + lib.optionalString ((a.buildFeatures or [ ]) != [ ]) " --features ${lib.concatStringsSep "," a.buildFeatures}";
      locked = "--release --locked --offline";
    in
    assert a.cargoLock ? lockFile;
    runCommand "${a.pname}-${a.version}"
      ({
        meta = { mainProgram = a.pname; } // (a.meta or { });
        inherit (a) src pname version;
        nativeBuildInputs = (a.nativeBuildInputs or [ ]) ++ (a.buildInputs or [ ]);
        passthru = a.passthru or { };
      } // (a.env or { })) ''
      cp -r --no-preserve=mode "$src" work; cd work
      ${cargoEnv}
      cp -r --no-preserve=ownership,mode ${cargoDependencies a.cargoLock.lockFile} target; chmod -R +x target
      # The store keeps no times; one for all is what cargo takes for unchanged.
      find target -exec touch -d "@$(date +%s)" {} +
      ${a.buildPhase or "cargo build ${locked}${flags}"}
      ${lib.optionalString (a.doCheck or true) (a.checkPhase or "cargo test ${locked}${flags}")}
      ${a.installPhase or "mkdir -p $out/bin; cp target/release/kdtree $out/bin/"}
      ${a.postInstall or ""}
      ${lib.optionalString (builtins.any (p: p.driverRunpath or false) (a.nativeBuildInputs or [ ])) ''
        patchelf --add-rpath /run/opengl-driver/lib $out/bin/*
      ''}
      ${a.postFixup or ""}
    '';

  cudaSet = {
    cudaMajorMinorVersion = "13.0";
    cuda_nvcc = unfree "cuda_nvcc" (runCommand "cuda_nvcc" { } ''
      mkdir -p $out/bin
      for b in nvcc fatbinary; do printf '#!/bin/sh\nexec ${tools.cudaBin}/%s "$@"\n' $b > $out/bin/$b; chmod +x $out/bin/$b; done
    '');
    cuda_cudart = unfree "cuda_cudart" (host "cuda_cudart" [ "true" ]);
    cuda_cccl = unfree "cuda_cccl" (host "cuda_cccl" [ "true" ]);
    nccl = host "nccl" [ "true" ];
  };

  pkgs = lib.fix (self: lib.foldl' (base: overlay: base // overlay self base) (base self) overlays);
  base = pkgs: {
    inherit lib system config runCommand writeTextFile;
    stdenv = {
      hostPlatform = { inherit system; isLinux = true; isx86_64 = true; };
      cc = host "gcc" [ "gcc" "cc" "g++" ];
    };
    callPackage = f: a:
      let call = if lib.isFunction f then f else import f; in call (builtins.intersectAttrs (builtins.functionArgs call) pkgs // a);
    runCommandLocal = runCommand;
    writeText = name: text: writeTextFile { inherit name text; };
    writeShellScript = name: text: writeTextFile { inherit name; executable = true; text = "#!/bin/bash\n${text}"; };
    writeShellScriptBin = name: text:
      (writeTextFile { inherit name; executable = true; destination = "/bin/${name}"; text = "#!/bin/bash\n${text}"; })
      // { meta.mainProgram = name; };
    writeShellApplication = { name, text, runtimeInputs ? [ ], ... }:
      pkgs.writeShellScriptBin name ("set -euo pipefail\nexport PATH=${lib.makeBinPath runtimeInputs}:$PATH\n" + text);
    formats.toml = _: {
      type = lib.types.attrsOf lib.types.anything;
      # Tables of plain values, which is all a configuration of kdtree has. JSON's strings, numbers and lists are TOML's.
      generate = name: value: pkgs.writeText name (lib.concatMapStrings
        (t: "[${t}]\n" + lib.concatMapStrings (k: "${k} = ${builtins.toJSON value.${t}.${k}}\n") (lib.attrNames value.${t}))
        (lib.attrNames value));
    };
    rustPlatform = { inherit buildRustPackage; };
    cudaPackages_13_0 = cudaSet;
    cudaPackages = throw "the flake names its CUDA set; the default one moves";
    autoAddDriverRunpath = host "auto-add-driver-runpath" [ "patchelf" ] // { driverRunpath = true; };
    cargo = host "cargo" [ "cargo" ];
    rustc = host "rustc" [ "rustc" ];
    clippy = host "clippy" [ "cargo-clippy" "clippy-driver" ];
    rustfmt = host "rustfmt" [ "rustfmt" "cargo-fmt" ];
    nixpkgs-fmt = host "nixpkgs-fmt" [ "nixpkgs-fmt" ];
    mkShell = a: runCommand "shell" (removeAttrs a [ "packages" ] // { nativeBuildInputs = a.packages or [ ]; }) "touch $out";
    coreutils = host "coreutils" [ "env" "cat" "install" "mkdir" "nice" "rm" "sleep" "timeout" "true" ];
    findutils = host "findutils" [ "find" "xargs" ];
    gnugrep = host "gnugrep" [ "grep" ];
    gnused = host "gnused" [ "sed" ];
    systemd = host "systemd" [ "systemctl" "systemd-analyze" ];
    curl = host "curl" [ "curl" ];
    jq = host "jq" [ "jq" ];
    bash = host "bash" [ "bash" "sh" ];
    python3 = host "python3" [ "python3" ];
    # Evaluates every node; the result holds the script and the nodes' units, and its build checks the script's syntax.
    testers.runNixOSTest = test:
      let
        nodes = lib.mapAttrs (_: node: import ./nixos.nix { inherit lib pkgs; } { modules = [ node ]; }) test.nodes;
      in
      runCommand "vm-test-${test.name}" { inherit (test) testScript; passAsFile = [ "testScript" ]; } ''
        mkdir $out; cp "$testScriptPath" $out/script.py; python3 -m py_compile $out/script.py
        ${lib.concatMapStrings (n: "ln -s ${nodes.${n}.config.system.build.unitDir} $out/${n}\n") (lib.attrNames nodes)}
      '';
  };
in
pkgs
