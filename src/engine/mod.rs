//! The engine thread: owns the device, advances every running request round by round.

mod active;
pub mod context;
pub mod contract;
pub mod driver;
pub mod executor;
pub mod handle;
mod loading;
pub mod options;
pub mod scheduler;
pub mod start;
mod text;
