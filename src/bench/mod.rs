//! Measuring ourselves: kernels, rounds, the server.

pub mod serve;
