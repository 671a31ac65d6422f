//! Dense products `out[m][n] = sum_k x[m][k] * w[n][k]` with bf16 weights and f32 arithmetic.
//!
//! Weights lie in panels of 16 output columns: `panel[k][16]`. A lane is an output column, so each output is one chain of fused
//! multiply-adds over k = 0, 1, 2 ... whatever the tile, the number of rows or the thread: the sum of a row never depends on which
//! rows stand beside it. Called by every projection of the CPU device.

use std::cell::Cell;

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

    /// Panel `block`.
    pub fn panel(&self, block: usize) -> Panels<'_> {
        Panels::Bf16(&self.data[block * self.k * WIDTH..(block + 1) * self.k * WIDTH])
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

impl Panels<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Bf16(w) => w.len(),
            Self::F32(w) => w.len(),
        }
    }
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
    if first < last {
        let panels = Panels::Bf16(&w.data[first * w.k * WIDTH..last * w.k * WIDTH]);
        let columns = ((last - first) * WIDTH).min(w.n - first * WIDTH);
        panel_product(isa, x, panels, w.k, last - first, target, column + first * WIDTH, columns);
    }
}

/// Rows from which panels are widened once for all of them instead of once per tile of rows.
const MANY: usize = 12;

/// Panels that many rows meet side by side: with 6 rows, 24 sums that fill the registers of AVX-512 beside 4 weights.
pub const GROUP: usize = 4;

