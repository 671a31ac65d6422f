//! Dense products `out[m][n] = sum_k x[m][k] * w[n][k]` with bf16 weights and f32 arithmetic.
//!
//! Weights lie in panels of 16 output columns: `panel[k][16]`. A lane is an output column, so each output is one chain of fused
//! multiply-adds over k = 0, 1, 2 ... whatever the tile, the number of rows or the thread: the sum of a row never depends on which
//! rows stand beside it. Called by every projection of the CPU device, and by the attention of prompts, whose keys and values lie in
//! panels too. The kernels are in [`super::tiles`].

use half::bf16;

use super::parallel::{SharedMut, split};
use super::simd::{Isa, WIDTH};
use super::tiles::{GROUP, TALL, group_product, panel_product};

/// A bf16 matrix `[n, k]` in panels of 16 rows of the original.
pub struct PanelMatrix {
    pub n: usize,
    pub k: usize,
    /// `ceil(n / 16)` panels of `[k][16]`; columns beyond `n` are zero.
    data: Vec<u16>,
}

impl PanelMatrix {
    /// From row-major `[n, k]` weights.
    pub fn pack(weights: &[bf16], n: usize, k: usize) -> Self {
        assert_eq!(weights.len(), n * k);
        Self::pack_with(n, k, |row, column| weights[row * k + column])
    }

    /// From any `(row n, column k) -> weight`.
    pub fn pack_with(n: usize, k: usize, weight: impl Fn(usize, usize) -> bf16) -> Self {
        let mut data = vec![0u16; n.div_ceil(WIDTH) * k * WIDTH];
        for (block, panel) in data.chunks_exact_mut(k * WIDTH).enumerate() {
            for lane in 0..WIDTH.min(n - block * WIDTH) {
                for column in 0..k {
                    panel[column * WIDTH + lane] = weight(block * WIDTH + lane, column).to_bits();
                }
            }
        }
        Self { n, k, data }
    }

    /// Panels of `WIDTH` outputs; the last may be partly empty.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(WIDTH)
    }

    /// Memory of the weights.
    pub fn bytes(&self) -> usize {
        self.data.len() * 2
    }

    /// The stored panels.
    pub fn raw(&self) -> &[u16] {
        &self.data
    }

    /// Panel `block`.
    pub fn panel(&self, block: usize) -> Panels<'_> {
        Panels::Bf16(&self.data[block * self.k * WIDTH..(block + 1) * self.k * WIDTH])
    }
}

