//! Measuring ourselves: kernels, rounds, the server.

pub mod batches;
pub mod kernel;
pub mod kernel_inputs;
pub mod kernel_report;
pub mod load;
pub mod rank;
pub mod round;
pub mod serve;
