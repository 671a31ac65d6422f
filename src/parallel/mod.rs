//! Tensor-parallel ranks: who this one is, and the sums between them. How a weight is cut is in `model::inventory`.

pub mod collective;
pub mod ranks;

/// One of `size` tensor-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    pub index: usize,
    pub size: usize,
}

impl Rank {
    /// The only rank.
    pub const SOLE: Self = Self { index: 0, size: 1 };
}
