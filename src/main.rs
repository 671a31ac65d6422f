//! The `kdtree` binary: arguments in, one line of error out.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use kdtree::cli::output::reader_left;
use kdtree::cli::{Cli, run};

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            if !reader_left(&error) {
                // Where standard error cannot be written either, the status has to do.
                let _ = writeln!(std::io::stderr(), "kdtree: {error:#}");
            }
            ExitCode::FAILURE
        }
    }
}
