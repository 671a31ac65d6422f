//! `kdtree gate` as a child process, and copies of the model with one tensor changed.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

pub const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/k26-mini");

/// A run that has ended.
pub struct Gated {
    pub status: i32,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub log: String,
}

impl Gated {
    pub fn expect(&self, status: i32) -> &Self {
        assert_eq!(self.status, status, "{}\n{}", self.out, self.log);
        self
    }
}

pub fn gate(state: &TempDir, arguments: &[&str]) -> Gated {
    gate_with(state, arguments, None)
}

/// Runs `kdtree gate` with its certificates under `state`.
pub fn gate_with(state: &TempDir, arguments: &[&str], fault: Option<&str>) -> Gated {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kdtree"));
    command.arg("gate").args(["--device", "cpu"]).args(arguments).env("STATE_DIRECTORY", state.path().join("state"));
    command.env_remove("KDTREE_FAULT").env_remove("RUST_LOG");
    if let Some(fault) = fault {
        command.env("KDTREE_FAULT", fault);
    }
    ended(&command.output().expect("the binary starts"))
}

/// Any command, run to its end.
pub fn run(arguments: &[&str]) -> Gated {
    let output = Command::new(env!("CARGO_BIN_EXE_kdtree")).args(arguments).env_remove("KDTREE_FAULT").env_remove("RUST_LOG").output();
    ended(&output.expect("the binary starts"))
}

fn ended(output: &Output) -> Gated {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Gated { status: output.status.code().unwrap_or(-1), out: text(&output.stdout), log: text(&output.stderr) }
}

/// The certificates under `state`.
pub fn certificates(state: &TempDir) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(state.path().join("state")) else { return Vec::new() };
    let files = entries.map(|entry| entry.unwrap().path());
    files.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("gate-")).collect()
}

/// A copy of the model under `folder`.
pub fn copied_model(folder: &Path) -> String {
    let copy = folder.join("model");
    std::fs::create_dir(&copy).unwrap();
    for entry in std::fs::read_dir(MODEL).unwrap() {
        let from = entry.unwrap().path();
        std::fs::copy(&from, copy.join(from.file_name().unwrap())).unwrap();
    }
    copy.display().to_string()
}

/// Changes the bytes of one tensor; `name` is the end of its name on disk.
pub fn patch(model: &str, name: &str, change: impl FnOnce(&mut [u8])) {
    let index: Value =
        serde_json::from_str(&std::fs::read_to_string(Path::new(model).join("model.safetensors.index.json")).unwrap()).unwrap();
    let map = index["weight_map"].as_object().unwrap();
    let (full, shard) = map.iter().find(|(known, _)| known.ends_with(name)).unwrap_or_else(|| panic!("no {name}"));
    let path = Path::new(model).join(shard.as_str().unwrap());
    let mut bytes = std::fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..data]).unwrap();
    let range: Vec<usize> = header[full]["data_offsets"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap() as usize).collect();
    change(&mut bytes[data + range[0]..data + range[1]]);
    std::fs::write(&path, bytes).unwrap();
}
