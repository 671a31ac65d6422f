//! kdtree: Kimi K2.6 with DFlash + DDTree speculation and a custom tree-verify MLA kernel, as one binary.
//!
//! How a token travels: `server` (HTTP) -> `engine` (one thread, owns the device) -> per round: draft, grow, verify, walk, commit.

pub mod bench;
pub mod cache;
pub mod cli;
pub mod config;
pub mod device;
pub mod engine;
pub mod faults;
pub mod gate;
pub mod model;
pub mod parallel;
pub mod server;
pub mod speculate;
