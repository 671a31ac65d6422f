//! The commands: one file each, with its arguments and a `run`.

pub mod bench_kernel;
pub mod bench_load;
pub mod bench_rank;
pub mod bench_round;
pub mod bench_serve;
pub mod check;
pub mod config;
pub mod doctor;
mod engine;
pub mod gate;
pub mod generate;
pub mod health;
pub mod logging;
pub mod output;
pub mod serve;
pub mod wait;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Kimi K2.6 with DFlash + DDTree speculation: server, gate, benches.
#[derive(Debug, Parser)]
#[command(name = "kdtree", version, about, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve the OpenAI API (without arguments: the embedded model on 127.0.0.1:8000)
    Serve(serve::Args),
    /// Generate text on this terminal
    Generate(generate::Args),
    /// Compare the custom verify kernel with the baseline, token for token, and write a certificate
    Gate(gate::Args),
    /// Check a checkpoint by its headers: tensors, bytes per part and rank, KV tokens that fit
    Check(check::Args),
    /// Print the effective configuration with comments, or check a file
    Config(config::Args),
    /// Wait until a server answers with a real completion
    Wait(wait::Args),
    /// Say which card and which kernels this machine would use, and why
    Doctor(doctor::Args),
    /// Ask a server for a completion; status 1 when it generates nothing (for a timer that restarts it)
    Health(health::Args),
    /// Measure: round, serve, kernel, rank, load
    #[command(subcommand)]
    Bench(Bench),
}

/// What can be measured.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Tokens per second and per round, by prompt class and budget
    Round(bench_round::Args),
    /// Time the verify kernels beside the card's read rate and mma.sync peak
    Kernel(bench_kernel::Args),
    /// Time one rank of full-size K2.6 on one card, part by part
    Rank(bench_rank::Args),
    /// Time how a rank's weights come from disk onto its device
    Load(bench_load::Args),
    /// Load an OpenAI server and report latencies
    Serve(bench_serve::Args),
}

/// Runs a command; its error is printed in one line by `main`.
pub fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Serve(args) => serve::run(args),
        Command::Generate(args) => generate::run(&args),
        Command::Gate(args) => gate::run(&args),
        Command::Check(args) => check::run(args),
        Command::Config(args) => config::run(&args),
        Command::Wait(args) => wait::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Bench(Bench::Round(args)) => bench_round::run(&args),
        Command::Doctor(args) => doctor::run(args),
        Command::Bench(Bench::Kernel(args)) => bench_kernel::run(args),
        Command::Bench(Bench::Rank(args)) => bench_rank::run(&args),
        Command::Bench(Bench::Load(args)) => bench_load::run(&args),
        Command::Health(args) => health::run(&args),
        Command::Bench(Bench::Serve(args)) => bench_serve::run(&args).map(|()| ExitCode::SUCCESS),
    }
}
