//! The engine thread: owns the device, advances every running request round by round.

pub mod contract;
pub mod executor;
pub mod handle;
