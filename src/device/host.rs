//! Weights on their way from the checkpoint to a device: views that can be cut for a rank before they are copied.

use std::borrow::Cow;
use std::ops::Range;

use half::bf16;

/// A bf16 matrix `[n, k]`, row-major.
#[derive(Clone, Debug)]
pub struct HostMatrix<'a> {
    pub data: Cow<'a, [bf16]>,
    pub n: usize,
    pub k: usize,
}

impl<'a> HostMatrix<'a> {
    pub fn new(data: impl Into<Cow<'a, [bf16]>>, n: usize, k: usize) -> Self {
        let data = data.into();
        assert_eq!(data.len(), n * k, "matrix of {n} x {k}");
        Self { data, n, k }
    }

    /// Rows `range` (a cut by output features, heads or vocabulary).
    pub fn rows(self, range: Range<usize>) -> Self {
        let (n, k) = (range.len(), self.k);
        let cut = range.start * k..range.end * k;
        let data = match self.data {
            Cow::Borrowed(data) => Cow::Borrowed(&data[cut]),
            Cow::Owned(data) => Cow::Owned(data[cut].to_vec()),
        };
        Self { data, n, k }
    }

    /// Columns `range` (a cut by input features).
    pub fn columns(self, range: Range<usize>) -> Self {
        if range == (0..self.k) {
            return self;
        }
        let (n, k) = (self.n, range.len());
        let data: Vec<bf16> = self.data.chunks_exact(self.k).flat_map(|row| &row[range.clone()]).copied().collect();
        Self { data: data.into(), n, k }
    }

    /// Matrices of equal width, one under the other.
    pub fn stack(parts: &[HostMatrix<'_>]) -> HostMatrix<'static> {
        let k = parts[0].k;
        assert!(parts.iter().all(|part| part.k == k), "stacked matrices differ in width");
        let data: Vec<bf16> = parts.iter().flat_map(|part| part.data.iter().copied()).collect();
        HostMatrix { n: parts.iter().map(|part| part.n).sum(), k, data: data.into() }
    }
}

/// An INT4 matrix `[n, k]` as the checkpoint stores it: two values a byte, low nibble first, value = nibble - 8; one bf16 scale
/// per row and group of `group` columns; weight = bf16(value * scale).
#[derive(Clone, Debug)]
pub struct HostInt4<'a> {
    /// `[n, k / 2]` bytes.
    pub packed: Cow<'a, [u8]>,
    /// `[n, k / group]`.
    pub scales: Cow<'a, [bf16]>,
    pub n: usize,
    pub k: usize,
    pub group: usize,
}

impl HostInt4<'_> {
    pub fn rows(self, range: Range<usize>) -> HostInt4<'static> {
        let (bytes, scales) = (self.k / 2, self.k / self.group);
        HostInt4 {
            packed: self.packed[range.start * bytes..range.end * bytes].to_vec().into(),
            scales: self.scales[range.start * scales..range.end * scales].to_vec().into(),
            n: range.len(),
            k: self.k,
            group: self.group,
        }
    }

    /// Columns `range`, which must lie on group borders: scales are cut with the weights.
    pub fn columns(self, range: Range<usize>) -> HostInt4<'static> {
        assert!(range.start % self.group == 0 && range.end % self.group == 0, "cut {range:?} is not on borders of {}", self.group);
        let cut_bytes = range.start / 2..range.end / 2;
        let cut_scales = range.start / self.group..range.end / self.group;
        HostInt4 {
            packed: self.packed.chunks_exact(self.k / 2).flat_map(|row| &row[cut_bytes.clone()]).copied().collect(),
            scales: self.scales.chunks_exact(self.k / self.group).flat_map(|row| &row[cut_scales.clone()]).copied().collect(),
            n: self.n,
            k: range.len(),
            group: self.group,
        }
    }

    /// Value of one weight, in f32 after rounding to bf16.
    pub fn weight(&self, row: usize, column: usize) -> f32 {
        let at = row * self.k + column;
        let nibble = (self.packed[at / 2] >> (4 * (at % 2))) & 15;
        let scale = self.scales[row * (self.k / self.group) + column / self.group];
        bf16::from_f32((f32::from(nibble) - 8.0) * scale.to_f32()).to_f32()
    }
}

/// Every routed expert of one layer, already cut for a rank.
pub struct HostExperts<'a> {
    pub experts: Vec<HostExpert<'a>>,
}

pub struct HostExpert<'a> {
    pub gate: HostInt4<'a>,
    pub up: HostInt4<'a>,
    pub down: HostInt4<'a>,
}
