//! The written result of a gate: what was compared, on what, and the verdict. One file per combination, so that a roll-back finds its
//! own. A valid one for exactly this combination lets the next start skip the run.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::identity::Identity;
use super::report::Report;
use super::store;

/// Changes whenever older certificates must not count any more.
const FORMAT: u32 = 1;

/// Certificates kept; the oldest go first.
const KEPT: usize = 32;

const PREFIX: &str = "gate-";

/// A verdict, what it rests on and what exactly it is about; as written to disk and shown at `/gate`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Certificate {
    pub format: u32,
    pub verdict: Verdict,
    /// Seconds since 1970.
    pub written: u64,
    pub identity: Identity,
    pub report: Report,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Passed,
    Failed,
}

impl Certificate {
    /// The certificate of a run that has just ended.
    pub fn new(identity: Identity, report: Report) -> Self {
        let verdict = if report.passed { Verdict::Passed } else { Verdict::Failed };
        let written = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self { format: FORMAT, verdict, written, identity, report }
    }

    /// Where the certificate of this combination lies.
    pub fn path(directory: &Path, identity: &Identity) -> PathBuf {
        directory.join(format!("{PREFIX}{}.json", &identity.digest()[..16]))
    }

    /// A certificate that says "passed" about exactly this combination. Anything else there is ignored, with a log line.
    pub fn find(directory: &Path, identity: &Identity) -> Option<Self> {
        let path = Self::path(directory, identity);
        let certificate: Self = store::read_json(&path)?;
        let reason = if certificate.format != FORMAT {
            "of another version"
        } else if certificate.identity != *identity {
            "about another combination"
        } else if certificate.verdict != Verdict::Passed || !certificate.report.passed {
            "a failed gate"
        } else {
            return Some(certificate);
        };
        tracing::info!(file = %path.display(), reason, "certificate ignored");
        None
    }

    /// Writes it, whole or not at all, and removes the oldest beyond those kept.
    ///
    /// # Errors
    /// The directory cannot be written to.
    pub fn store(&self, directory: &Path) -> anyhow::Result<PathBuf> {
        let path = Self::path(directory, &self.identity);
        store::write_json(&path, self)?;
        for old in by_age(directory).into_iter().skip(KEPT) {
            // Somebody else may have removed it; one file too many does no harm.
            let _ = std::fs::remove_file(old);
        }
        Ok(path)
    }
}

/// All certificates, the newest first.
fn by_age(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let is_certificate = |name: &str| name.starts_with(PREFIX) && name.ends_with(".json");
    let mut found: Vec<(SystemTime, PathBuf)> = entries
        .filter_map(Result::ok)
        .filter(|entry| is_certificate(&entry.file_name().to_string_lossy()))
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    found.sort_unstable_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, path)| path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::identity::DeviceIdentity;
    use crate::gate::identity::Shape;

    fn identity() -> Identity {
        Identity {
            binary: "b".into(),
            device: DeviceIdentity { name: "CPU".into(), driver: "none".into(), kernels: "k".into() },
            model: "m".into(),
            drafter: Some("d".into()),
            prompts: "p".into(),
            max_tokens: 24,
            budgets: vec!["off".into(), "mixed trees".into()],
            shape: Shape { ranks: 1, max_running: 4, max_model_len: 64, kv_slots: 1024, chunk_tokens: 512 },
        }
    }

    fn passed(identity: Identity) -> Certificate {
        Certificate::new(identity, Report { passed: true, ..Report::default() })
    }

    #[test]
    fn only_a_passed_certificate_of_exactly_this_combination_counts() {
        let folder = tempfile::tempdir().unwrap();
        let found = |identity: &Identity| Certificate::find(folder.path(), identity);
        assert_eq!(found(&identity()), None);
        let certificate = passed(identity());
        let path = certificate.store(folder.path()).unwrap();
        assert_eq!(found(&identity()), Some(certificate.clone()));
        let mut others: Vec<Identity> = vec![identity(); 10];
        others[0].binary.push('x');
        others[1].device.name.push('x');
        others[2].device.driver.push('x');
        others[3].device.kernels.push('x');
        others[4].model.push('x');
        others[5].drafter = None;
        others[6].prompts.push('x');
        others[7].max_tokens = 25;
        others[8].budgets.pop();
        others[9].shape.ranks = 2;
        for other in &others {
            assert_eq!(found(other), None, "{other:?}");
        }
        // A file under the right name that speaks of something else does not count either.
        store::write_json(&path, &passed(others[0].clone())).unwrap();
        assert_eq!(found(&identity()), None);
        store::write_json(&path, &Certificate { format: 0, ..certificate.clone() }).unwrap();
        assert_eq!(found(&identity()), None);
        store::write_json(&path, &Certificate::new(identity(), Report::default())).unwrap();
        assert_eq!(found(&identity()), None);
        std::fs::write(&path, "{").unwrap();
        assert_eq!(found(&identity()), None);
    }

    #[test]
    fn the_oldest_go_when_there_are_many() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("hashes.json"), "{}").unwrap();
        for number in 0..KEPT as u32 + 3 {
            passed(Identity { max_tokens: number + 2, ..identity() }).store(folder.path()).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(12));
        }
        assert_eq!(by_age(folder.path()).len(), KEPT);
        assert!(folder.path().join("hashes.json").exists());
        assert!(Certificate::find(folder.path(), &Identity { max_tokens: 2, ..identity() }).is_none());
        assert!(Certificate::find(folder.path(), &Identity { max_tokens: KEPT as u32 + 4, ..identity() }).is_some());
    }
}
