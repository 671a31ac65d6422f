//! Dense products `out[m][n] = sum_k x[m][k] * w[n][k]` with bf16 weights and f32 arithmetic.
//!
//! Weights lie in panels of 16 output columns: `panel[k][16]`. A lane is an output column, so each output is one chain of fused
//! multiply-adds over k = 0, 1, 2 ... whatever the tile, the number of rows or the thread: the sum of a row never depends on which
//! rows stand beside it. Called by every projection of the CPU device.

use half::bf16;

use super::parallel::{SharedMut, split};
use super::simd::{Isa, Lanes, WIDTH, dispatch};

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

    pub fn panels(&self) -> usize {
        self.n.div_ceil(WIDTH)
    }

    pub fn bytes(&self) -> usize {
        self.data.len() * 2
    }

    /// The stored panels, for benches that stream the same bytes.
    pub fn raw(&self) -> &[u16] {
        &self.data
    }

    /// Panel `block` alone, into columns `column..` of the target.
    pub fn block_product(&self, isa: Isa, x: &[&[f32]], block: usize, target: Target<'_>, column: usize) {
        let panels = Panels::Bf16(&self.data[block * self.k * WIDTH..(block + 1) * self.k * WIDTH]);
        panel_product(isa, x, panels, self.k, 1, target, column, WIDTH.min(self.n - block * WIDTH));
    }
}

/// What becomes of a product.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Into {
    Overwrite,
    /// Added to what stands there.
    Add,
}

/// Weights of one or more consecutive panels, as bf16 or already widened.
#[derive(Clone, Copy)]
pub enum Panels<'a> {
    Bf16(&'a [u16]),
    F32(&'a [f32]),
}

/// Where row `m` of the result goes: `out[m * stride + column]`.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    pub out: SharedMut<'a, f32>,
    pub stride: usize,
    pub into: Into,
}

/// `x` rows of width `k` at `stride`, times the matrix, into columns `column..column + n` of `out`, over the pool.
#[allow(clippy::too_many_arguments)]
pub fn linear(isa: Isa, x: &[f32], stride: usize, rows: usize, w: &PanelMatrix, out: &mut [f32], out_stride: usize, into: Into) {
    if rows == 0 {
        return;
    }
    assert!(x.len() >= (rows - 1) * stride + w.k, "input of {} for {rows} rows of {} at {stride}", x.len(), w.k);
    let x_rows: Vec<&[f32]> = (0..rows).map(|m| &x[m * stride..m * stride + w.k]).collect();
    let target = Target { out: SharedMut::new(out), stride: out_stride, into };
    // A piece should be worth a hand-over to another thread: about 32k weights.
    let grain = (32 * 1024 / (w.k * WIDTH * rows.min(8))).max(1);
    split(w.panels(), grain, &|blocks| {
        matrix_blocks(isa, &x_rows, w, blocks.start, blocks.end, target, 0);
    });
}

/// Panels `first..last` of `w` on this thread; the matrix's column 0 lands in column `column` of the target.
pub fn matrix_blocks(isa: Isa, x: &[&[f32]], w: &PanelMatrix, first: usize, last: usize, target: Target, column: usize) {
    let mut block = first;
    while block < last {
        let wanted = if x.len() == 1 { 8 } else { 4 };
        let count = [8, 4, 2, 1].into_iter().find(|&c| c <= wanted && block + c <= last).unwrap_or(1);
        let panels = Panels::Bf16(&w.data[block * w.k * WIDTH..(block + count) * w.k * WIDTH]);
        let columns = (count * WIDTH).min(w.n - block * WIDTH);
        panel_product(isa, x, panels, w.k, count, target, column + block * WIDTH, columns);
        block += count;
    }
}

dispatch! {
    /// `count` (1, 2, 4 or 8) consecutive panels of depth `k` times all rows of `x`; `columns` of the result are written from `column` on.
    pub fn panel_product = panel_product_kernel(x: &[&[f32]], panels: Panels<'_>, k: usize, count: usize, target: Target<'_>, column: usize, columns: usize)
}

#[inline(always)]
unsafe fn panel_product_kernel<V: Lanes>(
    x: &[&[f32]],
    panels: Panels<'_>,
    k: usize,
    count: usize,
    target: Target<'_>,
    column: usize,
    columns: usize,
) {
    let len = match panels {
        Panels::Bf16(w) => w.len(),
        Panels::F32(w) => w.len(),
    };
    assert!(len >= count * k * WIDTH && columns <= count * WIDTH && x.iter().all(|row| row.len() >= k));
    // SAFETY: the panels hold `count * k * 16` weights, every row of x holds k values, and rows of the target at these columns
    // belong to this call alone.
    unsafe {
        match panels {
            Panels::Bf16(w) => by_count::<V>(x, w.as_ptr(), k, count, target, column, columns),
            // Widened panels are used one at a time.
            Panels::F32(w) => {
                for at in 0..count {
                    let left = columns.saturating_sub(at * WIDTH).min(WIDTH);
                    rows_of::<V, f32, 1>(x, w.as_ptr().add(at * k * WIDTH), k, target, column + at * WIDTH, left);
                }
            }
        }
    }
}

/// A weight as it is stored. A trait and not a closure: closures would not be compiled for the instruction set of the kernel.
trait Stored: Copy {
    /// # Safety
    /// [`WIDTH`] readable elements and the instruction set of `V`.
    unsafe fn lanes<V: Lanes>(from: *const Self) -> V;
}

