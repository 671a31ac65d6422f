//! How one rank's part is cut: equal ranges, one per rank.

use std::ops::Range;

/// One of `size` tensor-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    pub index: usize,
    pub size: usize,
}

impl Rank {
    /// The only rank.
    pub const SOLE: Self = Self { index: 0, size: 1 };

    /// This rank's part of `0..total`. `what` names the dimension in the error.
    pub fn cut(&self, total: usize, what: &str) -> Result<Range<usize>, String> {
        if !total.is_multiple_of(self.size) {
            return Err(format!("{what} of {total} cannot be cut for {} ranks", self.size));
        }
        let part = total / self.size;
        Ok(self.index * part..(self.index + 1) * part)
    }
}
