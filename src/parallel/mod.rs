//! Tensor-parallel ranks: who holds which part of a weight, and the sums between them.

pub mod collective;
pub mod shard;
