//! Where certificates live, and files that are either whole or not there.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The configured directory, else the service's state directory, else the user's; `None` where nothing names one.
pub fn directory(configured: Option<&Path>) -> Option<PathBuf> {
    choose(configured, |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
}

fn choose(configured: Option<&Path>, variable: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let absolute = |text: String| Some(PathBuf::from(text)).filter(|path| path.is_absolute());
    // systemd gives several directories separated by colons; the first is ours.
    let service = || absolute(variable("STATE_DIRECTORY")?.split(':').next()?.to_string());
    let user = || Some(absolute(variable("XDG_STATE_HOME")?)?.join("kdtree"));
    let home = || Some(absolute(variable("HOME")?)?.join(".local/state/kdtree"));
    configured.map(Path::to_path_buf).or_else(service).or_else(user).or_else(home)
}

/// Reads a file; one that is absent is `None`, one that cannot be read or understood is `None` and a log line.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return None,
        Err(error) => {
            tracing::warn!(file = %path.display(), %error, "ignored: cannot be read");
            return None;
        }
    };
    let read = serde_json::from_slice(&text);
    read.inspect_err(|error| tracing::warn!(file = %path.display(), %error, "ignored: damaged, or of another version")).ok()
}

/// Writes a file so that a reader, or a crash at any moment, finds the old one or the new one.
///
/// # Errors
/// The directory cannot be made or written to.
pub fn write_json(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    let context = || format!("writing {}", path.display());
    let directory = path.parent().with_context(context)?;
    fs::create_dir_all(directory).with_context(context)?;
    let name = path.file_name().with_context(context)?.to_string_lossy();
    let temporary = directory.join(format!(".{name}.{}", std::process::id()));
    let written = write_through(&temporary, value).and_then(|()| Ok(fs::rename(&temporary, path)?));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written.with_context(context)
}

fn write_through(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    let mut file = File::create(path)?;
    serde_json::to_writer_pretty(&mut file, value)?;
    file.write_all(b"\n")?;
    file.sync_all()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_directory_named_wins_and_relative_ones_do_not_count() {
        let all = [("STATE_DIRECTORY", "/var/lib/kdtree:/var/lib/other"), ("XDG_STATE_HOME", "/x"), ("HOME", "/h")];
        let chosen = |set: &[(&str, &str)]| choose(None, |name| Some(set.iter().find(|(known, _)| *known == name)?.1.to_string()));
        assert_eq!(choose(Some(Path::new("here")), |_| None), Some("here".into()));
        assert_eq!(chosen(&all), Some("/var/lib/kdtree".into()));
        assert_eq!(chosen(&all[1..]), Some("/x/kdtree".into()));
        assert_eq!(chosen(&all[2..]), Some("/h/.local/state/kdtree".into()));
        assert_eq!(chosen(&[("STATE_DIRECTORY", ""), ("XDG_STATE_HOME", "x"), all[2]]), Some("/h/.local/state/kdtree".into()));
        assert_eq!(chosen(&[]), None);
    }

    #[test]
    fn what_was_written_is_read_back_and_damage_is_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("deep/numbers.json");
        write_json(&file, &vec![1, 2]).unwrap();
        assert_eq!(read_json::<Vec<u32>>(&file), Some(vec![1, 2]));
        assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 1, "no temporary file is left");
        fs::write(&file, "[1, ").unwrap();
        assert_eq!(read_json::<Vec<u32>>(&file), None);
        assert_eq!(read_json::<Vec<u32>>(&folder.path().join("absent")), None);
    }
}
