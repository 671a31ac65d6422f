//! `kdtree config`: the effective configuration, or a check of a file.

use std::path::PathBuf;
use std::process::ExitCode;

use super::output::print;
use crate::config::{Config, Overrides, ServerOverrides};

/// Prints the effective configuration with comments, or checks a file.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub overrides: Overrides,
    #[command(flatten)]
    pub server: ServerOverrides,
    /// Only check this file: silent and status 0 when it is right
    #[arg(long, value_name = "FILE")]
    pub check: Option<PathBuf>,
}

/// Prints the configuration, or checks a file.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if let Some(file) = &args.check {
        Config::read(file)?.check()?;
        return Ok(ExitCode::SUCCESS);
    }
    print(args.server.over(args.overrides.load()?).commented()?)?;
    Ok(ExitCode::SUCCESS)
}
