//! What exactly a certificate speaks of. Two runs with equal identities give the same verdict, so the second one can be skipped.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::hashes::{Hashes, hex, sha256};
use super::prompts::PromptSet;
use super::run::Rows;
use crate::device::identity::DeviceIdentity;
use crate::engine::contract::ModelInfo;
use crate::engine::driver::Driver;
use crate::engine::options::EngineOptions;
use crate::model::source::ModelSource;

/// How often the engine gives a sign of life while files are hashed.
const BEAT: Duration = Duration::from_millis(50);

/// Endings of the files that make a model what it is.
const MODEL_FILES: [&str; 4] = [".json", ".safetensors", ".model", ".jinja"];

/// The combination that a certificate is valid for: any field that differs makes the gate run again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// SHA-256 of the running program.
    pub binary: String,
    pub device: DeviceIdentity,
    /// SHA-256 over names and hashes of the model's files.
    pub model: String,
    pub drafter: Option<String>,
    /// SHA-256 over the prompts' token ids.
    pub prompts: String,
    pub max_tokens: u32,
    /// What the passes verified per request.
    pub budgets: Vec<String>,
    pub shape: Shape,
}

/// Options that decide which buffers and launches the kernels see.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    pub ranks: usize,
    pub max_running: usize,
    pub max_model_len: usize,
    pub kv_slots: usize,
    pub chunk_tokens: usize,
}

impl Shape {
    /// The sizes that decide which buffers and graphs an engine has.
    pub fn of(options: &EngineOptions, info: &ModelInfo) -> Self {
        Self {
            ranks: options.ranks,
            max_running: info.max_running,
            max_model_len: info.max_model_len,
            kv_slots: info.kv_slots,
            chunk_tokens: options.chunk_tokens,
        }
    }
}

impl Identity {
    /// Names a certificate.
    pub fn digest(&self) -> String {
        sha256(serde_json::to_string(self).expect("an identity is plain data").as_bytes())
    }
}

/// What `identify` hashes, and what it adds to.
pub struct Subject<'a> {
    pub options: &'a EngineOptions,
    pub set: &'a PromptSet,
    pub rows: &'a [Rows],
    pub directory: Option<&'a Path>,
}

/// Finds the identity. Hashing takes minutes for a large model that is new here; the engine gives signs of life meanwhile.
///
/// # Errors
/// The binary or a file of the model cannot be read.
pub fn identify(driver: &mut dyn Driver, subject: &Subject<'_>) -> anyhow::Result<Identity> {
    let (done, engine) = (AtomicU64::new(0), std::thread::current());
    let total = size_of(&subject.options.target()) + subject.options.draft_source().map_or(0, |source| size_of(&source));
    let hashed = std::thread::scope(|scope| {
        let work = scope.spawn(|| {
            let hashed = hash(subject, &done);
            engine.unpark();
            hashed
        });
        while !work.is_finished() {
            driver.beat();
            let percent = (done.load(Ordering::Relaxed) * 100).checked_div(total).unwrap_or(100).min(100);
            driver.say(format!("hashing the model: {percent} %"));
            std::thread::park_timeout(BEAT);
        }
        work.join().unwrap_or_else(|_| Err(anyhow::anyhow!("hashing the model panicked")))
    });
    let (binary, model, drafter) = hashed?;
    Ok(Identity {
        binary,
        device: driver.device(),
        model,
        drafter,
        prompts: subject.set.sha256(),
        max_tokens: subject.set.max_tokens,
        budgets: subject.rows.iter().map(Rows::to_string).collect(),
        shape: Shape::of(subject.options, driver.info()),
    })
}

fn hash(subject: &Subject<'_>, done: &AtomicU64) -> anyhow::Result<(String, String, Option<String>)> {
    let mut hashes = Hashes::load(subject.directory);
    let program = std::env::current_exe().context("finding the running program")?;
    // The program's own link, so that a binary replaced under a running process is not mistaken for it.
    let link = Path::new("/proc/self/exe");
    let binary = if link.exists() { hash_link(link)? } else { hashes.files(&[program], &AtomicU64::new(0))?.remove(0) };
    let model = model_hash(&subject.options.target(), &mut hashes, done)?;
    let drafter = subject.options.draft_source().map(|source| model_hash(&source, &mut hashes, done)).transpose()?;
    if let Some(directory) = subject.directory
        && let Err(error) = hashes.save(directory)
    {
        tracing::warn!(error = format!("{error:#}"), "hashes not kept; the next start reads the model again");
    }
    Ok((binary, model, drafter))
}

fn hash_link(link: &Path) -> anyhow::Result<String> {
    let mut hasher = Sha256::new();
    let mut file = std::fs::File::open(link).context("reading the running program")?;
    std::io::copy(&mut file, &mut hasher).context("reading the running program")?;
    Ok(hex(&hasher.finalize()))
}

/// Names of a model's files, sorted.
fn names(source: &ModelSource) -> anyhow::Result<Vec<String>> {
    let mut names = source.file_names().map_err(|problem| anyhow::anyhow!("{problem}"))?;
    names.retain(|name| MODEL_FILES.iter().any(|ending| name.ends_with(ending)));
    Ok(names)
}

/// Bytes that will be hashed, as far as can be told.
fn size_of(source: &ModelSource) -> u64 {
    let ModelSource::Directory(directory) = source else { return 0 };
    let size = |name: &String| std::fs::metadata(directory.join(name)).map_or(0, |metadata| metadata.len());
    names(source).map_or(0, |names| names.iter().map(size).sum())
}

/// One hash over all files: name and content of each.
fn model_hash(source: &ModelSource, hashes: &mut Hashes, done: &AtomicU64) -> anyhow::Result<String> {
    let names = names(source)?;
    let hashed: Vec<String> = match source {
        ModelSource::Directory(directory) => {
            let files: Vec<PathBuf> = names.iter().map(|name| directory.join(name)).collect();
            hashes.files(&files, done)?
        }
        // Part of the binary, whose hash covers it; hashed by itself so that the same model in another binary is known as such.
        ModelSource::EmbeddedTarget | ModelSource::EmbeddedDrafter => {
            let bytes = |name: &String| source.bytes(name).map_err(|problem| anyhow::anyhow!("{problem}"));
            names.iter().map(|name| Ok(bytes(name)?.map_or_else(String::new, |bytes| sha256(&bytes)))).collect::<anyhow::Result<_>>()?
        }
    };
    let mut hasher = Sha256::new();
    for (name, hash) in names.iter().zip(hashed) {
        hasher.update(format!("{name}\0{hash}\n"));
    }
    Ok(hex(&hasher.finalize()))
}
