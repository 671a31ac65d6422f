//! The commands: one file each, with its arguments and a `run`.

pub mod bench_serve;
pub mod check;
pub mod wait;
