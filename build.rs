//! Compiles `kernels/**/*.cu` into one fatbin each (sm_90a and sm_120a), which `src/device/cuda/image.rs` embeds.
//!
//! nvcc comes from the variable `KDTREE_NVCC`, else from `PATH`; without one the build has no CUDA device and says so once.
//! `KDTREE_NVCC=none` forces a build without kernels, any other value forces that compiler (its failure fails the build).
//! Nothing here looks at the machine, at git, at the clock or at absolute paths: the same sources and nvcc give the same bytes.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use sha2::{Digest, Sha256};

/// Targets of every kernel: what it is measured on, and what it is for.
const ARCHS: [&str; 2] = ["90a", "120a"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rerun-if-env-changed=KDTREE_NVCC");
    println!("cargo::rerun-if-env-changed=PATH");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let generated = match find_nvcc() {
        Some(nvcc) => match build(&nvcc, &out) {
            Ok(text) => text,
            Err(error) => {
                println!("cargo::error={error}");
                return;
            }
        },
        None => {
            if env::var("KDTREE_NVCC").as_deref() != Ok("none") {
                println!(
                    "cargo::warning=no nvcc found (KDTREE_NVCC, PATH): building without CUDA kernels; scripts/install-nvcc.sh installs one, KDTREE_NVCC=none silences this"
                );
            }
            source("", "", &[])
        }
    };
    write_if_changed(&out.join("kernels.rs"), generated.as_bytes());
}

/// `Some` compiler, or `None` for a build without kernels.
fn find_nvcc() -> Option<PathBuf> {
    match env::var_os("KDTREE_NVCC") {
        Some(v) if v == "none" => None,
        Some(v) if !v.is_empty() => Some(PathBuf::from(v)),
        _ => env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join("nvcc")).find(|file| file.is_file()),
    }
}

/// One `.cu` file: its name in the binary, its fatbin, and whether it belongs to the verify kernels that evidence speaks of.
struct Unit {
    name: String,
    source: PathBuf,
    measured: bool,
}

fn build(nvcc: &Path, out: &Path) -> Result<String, String> {
    let version = version(nvcc)?;
    let mut units = Vec::new();
    collect(Path::new("kernels"), &mut units).map_err(|e| format!("kernels/: {e}"))?;
    units.sort_by(|a, b| a.name.cmp(&b.name));
    let jobs: Vec<(usize, &str)> = (0..units.len()).flat_map(|i| ARCHS.map(|arch| (i, arch))).collect();
    let workers = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1usize).clamp(1, 8);
    let next = std::sync::atomic::AtomicUsize::new(0);
    let failures: Vec<String> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..workers)
            .map(|_| {
                scope.spawn(|| {
                    let mut failures = Vec::new();
                    while let Some(&(unit, arch)) = jobs.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                        failures.extend(compile(nvcc, &version, out, &units[unit], arch).err());
                    }
                    failures
                })
            })
            .collect();
        handles.into_iter().flat_map(|h| h.join().unwrap_or_else(|_| vec!["a compile thread died".into()])).collect()
    });
    if let Some(first) = failures.into_iter().next() {
        return Err(first);
    }
    let mut machine_code = Sha256::new();
    for unit in &units {
        join(nvcc, out, unit)?;
        if unit.measured {
            let path = cubin(out, unit, ARCHS[0]);
            let bytes = fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
            for (name, code) in text_sections(&bytes).ok_or_else(|| format!("{}: not a cubin", path.display()))? {
                machine_code.update(name.as_bytes());
                machine_code.update((code.len() as u64).to_le_bytes());
                machine_code.update(code);
            }
        }
    }
    println!("cargo::rustc-env=KDTREE_KERNEL_BUILD={}", out.display());
    Ok(source(&version, &hex(&machine_code.finalize()), &units))
}