/// Weights of one or more consecutive panels, as bf16 or already widened.
#[derive(Clone, Copy)]
pub enum Panels<'a> {
    Bf16(&'a [u16]),
    F32(&'a [f32]),
}

impl Panels<'_> {
    /// Weights.
    pub fn len(&self) -> usize {
        match self {
            Self::Bf16(w) => w.len(),
            Self::F32(w) => w.len(),
        }
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Where the chain of multiply-adds of an output begins.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Start {
    Zero,
    /// At what stands in the output: the first part of the same chain.
    Standing,
}

/// Where the 16 columns of panel `n` of row `m` of the result go: to `out[at + m * row + n * panel ..]`.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    pub out: SharedMut<'a, f32>,
    pub at: usize,
    pub row: usize,
    pub panel: usize,
    pub start: Start,
}

impl<'a> Target<'a> {
    /// Rows of `row` values, the panels side by side.
    pub fn rows(out: SharedMut<'a, f32>, row: usize) -> Self {
        Self { out, at: 0, row, panel: WIDTH, start: Start::Zero }
    }

    /// The same from element `at` on.
    pub fn from(self, at: usize) -> Self {
        Self { at: self.at + at, ..self }
    }

    /// The same from panel `n` on.
    pub fn from_panel(self, n: usize) -> Self {
        self.from(n * self.panel)
    }

    /// Panics where it has no room for `columns` of `rows` rows.
    pub fn check(self, rows: usize, columns: usize) {
        if let (Some(row), Some(column)) = (rows.checked_sub(1), columns.checked_sub(1)) {
            let last = self.at + row * self.row + column / WIDTH * self.panel + column % WIDTH;
            assert!(last < self.out.len(), "element {last} outside {}", self.out.len());
        }
    }

    /// Panel `n` of row `m`.
    ///
    /// # Safety
    /// Checked to have room for it.
    #[inline(always)]
    pub unsafe fn pointer(self, m: usize, n: usize) -> *mut f32 {
        let at = self.at.wrapping_add(m.wrapping_mul(self.row)).wrapping_add(n.wrapping_mul(self.panel));
        // SAFETY: inside the slice, says the caller.
        unsafe { self.out.pointer(at) }
    }
}

/// `x` rows of width `k` at `stride`, times the matrix, into the rows of `out`, over the pool.
pub fn linear(isa: Isa, x: &[f32], stride: usize, rows: usize, w: &PanelMatrix, out: &mut [f32], out_stride: usize) {
    if rows == 0 {
        return;
    }
    assert!(x.len() >= (rows - 1) * stride + w.k, "input of {} for {rows} rows of {} at {stride}", x.len(), w.k);
    let x_rows: Vec<&[f32]> = (0..rows).map(|m| &x[m * stride..m * stride + w.k]).collect();
    let target = Target::rows(SharedMut::new(out), out_stride);
    // A piece should be worth a hand-over to another thread: about 32k weights.
    let grain = (32 * 1024 / (w.k * WIDTH * rows.min(8))).max(1);
    split(w.panels(), grain, &|blocks| {
        matrix_blocks(isa, &x_rows, w, blocks.start, blocks.end, target.from_panel(blocks.start));
    });
}

/// Most bytes of rows that meet all panels before the next rows do: a quarter of a core's second cache. All rows of a long chunk
/// would come from beyond it for every group of panels.
const ROW_BYTES: usize = 512 << 10;

/// Panels `first..last` of `w` on this thread, into the target from its first panel on.
pub fn matrix_blocks(isa: Isa, x: &[&[f32]], w: &PanelMatrix, first: usize, last: usize, target: Target<'_>) {
    if first == last || x.is_empty() {
        return;
    }
    let panels = Panels::Bf16(&w.data[first * w.k * WIDTH..last * w.k * WIDTH]);
    let columns = ((last - first) * WIDTH).min(w.n - first * WIDTH);
    // Of about one size, so that no block is left with a few rows.
    let blocks = (x.len() * w.k * size_of::<f32>()).div_ceil(ROW_BYTES);
    let rows = x.len().div_ceil(blocks).next_multiple_of(TALL);
    for (at, x) in x.chunks(rows).enumerate() {
        panel_product(isa, x, panels, w.k, last - first, target.from(at * rows * target.row), columns);
    }
}

/// `count` panels of depth `k` that need not be neighbours, `panel(0)`, `panel(1)` and so on.
pub fn scattered_product<'a>(isa: Isa, x: &[&[f32]], count: usize, panel: &dyn Fn(usize) -> Panels<'a>, k: usize, target: Target<'_>) {
    let groups = count - count % GROUP;
    for first in (0..groups).step_by(GROUP) {
        group_product(isa, x, std::array::from_fn(|n| panel(first + n)), k, target.from_panel(first));
    }
    for at in groups..count {
        panel_product(isa, x, panel(at), k, 1, target.from_panel(at), WIDTH);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::numbers;
    use super::*;

    fn product(isa: Isa, x: &[f32], rows: usize, w: &PanelMatrix) -> Vec<f32> {
        let mut out = vec![f32::NAN; rows * w.n];
        linear(isa, x, w.k, rows, w, &mut out, w.n);
        out
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_among_others_on_every_instruction_set() {
        for (n, k) in [(16, 32), (40, 24), (200, 65), (7, 3), (40, 391)] {
            let weights: Vec<bf16> = numbers(n * k, 1).into_iter().map(bf16::from_f32).collect();
            let w = PanelMatrix::pack(&weights, n, k);
            for rows in [1, 2, 5, 6, 7, 12, 13, 31] {
                let x = numbers(rows * k, 2);
                let all = product(Isa::detect(), &x, rows, &w);
                for m in 0..rows {
                    let alone = product(Isa::Portable, &x[m * k..(m + 1) * k], 1, &w);
                    assert_eq!(alone, all[m * n..(m + 1) * n], "row {m} of {rows}, {n}x{k}");
                }
                let want: f64 = (0..k).map(|i| f64::from(x[i]) * weights[(n - 1) * k + i].to_f64()).sum();
                assert!((f64::from(all[n - 1]) - want).abs() < 1e-5, "value {} want {want}", all[n - 1]);
            }
        }
    }

    #[test]
    fn panels_of_a_group_have_the_bits_of_panels_alone() {
        let k = 40;
        let weights: Vec<bf16> = numbers(8 * WIDTH * k, 5).into_iter().map(bf16::from_f32).collect();
        let w = PanelMatrix::pack(&weights, 8 * WIDTH, k);
        let blocks = [1, 6, 2, 5];
        let wide: Vec<Vec<f32>> =
            blocks.map(|b| w.raw()[b * k * WIDTH..][..k * WIDTH].iter().map(|&x| bf16::from_bits(x).to_f32()).collect()).into();
        for rows in [1, 2, 7, 12, 25] {
            let x = numbers(rows * k, 6);
            let x_rows: Vec<&[f32]> = x.chunks_exact(k).collect();
            let all = product(Isa::Portable, &x, rows, &w);
            for kind in 0..3 {
                let panels =
                    std::array::from_fn(|i| if kind == 0 || (kind == 1 && i == 2) { Panels::F32(&wide[i]) } else { w.panel(blocks[i]) });
                let mut out = vec![f32::NAN; rows * GROUP * WIDTH];
                let target = Target::rows(SharedMut::new(&mut out), GROUP * WIDTH);
                group_product(Isa::detect(), &x_rows, panels, k, target);
                for (row, out) in out.chunks_exact(GROUP * WIDTH).enumerate() {
                    for (out, block) in out.chunks_exact(WIDTH).zip(blocks) {
                        assert_eq!(out, &all[row * w.n + block * WIDTH..][..WIDTH], "row {row} of {rows}, panel {block}, kind {kind}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_chain_that_goes_on_from_its_first_part_has_the_bits_of_one_chain() {
        let (n, k) = (5 * WIDTH, 90);
        let weights: Vec<bf16> = numbers(n * k, 3).into_iter().map(bf16::from_f32).collect();
        let w = PanelMatrix::pack(&weights, n, k);
        for rows in [1, 3, 20] {
            let x = numbers(rows * k, 4);
            let whole = product(Isa::detect(), &x, rows, &w);
            let mut out = vec![f32::NAN; rows * n];
            let mut target = Target::rows(SharedMut::new(&mut out), n);
            for (from, until) in [(0, 40), (40, 41), (41, k)] {
                let part: Vec<&[f32]> = x.chunks_exact(k).map(|row| &row[from..until]).collect();
                let panel = |at: usize| Panels::Bf16(&w.raw()[(at * k + from) * WIDTH..(at * k + until) * WIDTH]);
                scattered_product(Isa::detect(), &part, w.panels(), &panel, until - from, target);
                target.start = Start::Standing;
            }
            assert_eq!(out, whole, "{rows} rows");
        }
    }
}
