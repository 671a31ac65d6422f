//! Measuring ourselves: kernels, rounds, the server.

pub mod round;
pub mod serve;
