//! The `kdtree` binary: arguments in, one line of error out.

use std::process::ExitCode;

use clap::Parser;
use kdtree::cli::{Cli, run};

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("kdtree: {error:#}");
            ExitCode::FAILURE
        }
    }
}