impl Stored for u16 {
    #[inline(always)]
    unsafe fn lanes<V: Lanes>(from: *const Self) -> V {
        // SAFETY: as the trait.
        unsafe { V::load_bf16(from) }
    }
}

impl Stored for f32 {
    #[inline(always)]
    unsafe fn lanes<V: Lanes>(from: *const Self) -> V {
        // SAFETY: as the trait.
        unsafe { V::load(from) }
    }
}

#[inline(always)]
unsafe fn by_count<V: Lanes>(x: &[&[f32]], weights: *const u16, k: usize, count: usize, target: Target<'_>, column: usize, columns: usize) {
    // SAFETY: handed on.
    unsafe {
        let mut at = 0;
        while at < count {
            let (from, column) = (weights.add(at * k * WIDTH), column + at * WIDTH);
            let left = columns.saturating_sub(at * WIDTH);
            if x.len() == 1 && count - at >= 8 {
                tile::<V, u16, 8, 1>(x, from, k, target, 0, column, left.min(8 * WIDTH));
                at += 8;
            } else if x.len() <= 6 && count - at >= 4 {
                rows_of::<V, u16, 4>(x, from, k, target, column, left.min(4 * WIDTH));
                at += 4;
            } else if count - at >= 2 {
                rows_of::<V, u16, 2>(x, from, k, target, column, left.min(2 * WIDTH));
                at += 2;
            } else {
                rows_of::<V, u16, 1>(x, from, k, target, column, left.min(WIDTH));
                at += 1;
            }
        }
    }
}

/// All rows against `N` panels, in tiles that fill the registers. Few tile shapes on purpose: each is compiled for every instruction
/// set.
#[inline(always)]
unsafe fn rows_of<V: Lanes, S: Stored, const N: usize>(
    x: &[&[f32]],
    weights: *const S,
    k: usize,
    target: Target<'_>,
    column: usize,
    columns: usize,
) {
    let mut m = 0;
    // SAFETY: handed on.
    unsafe {
        if N == 2 {
            while x.len() - m >= 12 {
                tile::<V, S, N, 12>(x, weights, k, target, m, column, columns);
                m += 12;
            }
        }
        while x.len() - m >= 6 {
            tile::<V, S, N, 6>(x, weights, k, target, m, column, columns);
            m += 6;
        }
        while x.len() - m >= 2 {
            tile::<V, S, N, 2>(x, weights, k, target, m, column, columns);
            m += 2;
        }
        if m < x.len() {
            tile::<V, S, N, 1>(x, weights, k, target, m, column, columns);
        }
    }
}

/// `M` rows from `m` on against `N` panels.
#[inline(always)]
unsafe fn tile<V: Lanes, S: Stored, const N: usize, const M: usize>(
    x: &[&[f32]],
    weights: *const S,
    k: usize,
    target: Target<'_>,
    m: usize,
    column: usize,
    columns: usize,
) {
    // SAFETY: as `panel_product_kernel` checked.
    unsafe {
        let rows: [*const f32; M] = std::array::from_fn(|i| x[m + i].as_ptr());
        let mut sum = [[V::splat(0.0); M]; N];
        for at in 0..k {
            for (n, sum) in sum.iter_mut().enumerate() {
                let w: V = S::lanes(weights.add((n * k + at) * WIDTH));
                for (sum, row) in sum.iter_mut().zip(rows) {
                    *sum = V::splat(*row.add(at)).fma(w, *sum);
                }
            }
        }
        for (n, sum) in sum.iter().enumerate() {
            let wide = columns.saturating_sub(n * WIDTH).min(WIDTH);
            for (i, sum) in sum.iter().enumerate() {
                finish(*sum, target, m + i, column + n * WIDTH, wide);
            }
        }
    }
}

#[inline(always)]
unsafe fn finish<V: Lanes>(sum: V, target: Target<'_>, row: usize, column: usize, wide: usize) {
    if wide == 0 {
        return;
    }
    // SAFETY: this call owns these columns of the row.
    unsafe {
        let out = target.out.range(row * target.stride + column, wide);
        if wide == WIDTH {
            let sum = if target.into == Into::Add { V::load(out.as_ptr()).add(sum) } else { sum };
            sum.store(out.as_mut_ptr());
            return;
        }
        let mut lanes = [0f32; WIDTH];
        sum.store(lanes.as_mut_ptr());
        for (out, lane) in out.iter_mut().zip(lanes) {
            *out = if target.into == Into::Add { *out + lane } else { lane };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        (0..count)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 24) as f32 - 0.5
            })
            .collect()
    }

    fn product(isa: Isa, x: &[f32], rows: usize, w: &PanelMatrix) -> Vec<f32> {
        let mut out = vec![f32::NAN; rows * w.n];
        linear(isa, x, w.k, rows, w, &mut out, w.n, Into::Overwrite);
        out
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_among_others_on_every_instruction_set() {
        for (n, k) in [(16, 32), (40, 24), (200, 65), (7, 3)] {
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
    fn adding_adds_once() {
        let weights: Vec<bf16> = numbers(20 * 8, 3).into_iter().map(bf16::from_f32).collect();
        let (w, x) = (PanelMatrix::pack(&weights, 20, 8), numbers(3 * 8, 4));
        let once = product(Isa::detect(), &x, 3, &w);
        let mut twice = once.clone();
        linear(Isa::detect(), &x, 8, 3, &w, &mut twice, 20, Into::Add);
        for (once, twice) in once.iter().zip(&twice) {
            assert_eq!(once + once, *twice);
        }
    }
}
