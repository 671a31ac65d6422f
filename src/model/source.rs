//! Where a model's files come from: a directory (memory-mapped) or the binary itself. Everything that reads model files goes through here.

use std::fmt;
use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::ops::Deref;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::embedded;
use super::problem::Problem;

/// One model or drafter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    Directory(PathBuf),
    /// The target inside the binary (feature `embedded-model`).
    EmbeddedTarget,
    /// Its drafter.
    EmbeddedDrafter,
}

/// The bytes of one file.
pub enum FileBytes {
    Mapped(Mmap),
    Static(&'static [u8]),
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
        }
    }
}

impl ModelSource {
    /// A model on disk.
    pub fn directory(path: impl Into<PathBuf>) -> Self {
        Self::Directory(path.into())
    }

    /// The bytes of a file, `None` when there is no such file.
    ///
    /// # Errors
    /// The directory or file cannot be read, or `name` is not a plain file name.
    pub fn bytes(&self, name: &str) -> Result<Option<FileBytes>, Problem> {
        if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\\', '\0']) {
            return Err(Problem::new(name, "file name", format!("{name:?}"), "a plain name inside the model's directory"));
        }
        let files = match self {
            Self::Directory(directory) => return map_file(directory, name),
            Self::EmbeddedTarget => embedded::TARGET,
            Self::EmbeddedDrafter => embedded::DRAFTER,
        };
        Ok(files.iter().find(|(known, _)| *known == name).map(|(_, bytes)| FileBytes::Static(bytes)))
    }

    /// A text file, `None` when there is no such file.
    pub fn text(&self, name: &str) -> Result<Option<String>, Problem> {
        let Some(bytes) = self.bytes(name)? else { return Ok(None) };
        match std::str::from_utf8(&bytes) {
            Ok(text) => Ok(Some(text.to_string())),
            Err(error) => Err(Problem::new(name, "the file", error, "UTF-8 text")),
        }
    }

    /// A text file that must be there.
    pub fn required_text(&self, name: &str) -> Result<String, Problem> {
        self.text(name)?.ok_or_else(|| self.missing(name))
    }

    pub(super) fn missing(&self, name: &str) -> Problem {
        let found = match self {
            Self::Directory(directory) if !directory.exists() => {
                format!("no such directory {} (models are read from disk only, never downloaded)", directory.display())
            }
            Self::Directory(directory) if !directory.is_dir() => format!("{} is not a directory", directory.display()),
            Self::Directory(directory) => format!("no such file in {}", directory.display()),
            Self::EmbeddedTarget | Self::EmbeddedDrafter if embedded::TARGET.is_empty() => {
                "no model in this binary (built without the feature embedded-model)".to_string()
            }
            Self::EmbeddedTarget | Self::EmbeddedDrafter => "no such file in the embedded model".to_string(),
        };
        let wanted = match self {
            Self::Directory(_) => "a model directory with this file",
            Self::EmbeddedTarget | Self::EmbeddedDrafter => "a model directory given by --model, KDTREE_MODEL or engine.model",
        };
        Problem::new(name, "the file", found, wanted)
    }

    /// Names of all files, sorted.
    pub fn file_names(&self) -> Result<Vec<String>, Problem> {
        let mut names = match self {
            Self::Directory(directory) => {
                let listed = std::fs::read_dir(directory).and_then(|entries| {
                    entries.map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned())).collect::<io::Result<Vec<_>>>()
                });
                listed.map_err(|error| Problem::new(directory.display().to_string(), "the directory", error, "a readable directory"))?
            }
            Self::EmbeddedTarget => embedded::TARGET.iter().map(|(name, _)| name.to_string()).collect(),
            Self::EmbeddedDrafter => embedded::DRAFTER.iter().map(|(name, _)| name.to_string()).collect(),
        };
        names.sort_unstable();
        Ok(names)
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(directory) => write!(f, "{}", directory.display()),
            Self::EmbeddedTarget => f.write_str("k26-mini (embedded)"),
            Self::EmbeddedDrafter => f.write_str("k26-mini-dflash (embedded)"),
        }
    }
}

/// Opens a file for reading, or says what stands there instead. Opening a pipe in the ordinary way would wait until somebody writes to it.
///
/// # Errors
/// There is nothing of this name, or it may not be read.
pub fn open_regular(path: &Path) -> io::Result<Result<File, &'static str>> {
    let other = |kind: FileType| match kind {
        kind if kind.is_dir() => "a directory",
        kind if kind.is_fifo() => "a named pipe",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    };
    // A socket cannot be opened at all, so the name is asked first; what was opened is asked again, since the name may have moved on.
    let kind = std::fs::metadata(path)?.file_type();
    if !kind.is_file() {
        return Ok(Err(other(kind)));
    }
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let kind = file.metadata()?.file_type();
    Ok(if kind.is_file() { Ok(file) } else { Err(other(kind)) })
}

fn map_file(directory: &Path, name: &str) -> Result<Option<FileBytes>, Problem> {
    let unreadable = |error: io::Error| Problem::new(name, "the file", error, format!("a readable file in {}", directory.display()));
    let file = match open_regular(&directory.join(name)) {
        Ok(Ok(file)) => file,
        Ok(Err(other)) => return Err(Problem::new(name, "the file", other, "a regular file")),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    };
    if file.metadata().map_err(unreadable)?.len() == 0 {
        return Ok(Some(FileBytes::Static(&[])));
    }
    // SAFETY: the map is read-only and model files are not changed while a server runs on them; the operator who truncates one under a
    // running server gets a SIGBUS, as with every program that maps its weights.
    let map = unsafe { Mmap::map(&file) }.map_err(unreadable)?;
    Ok(Some(FileBytes::Mapped(map)))
}
