//! SHA-256 of files. Weights of hundreds of gigabytes are hashed once: a file whose path, size, times, inode and device are what they
//! were then keeps its hash, which is remembered in `hashes.json` beside the certificates.

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, ensure};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::store;
use crate::model::source::open_regular;

const FILE: &str = "hashes.json";

/// Smaller files are always read: they cost nothing, and a forgotten change in a configuration would be worst.
const ALWAYS_READ: u64 = 1 << 20;

/// Remembered hashes by path.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Hashes(BTreeMap<String, Known>);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    stamp: Stamp,
    sha256: String,
}

/// What changes when a file's content does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    size: u64,
    modified_ns: i128,
    changed_ns: i128,
    inode: u64,
    device: u64,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        let ns = |seconds: i64, nanos: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanos);
        Self {
            size: metadata.size(),
            modified_ns: ns(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: ns(metadata.ctime(), metadata.ctime_nsec()),
            inode: metadata.ino(),
            device: metadata.dev(),
        }
    }
}

impl Hashes {
    /// What was remembered; nothing when the file is absent or unreadable.
    pub fn load(directory: Option<&Path>) -> Self {
        directory.and_then(|directory| store::read_json(&directory.join(FILE))).unwrap_or_default()
    }

    /// Keeps what is known for the next start.
    pub fn save(&self, directory: &Path) -> anyhow::Result<()> {
        store::write_json(&directory.join(FILE), self)
    }

    /// Hashes of these files, in order; large unknown ones are read in parallel. `done` counts bytes.
    ///
    /// # Errors
    /// A file cannot be read, or changes while it is.
    pub fn files(&mut self, files: &[impl AsRef<Path> + Sync], done: &AtomicU64) -> anyhow::Result<Vec<String>> {
        let hashed: anyhow::Result<Vec<(String, Known)>> = files.par_iter().map(|file| self.file(file.as_ref(), done)).collect();
        let hashed = hashed?;
        let result = hashed.iter().map(|(_, known)| known.sha256.clone()).collect();
        self.0.extend(hashed.into_iter().filter(|(_, known)| known.stamp.size >= ALWAYS_READ));
        Ok(result)
    }

    fn file(&self, path: &Path, done: &AtomicU64) -> anyhow::Result<(String, Known)> {
        let context = || format!("hashing {}", path.display());
        // Models in a store are reached by links: the real path says which file it is.
        let name = path.canonicalize().with_context(context)?.display().to_string();
        let file =
            open_regular(path).with_context(context)?.map_err(|other| anyhow::anyhow!("{}: found {other}, wanted a file", context()))?;
        let stamp = Stamp::of(&file.metadata().with_context(context)?);
        if let Some(known) = self.0.get(&name).filter(|known| known.stamp == stamp) {
            done.fetch_add(stamp.size, Ordering::Relaxed);
            return Ok((name, known.clone()));
        }
        let sha256 = read_all(&file, done).with_context(context)?;
        let after = Stamp::of(&file.metadata().with_context(context)?);
        ensure!(after == stamp, "{}: the file changed while it was read", context());
        Ok((name, Known { stamp, sha256 }))
    }
}

fn read_all(mut file: &File, done: &AtomicU64) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..read]);
        done.fetch_add(read as u64, Ordering::Relaxed);
    }
}

/// SHA-256 of bytes in memory.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(hashes: &mut Hashes, file: &Path) -> String {
        hashes.files(&[file], &AtomicU64::new(0)).unwrap().remove(0)
    }

    #[test]
    fn a_hash_is_remembered_until_the_file_changes() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.safetensors");
        std::fs::write(&file, vec![7; 2 << 20]).unwrap();
        let mut hashes = Hashes::default();
        let right = hash(&mut hashes, &file);
        assert_eq!(right, sha256(&vec![7; 2 << 20]));
        hashes.save(folder.path()).unwrap();
        let mut hashes = Hashes::load(Some(folder.path()));
        // A false memory shows that the file is not read again ...
        hashes.0.values_mut().for_each(|known| known.sha256 = "remembered".into());
        assert_eq!(hash(&mut hashes, &file), "remembered");
        // ... until it is another one, even with the size it had.
        std::fs::write(folder.path().join("new"), vec![8; 2 << 20]).unwrap();
        std::fs::rename(folder.path().join("new"), &file).unwrap();
        assert_eq!(hash(&mut hashes, &file), sha256(&vec![8; 2 << 20]));
    }

    #[test]
    fn small_files_are_always_read_and_a_missing_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.json");
        std::fs::write(&file, "{}").unwrap();
        let mut hashes = Hashes::default();
        assert_eq!(hash(&mut hashes, &file), sha256(b"{}"));
        assert!(hashes.0.is_empty());
        let missing = folder.path().join("absent");
        let error = hashes.files(&[&missing], &AtomicU64::new(0)).unwrap_err();
        assert!(format!("{error:#}").contains("absent"));
    }
}
