//! API keys: read from a file, compared in constant time, read again on SIGHUP.

use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

use anyhow::{Context, bail};
use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// The keys in force. Only their SHA-256 is kept: equal lengths make the comparison independent of the keys.
pub struct Keys {
    file: Option<PathBuf>,
    digests: RwLock<Vec<[u8; 32]>>,
}

impl Keys {
    /// Reads the file; without one every request is let in.
    pub fn load(file: Option<&Path>) -> anyhow::Result<Self> {
        let digests = file.map(read).transpose()?.unwrap_or_default();
        Ok(Self { file: file.map(Path::to_path_buf), digests: RwLock::new(digests) })
    }

    /// Whether a key is asked for.
    pub fn required(&self) -> bool {
        self.file.is_some()
    }

    /// Reads the file again. On an error the old keys stay in force. Returns how many keys there are.
    pub fn reload(&self) -> anyhow::Result<usize> {
        let Some(file) = &self.file else { return Ok(0) };
        let fresh = read(file)?;
        let count = fresh.len();
        *self.digests.write().unwrap_or_else(PoisonError::into_inner) = fresh;
        Ok(count)
    }

    /// `Authorization: Bearer KEY`, or `api-key` / `x-api-key` as some clients send it.
    pub fn admits(&self, headers: &HeaderMap) -> bool {
        if !self.required() {
            return true;
        }
        let Some(key) = presented(headers) else { return false };
        let digest: [u8; 32] = Sha256::digest(key).into();
        let digests = self.digests.read().unwrap_or_else(PoisonError::into_inner);
        // Every key is compared, so that the time does not tell which one came close.
        let found = digests.iter().fold(0u8, |found, known| found | known.ct_eq(&digest).unwrap_u8());
        found == 1
    }
}

fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(value) = headers.get(AUTHORIZATION) {
        let (scheme, key) = value.as_bytes().split_at_checked(7)?;
        return scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii());
    }
    let value = headers.get("x-api-key").or_else(|| headers.get("api-key"))?;
    Some(value.as_bytes())
}

fn read(file: &Path) -> anyhow::Result<Vec<[u8; 32]>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("API key file {}", file.display()))?;
    let keys: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    if keys.is_empty() {
        bail!("API key file {}: found no key, wanted one a line (without keys nobody could be let in)", file.display());
    }
    Ok(keys.iter().map(|key| Sha256::digest(key).into()).collect())
}

#[cfg(test)]
mod tests {
    use hyper::header::{HeaderName, HeaderValue};

    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())])
    }

    fn keys(text: &str) -> (tempfile::TempDir, Keys) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        std::fs::write(&file, text).unwrap();
        let keys = Keys::load(Some(&file)).unwrap();
        (folder, keys)
    }

    #[test]
    fn only_a_listed_key_is_let_in() {
        let (_folder, keys) = keys("# first\nalpha\n\n beta \n");
        for value in ["Bearer alpha", "bearer beta", "BEARER  alpha"] {
            assert!(keys.admits(&headers("authorization", value)), "{value}");
        }
        for value in ["Bearer alph", "Bearer alphab", "Bearer ", "Bearer", "alpha", "Basic alpha", "Bearer # first"] {
            assert!(!keys.admits(&headers("authorization", value)), "{value}");
        }
        assert!(keys.admits(&headers("x-api-key", "alpha")));
        assert!(!keys.admits(&HeaderMap::new()));
    }

    #[test]
    fn a_reload_changes_the_keys_and_a_failed_one_keeps_them() {
        let (folder, keys) = keys("old\n");
        std::fs::write(folder.path().join("keys"), "new\n").unwrap();
        assert_eq!(keys.reload().unwrap(), 1);
        assert!(keys.admits(&headers("authorization", "Bearer new")));
        assert!(!keys.admits(&headers("authorization", "Bearer old")));
        std::fs::write(folder.path().join("keys"), "\n").unwrap();
        assert!(keys.reload().unwrap_err().to_string().contains("no key"));
        assert!(keys.admits(&headers("authorization", "Bearer new")));
    }

    #[test]
    fn without_a_file_everybody_is_let_in() {
        assert!(Keys::load(None).unwrap().admits(&HeaderMap::new()));
    }
}
