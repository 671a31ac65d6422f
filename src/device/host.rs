//! Weights on their way from the checkpoint to a device, already cut for a rank.

use std::borrow::Cow;

use half::bf16;

use crate::model::tensor::{Int4Matrix, Matrix};

/// Matrices of equal width, one under the other.
pub fn stack(parts: &[Matrix<'_>]) -> Matrix<'static> {
    let columns = parts[0].columns;
    assert!(parts.iter().all(|part| part.columns == columns), "stacked matrices differ in width");
    let data: Vec<bf16> = parts.iter().flat_map(|part| part.data.iter().copied()).collect();
    Matrix { rows: parts.iter().map(|part| part.rows).sum(), columns, data: Cow::Owned(data) }
}

/// One routed expert.
pub struct HostExpert<'a> {
    pub gate: Int4Matrix<'a>,
    pub up: Int4Matrix<'a>,
    pub down: Int4Matrix<'a>,
}
