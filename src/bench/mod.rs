//! Measuring ourselves: kernels, rounds, the server.

pub mod kernel;
pub mod kernel_inputs;
pub mod kernel_report;
pub mod round;
pub mod serve;