/// `13.0.88` from the last line but one of `nvcc --version`.
fn version(nvcc: &Path) -> Result<String, String> {
    let output = Command::new(nvcc)
        .arg("--version")
        .output()
        .map_err(|e| format!("{}: {e}; set KDTREE_NVCC to a working nvcc, or to none", nvcc.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let found = text.split_whitespace().find_map(|word| word.strip_prefix('V').filter(|v| v.starts_with(|c: char| c.is_ascii_digit())));
    found.map(str::to_owned).ok_or_else(|| format!("{} --version names no version: {text}", nvcc.display()))
}

fn collect(dir: &Path, units: &mut Vec<Unit>) -> std::io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, units)?;
        } else if path.extension().is_some_and(|e| e == "cu") {
            let name = path.with_extension("").components().skip(1).map(|c| c.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("_");
            units.push(Unit { measured: name.starts_with("verify_"), name, source: path });
        }
    }
    Ok(())
}

fn cubin(out: &Path, unit: &Unit, arch: &str) -> PathBuf {
    out.join(format!("{}.sm_{arch}.cubin", unit.name))
}

/// Compiles one file for one target; the resource report of ptxas is kept beside the cubin for the machine-code test.
fn compile(nvcc: &Path, version: &str, out: &Path, unit: &Unit, arch: &str) -> Result<(), String> {
    let target = cubin(out, unit, arch);
    let key = key(nvcc, version, unit, arch).map_err(|e| format!("{}: {e}", unit.source.display()))?;
    let key_file = target.with_extension("key");
    if target.is_file() && fs::read_to_string(&key_file).is_ok_and(|old| old == key) {
        return Ok(());
    }
    let output = Command::new(nvcc)
        .args(["-O3", "-std=c++17", "-Werror", "all-warnings", "-Xptxas", "-v", "-cubin"])
        .arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"))
        .arg("-o")
        .arg(&target)
        .arg(&unit.source)
        .output()
        .map_err(|e| format!("{}: {e}", nvcc.display()))?;
    let report = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("{} failed on {} for sm_{arch}: {}", nvcc.display(), unit.source.display(), report.replace('\n', " | ")));
    }
    write_if_changed(&target.with_extension("txt"), report.as_bytes());
    write_if_changed(&key_file, key.as_bytes());
    Ok(())
}

/// Hash of everything a cubin depends on: the compiler, its flags (this file), the source and the headers it may see, so that a change
/// of one kernel does not compile the others again.
fn key(nvcc: &Path, version: &str, unit: &Unit, arch: &str) -> std::io::Result<String> {
    let mut files = vec![PathBuf::from("build.rs"), unit.source.clone()];
    for folder in folders_of(&unit.source)? {
        files.extend(headers_in(&folder)?);
    }
    files.sort();
    let mut hasher = Sha256::new();
    hasher.update(format!("{arch}\0{}\0{version}\0", nvcc.display()));
    for file in files {
        let bytes = fs::read(&file)?;
        hasher.update(format!("{}\0{}\0", file.display(), bytes.len()));
        hasher.update(bytes);
    }
    Ok(hex(&hasher.finalize()))
}

/// The folder of a source and those that its text or a header there reaches by `../NAME/`, and so on.
fn folders_of(source: &Path) -> std::io::Result<Vec<PathBuf>> {
    let own = source.parent().unwrap_or(Path::new("kernels")).to_owned();
    let mut folders = vec![own];
    let mut next = 0;
    while let Some(folder) = folders.get(next).cloned() {
        next += 1;
        let mut texts: Vec<String> = headers_in(&folder)?.iter().map(fs::read_to_string).collect::<std::io::Result<_>>()?;
        texts.extend(if next == 1 { Some(fs::read_to_string(source)?) } else { None });
        for included in texts.iter().flat_map(|text| text.split("#include \"../").skip(1)).filter_map(|rest| rest.split('/').next()) {
            let reached = Path::new("kernels").join(included);
            if !folders.contains(&reached) {
                folders.push(reached);
            }
        }
    }
    Ok(folders)
}

