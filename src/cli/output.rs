//! What commands print on standard output and write into files. Printing may fail (a full disk, a reader that left) and is an error like
//! any other, not a panic.

use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::Context;

/// Prints `text` as it is.
///
/// # Errors
/// Standard output cannot be written.
pub fn print(text: impl std::fmt::Display) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    write!(out, "{text}").and_then(|()| out.flush()).context("writing to standard output")
}

/// Prints a line beside which the exit status says the same: where nobody can read it, nothing is lost.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Writes a whole file.
///
/// # Errors
/// The file cannot be written; the message names it.
pub fn write(file: &Path, text: impl AsRef<[u8]>) -> anyhow::Result<()> {
    std::fs::write(file, text).with_context(|| format!("writing {}", file.display()))
}

/// Whether a command failed because the reader of its output had seen enough (`kdtree config | head -1`): nothing to complain about.
pub fn reader_left(error: &anyhow::Error) -> bool {
    error.root_cause().downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_an_error_that_names_the_file_and_only_a_closed_pipe_is_silent() {
        let full = write(Path::new("/dev/full"), "text").unwrap_err();
        let shown = format!("{full:#}");
        assert!(shown.contains("/dev/full") && shown.contains("No space left"), "{shown}");
        assert!(!reader_left(&full));
        let closed = anyhow::Error::from(std::io::Error::from(ErrorKind::BrokenPipe)).context("writing to standard output");
        assert!(reader_left(&closed));
    }
}