thread_local! {
    /// A group of widened panels.
    static WIDE: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

dispatch! {
    /// `count` consecutive panels of depth `k` times all rows of `x`; `columns` of the result are written from `column` on.
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
    assert!(panels.len() >= count * k * WIDTH && columns <= count * WIDTH && x.iter().all(|row| row.len() >= k));
    // SAFETY: the panels hold `count * k * 16` weights, every row of x holds k values, and rows of the target at these columns
    // belong to this call alone.
    unsafe {
        match panels {
            Panels::Bf16(w) if x.len() >= MANY => {
                let mut wide = WIDE.take();
                wide.resize(wide.len().max(GROUP * k * WIDTH), 0.0);
                for at in (0..count).step_by(GROUP) {
                    let group = GROUP.min(count - at);
                    widen::<V>(w.as_ptr().add(at * k * WIDTH), group * k, &mut wide);
                    let left = columns.saturating_sub(at * WIDTH).min(group * WIDTH);
                    by_groups::<V, f32>(x, wide.as_ptr(), k, group, target, column + at * WIDTH, left);
                }
                WIDE.set(wide);
            }
            Panels::Bf16(w) => by_count::<V>(x, w.as_ptr(), k, count, target, column, columns),
            Panels::F32(w) => by_groups::<V, f32>(x, w.as_ptr(), k, count, target, column, columns),
        }
    }
}

dispatch! {
    /// [`GROUP`] panels that need not be neighbours, times all rows of `x`, side by side into the target from `column` on.
    pub fn group_product = group_product_kernel(x: &[&[f32]], panels: [Panels<'_>; GROUP], k: usize, target: Target<'_>, column: usize)
}

#[inline(always)]
unsafe fn group_product_kernel<V: Lanes>(x: &[&[f32]], panels: [Panels<'_>; GROUP], k: usize, target: Target<'_>, column: usize) {
    assert!(panels.iter().all(|panel| panel.len() >= k * WIDTH) && x.iter().all(|row| row.len() >= k));
    let columns = GROUP * WIDTH;
    // SAFETY: as in `panel_product_kernel`.
    unsafe {
        match panels {
            [Panels::F32(a), Panels::F32(b), Panels::F32(c), Panels::F32(d)] => {
                rows_of::<V, f32, GROUP>(x, [a, b, c, d].map(<[f32]>::as_ptr), k, target, column, columns);
            }
            [Panels::Bf16(a), Panels::Bf16(b), Panels::Bf16(c), Panels::Bf16(d)] if x.len() < MANY => {
                rows_of::<V, u16, GROUP>(x, [a, b, c, d].map(<[u16]>::as_ptr), k, target, column, columns);
            }
            _ => {
                let mut wide = WIDE.take();
                wide.resize(wide.len().max(GROUP * k * WIDTH), 0.0);
                for (panel, wide) in panels.iter().zip(wide.chunks_exact_mut(k * WIDTH)) {
                    match panel {
                        Panels::Bf16(w) => widen::<V>(w.as_ptr(), k, wide),
                        Panels::F32(w) => wide.copy_from_slice(&w[..k * WIDTH]),
                    }
                }
                rows_of::<V, f32, GROUP>(x, neighbours(wide.as_ptr(), k), k, target, column, columns);
                WIDE.set(wide);
            }
        }
    }
}

/// `count` rows of 16 bf16 weights as f32.
#[inline(always)]
unsafe fn widen<V: Lanes>(from: *const u16, count: usize, to: &mut [f32]) {
    assert!(to.len() >= count * WIDTH);
    for at in 0..count {
        // SAFETY: the caller's panels hold `count * 16` weights, `to` has room for them.
        unsafe { V::load_bf16(from.add(at * WIDTH)).store(to.as_mut_ptr().add(at * WIDTH)) };
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

/// Few rows of narrow weights: the fewer, the more panels side by side, so that enough sums are under way.
#[inline(always)]
unsafe fn by_count<V: Lanes>(x: &[&[f32]], weights: *const u16, k: usize, count: usize, target: Target<'_>, column: usize, columns: usize) {
    // SAFETY: handed on.
    unsafe {
        let mut at = 0;
        while x.len() == 1 && count - at >= 8 {
            let left = columns.saturating_sub(at * WIDTH).min(8 * WIDTH);
            tile::<V, u16, 8, 1>(x, neighbours(weights.add(at * k * WIDTH), k), k, target, 0, column + at * WIDTH, left);
            at += 8;
        }
        by_groups::<V, u16>(x, weights.add(at * k * WIDTH), k, count - at, target, column + at * WIDTH, columns.saturating_sub(at * WIDTH));
    }
}

/// Any number of neighbouring panels, four, two or one at a time.
#[inline(always)]
unsafe fn by_groups<V: Lanes, S: Stored>(
    x: &[&[f32]],
    weights: *const S,
    k: usize,
    count: usize,
    target: Target<'_>,
    column: usize,
    columns: usize,
) {
    // SAFETY: handed on.
    unsafe {
        let mut at = 0;
        while at < count {
            let (from, column) = (weights.add(at * k * WIDTH), column + at * WIDTH);
            let left = columns.saturating_sub(at * WIDTH);
            if count - at >= GROUP {
                rows_of::<V, S, GROUP>(x, neighbours(from, k), k, target, column, left.min(GROUP * WIDTH));
                at += GROUP;
            } else if count - at >= 2 {
                rows_of::<V, S, 2>(x, neighbours(from, k), k, target, column, left.min(2 * WIDTH));
                at += 2;
            } else {
                rows_of::<V, S, 1>(x, neighbours(from, k), k, target, column, left.min(WIDTH));
                at += 1;
            }
        }
    }
}

/// `N` panels of depth `k`, one behind the other.
#[inline(always)]
unsafe fn neighbours<S, const N: usize>(from: *const S, k: usize) -> [*const S; N] {
    // SAFETY: the caller holds `N` panels from here on.
    std::array::from_fn(|n| unsafe { from.add(n * k * WIDTH) })
}

/// All rows against `N` panels, in tiles that fill the registers. Few tile shapes on purpose: each is compiled for every instruction
/// set.
#[inline(always)]
unsafe fn rows_of<V: Lanes, S: Stored, const N: usize>(
    x: &[&[f32]],
    weights: [*const S; N],
    k: usize,
    target: Target<'_>,
    column: usize,
    columns: usize,
) {
    let mut m = 0;
    // SAFETY: handed on.
    unsafe {
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
    weights: [*const S; N],
    k: usize,
    target: Target<'_>,
    m: usize,
    column: usize,
    columns: usize,
) {
    // SAFETY: as `panel_product_kernel` checked.
    unsafe {
        let rows: [*const f32; M] = std::array::from_fn(|i| x[m + i].as_ptr());
        let mut sum = [[V::splat(0.0); N]; M];
        for at in 0..k {
            // A loop and not `from_fn`, whose closure may stay a call for the lack of the instruction set.
            let mut w = [V::splat(0.0); N];
            for (w, from) in w.iter_mut().zip(weights) {
                *w = S::lanes(from.add(at * WIDTH));
            }
            for (sum, row) in sum.iter_mut().zip(rows) {
                let x = V::splat(*row.add(at));
                for (sum, w) in sum.iter_mut().zip(w) {
                    *sum = x.fma(w, *sum);
                }
            }
        }
        for (i, sum) in sum.iter().enumerate() {
            for (n, sum) in sum.iter().enumerate() {
                let wide = columns.saturating_sub(n * WIDTH).min(WIDTH);
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
                let target = Target { out: SharedMut::new(&mut out), stride: GROUP * WIDTH, into: Into::Overwrite };
                group_product(Isa::detect(), &x_rows, panels, k, target, 0);
                for (row, out) in out.chunks_exact(GROUP * WIDTH).enumerate() {
                    for (out, block) in out.chunks_exact(WIDTH).zip(blocks) {
                        assert_eq!(out, &all[row * w.n + block * WIDTH..][..WIDTH], "row {row} of {rows}, panel {block}, kind {kind}");
                    }
                }
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