fn headers_in(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<Vec<_>>>()?;
    Ok(entries.into_iter().filter(|path| path.extension().is_some_and(|e| e == "cuh" || e == "h")).collect())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut s, b| {
        let _ = write!(s, "{b:02x}");
        s
    })
}

/// Joins the cubins of one file into a fatbin with `fatbinary`, which every toolkit has beside nvcc.
fn join(nvcc: &Path, out: &Path, unit: &Unit) -> Result<(), String> {
    let beside = nvcc.canonicalize().ok().and_then(|p| p.parent().map(|dir| dir.join("fatbinary"))).filter(|p| p.is_file());
    let tool = beside.unwrap_or_else(|| PathBuf::from("fatbinary"));
    let mut command = Command::new(&tool);
    command.current_dir(out).args(["-64", "--compress-all"]).arg(format!("--create={}.fatbin", unit.name));
    for arch in ARCHS {
        command.arg(format!("--image3=kind=elf,sm={arch},file={}.sm_{arch}.cubin", unit.name));
    }
    let output = command.output().map_err(|e| format!("{}: {e}; it belongs to the CUDA toolkit", tool.display()))?;
    if !output.status.success() {
        return Err(format!(
            "{} failed on {}: {}",
            tool.display(),
            unit.name,
            String::from_utf8_lossy(&output.stderr).replace('\n', " | ")
        ));
    }
    Ok(())
}

/// Names and bytes of the `.text.*` sections of a cubin (64-bit ELF), sorted by name: the machine code without paths, notes
/// or compiler options.
fn text_sections(elf: &[u8]) -> Option<Vec<(String, &[u8])>> {
    let u16_at = |at: usize| Some(u16::from_le_bytes(elf.get(at..at + 2)?.try_into().ok()?) as usize);
    let u32_at = |at: usize| Some(u32::from_le_bytes(elf.get(at..at + 4)?.try_into().ok()?) as usize);
    let u64_at = |at: usize| usize::try_from(u64::from_le_bytes(elf.get(at..at + 8)?.try_into().ok()?)).ok();
    if elf.get(..5)? != b"\x7fELF\x02" {
        return None;
    }
    let (table, size, count, names) = (u64_at(0x28)?, u16_at(0x3a)?, u16_at(0x3c)?, u16_at(0x3e)?);
    let section = |i: usize| Some((u32_at(table + i * size)?, u64_at(table + i * size + 0x18)?, u64_at(table + i * size + 0x20)?));
    let (_, names_at, _) = section(names)?;
    let mut found = Vec::new();
    for i in 0..count {
        let (name, at, len) = section(i)?;
        let name = elf.get(names_at + name..)?.split(|&b| b == 0).next()?;
        if name.starts_with(b".text.") {
            found.push((String::from_utf8_lossy(name).into_owned(), elf.get(at..at + len)?));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Some(found)
}

/// The generated module: version of the compiler, hash of the measured machine code, and the fatbins.
fn source(version: &str, hash: &str, units: &[Unit]) -> String {
    let mut text = format!(
        "/// nvcc that built the kernels, empty in a build without them.\npub const NVCC_VERSION: &str = {version:?};\n\
         /// SHA-256 over the sm_90a machine code of the verify kernels.\npub const KERNEL_SHA256: &str = {hash:?};\n\
         /// Name and fatbin of every kernel file.\npub static FATBINS: &[(&str, &[u8])] = &[\n"
    );
    for unit in units {
        let _ = writeln!(text, "    ({:?}, include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{}.fatbin\"))),", unit.name, unit.name);
    }
    text.push_str("];\n");
    text
}

/// Keeps the time of an unchanged file, so that nothing is rebuilt for it.
fn write_if_changed(path: &Path, bytes: &[u8]) {
    if fs::read(path).is_ok_and(|old| old == bytes) {
        return;
    }
    if let Err(e) = fs::write(path, bytes) {
        println!("cargo::error={}: {e}", path.display());
    }
}
