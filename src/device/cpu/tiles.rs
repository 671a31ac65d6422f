//! The kernels of dense products: register tiles of rows times panels of 16 columns, and the order in which they walk rows, panels
//! and depth. Called through [`super::gemm`], which says what a panel is.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{Ordering, compiler_fence};

use super::gemm::{Panels, Start, Target};
use super::simd::{Lanes, WIDTH, dispatch};

/// Rows from which panels are widened once for all of them instead of once per tile of rows.
const MANY: usize = 12;

/// Panels that many rows meet side by side: with 6 rows, 24 sums that fill the registers of AVX-512 beside 4 weights.
pub const GROUP: usize = 4;

thread_local! {
    /// A group of widened panels.
    static WIDE: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

dispatch! {
    /// `count` consecutive panels of depth `k` times all rows of `x`; `columns` of the result are written.
    pub fn panel_product = panel_product_kernel(x: &[&[f32]], panels: Panels<'_>, k: usize, count: usize, target: Target<'_>, columns: usize)
}

#[inline(always)]
unsafe fn panel_product_kernel<V: Lanes>(x: &[&[f32]], panels: Panels<'_>, k: usize, count: usize, target: Target<'_>, columns: usize) {
    assert!(panels.len() >= count * k * WIDTH && columns.div_ceil(WIDTH) == count && x.iter().all(|row| row.len() >= k));
    target.check(x.len(), columns);
    // SAFETY: the panels hold `count * k * 16` weights, every row of x holds k values, the target has room for every row, and these
    // columns of it belong to this call alone.
    unsafe {
        let w = match panels {
            Panels::Bf16(w) if x.len() < MANY => return by_count::<V>(x, w.as_ptr(), k, count, target, columns),
            // The same code for both, so that it is compiled once.
            many => many,
        };
        let (mut wide, step) = (WIDE.take(), if matches!(w, Panels::Bf16(_)) { GROUP } else { count });
        for at in (0..count).step_by(step) {
            let (first, panels) = (at * k * WIDTH, step.min(count - at));
            let from = match w {
                Panels::F32(w) => w.as_ptr().add(first),
                Panels::Bf16(w) => {
                    wide.resize(wide.len().max(GROUP * k * WIDTH), 0.0);
                    widen_kernel::<V>(&w[first..first + panels * k * WIDTH], &mut wide);
                    wide.as_ptr()
                }
            };
            by_groups::<V, f32>(x, from, k, panels, target.from_panel(at), (columns - at * WIDTH).min(panels * WIDTH));
        }
        WIDE.set(wide);
    }
}

dispatch! {
    /// [`GROUP`] panels that need not be neighbours, times all rows of `x`.
    pub fn group_product = group_product_kernel(x: &[&[f32]], panels: [Panels<'_>; GROUP], k: usize, target: Target<'_>)
}

#[inline(always)]
unsafe fn group_product_kernel<V: Lanes>(x: &[&[f32]], panels: [Panels<'_>; GROUP], k: usize, target: Target<'_>) {
    assert!(panels.iter().all(|panel| panel.len() >= k * WIDTH) && x.iter().all(|row| row.len() >= k));
    let columns = GROUP * WIDTH;
    target.check(x.len(), columns);
    // SAFETY: as in `panel_product_kernel`.
    unsafe {
        match panels {
            [Panels::F32(a), Panels::F32(b), Panels::F32(c), Panels::F32(d)] => {
                rows_of::<V, f32, GROUP>(x, [a, b, c, d].map(<[f32]>::as_ptr), k, target, columns);
            }
            [Panels::Bf16(a), Panels::Bf16(b), Panels::Bf16(c), Panels::Bf16(d)] if x.len() < MANY => {
                rows_of::<V, u16, GROUP>(x, [a, b, c, d].map(<[u16]>::as_ptr), k, target, columns);
            }
            _ => {
                let mut wide = WIDE.take();
                wide.resize(wide.len().max(GROUP * k * WIDTH), 0.0);
                for (panel, wide) in panels.iter().zip(wide.chunks_exact_mut(k * WIDTH)) {
                    match panel {
                        Panels::Bf16(w) => widen_kernel::<V>(&w[..k * WIDTH], wide),
                        Panels::F32(w) => wide.copy_from_slice(&w[..k * WIDTH]),
                    }
                }
                rows_of::<V, f32, GROUP>(x, neighbours(wide.as_ptr(), k), k, target, columns);
                WIDE.set(wide);
            }
        }
    }
}

dispatch! {
    /// bf16 weights, whole lanes of them, as f32.
    pub fn widen = widen_kernel(from: &[u16], to: &mut [f32])
}

#[inline(always)]
unsafe fn widen_kernel<V: Lanes>(from: &[u16], to: &mut [f32]) {
    assert!(to.len() >= from.len() && from.len().is_multiple_of(WIDTH));
    for at in (0..from.len()).step_by(WIDTH) {
        // SAFETY: 16 lanes of each.
        unsafe { V::load_bf16(from.as_ptr().add(at)).store(to.as_mut_ptr().add(at)) };
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
unsafe fn by_count<V: Lanes>(x: &[&[f32]], weights: *const u16, k: usize, count: usize, target: Target<'_>, columns: usize) {
    // SAFETY: handed on.
    unsafe {
        let mut at = 0;
        while x.len() == 1 && count - at >= 8 {
            let left = columns.saturating_sub(at * WIDTH).min(8 * WIDTH);
            tile::<V, u16, 8, 1>(x, neighbours(weights.add(at * k * WIDTH), k), 0..k, target.from_panel(at), left);
            at += 8;
        }
        by_groups::<V, u16>(x, weights.add(at * k * WIDTH), k, count - at, target.from_panel(at), columns.saturating_sub(at * WIDTH));
    }
}

/// Any number of neighbouring panels, four, two or one at a time.
#[inline(always)]
unsafe fn by_groups<V: Lanes, S: Stored>(x: &[&[f32]], weights: *const S, k: usize, count: usize, target: Target<'_>, columns: usize) {
    // SAFETY: handed on.
    unsafe {
        let mut at = 0;
        while at < count {
            let (from, target) = (weights.add(at * k * WIDTH), target.from_panel(at));
            let left = columns.saturating_sub(at * WIDTH);
            if count - at >= GROUP {
                rows_of::<V, S, GROUP>(x, neighbours(from, k), k, target, left.min(GROUP * WIDTH));
                at += GROUP;
            } else if count - at >= 2 {
                rows_of::<V, S, 2>(x, neighbours(from, k), k, target, left.min(2 * WIDTH));
                at += 2;
            } else {
                rows_of::<V, S, 1>(x, neighbours(from, k), k, target, left.min(WIDTH));
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

/// Depth that many rows walk at once: a group of panels this deep takes 32 KiB, two thirds of a core's first cache, so that only the
/// first tile of rows waits for it. What does not fit comes from the second cache for every tile anew, a third of the time of a product.
const DEPTH: usize = 128;

/// Rows of the largest tile.
pub const TALL: usize = 6;

/// All rows against `N` panels: where there is more than one tile of them, a part of the depth after the other.
#[inline(always)]
unsafe fn rows_of<V: Lanes, S: Stored, const N: usize>(
    x: &[&[f32]],
    weights: [*const S; N],
    k: usize,
    mut target: Target<'_>,
    columns: usize,
) {
    let parts = if x.len() > TALL { k.div_ceil(DEPTH).max(1) } else { 1 };
    for part in 0..parts {
        let depth = k * part / parts..k * (part + 1) / parts;
        // SAFETY: handed on.
        unsafe { tiles::<V, S, N>(x, weights, depth, target, columns) };
        target.start = Start::Standing;
    }
}

/// All rows against `N` panels at these depths, in tiles that fill the registers. Few tile shapes on purpose: each is compiled for
/// every instruction set.
#[inline(always)]
unsafe fn tiles<V: Lanes, S: Stored, const N: usize>(
    x: &[&[f32]],
    weights: [*const S; N],
    depth: Range<usize>,
    target: Target<'_>,
    columns: usize,
) {
    let mut m = 0;
    // SAFETY: handed on.
    unsafe {
        while x.len() - m >= TALL {
            tile::<V, S, N, TALL>(&x[m..], weights, depth.clone(), target.from(m * target.row), columns);
            m += TALL;
        }
        while x.len() - m >= 2 {
            tile::<V, S, N, 2>(&x[m..], weights, depth.clone(), target.from(m * target.row), columns);
            m += 2;
        }
        if m < x.len() {
            tile::<V, S, N, 1>(&x[m..], weights, depth, target.from(m * target.row), columns);
        }
    }
}

/// The first `M` rows against `N` panels.
#[inline(always)]
unsafe fn tile<V: Lanes, S: Stored, const N: usize, const M: usize>(
    x: &[&[f32]],
    weights: [*const S; N],
    depth: Range<usize>,
    target: Target<'_>,
    columns: usize,
) {
    // SAFETY: as `panel_product_kernel` checked.
    unsafe {
        let rows: [*const f32; M] = std::array::from_fn(|i| x[i].as_ptr().add(depth.start));
        let weights = weights.map(|from| from.add(depth.start * WIDTH));
        let mut sum = [[V::splat(0.0); N]; M];
        if target.start == Start::Standing {
            standing(&mut sum, target, columns);
        }
        for at in 0..depth.len() {
            step::<V, S, N, M>(&mut sum, &weights, &rows, at);
        }
        finish(&sum, target, columns);
    }
}

/// `sum[m][n] += rows[m][at] * weights[n][at]`.
#[inline(always)]
unsafe fn step<V: Lanes, S: Stored, const N: usize, const M: usize>(
    sum: &mut [[V; N]; M],
    weights: &[*const S; N],
    rows: &[*const f32; M],
    at: usize,
) {
    // SAFETY: as `panel_product_kernel` checked.
    unsafe {
        // A loop and not `from_fn`, whose closure may stay a call for the lack of the instruction set.
        let mut w = [V::splat(0.0); N];
        for (w, from) in w.iter_mut().zip(weights) {
            *w = S::lanes(from.add(at.wrapping_mul(WIDTH)));
        }
        for (sum, row) in sum.iter_mut().zip(rows) {
            let x = V::splat(*row.add(at));
            for (sum, w) in sum.iter_mut().zip(w) {
                *sum = x.fma(w, *sum);
            }
            // No instruction, but it keeps the values of other rows from being loaded ahead into registers that the sums need.
            compiler_fence(Ordering::SeqCst);
        }
    }
}

/// The sums that stand in the target. Here and in `finish` neither counters nor addresses check for overflow in builds that do: both
/// loops would be too long to unroll, and sums that are not all named by constants stay in memory for the whole tile.
#[inline(always)]
unsafe fn standing<V: Lanes, const N: usize, const M: usize>(sum: &mut [[V; N]; M], target: Target<'_>, columns: usize) {
    // SAFETY: as `panel_product_kernel` checked.
    unsafe {
        for (i, sum) in (0..M).zip(sum) {
            for (n, sum) in (0..N).zip(sum) {
                let from = target.pointer(i, n);
                *sum = if columns >= N * WIDTH { V::load(from) } else { load_part(from, columns.saturating_sub(n * WIDTH)) };
            }
        }
    }
}

/// The sums into the target.
#[inline(always)]
unsafe fn finish<V: Lanes, const N: usize, const M: usize>(sum: &[[V; N]; M], target: Target<'_>, columns: usize) {
    // SAFETY: as `panel_product_kernel` checked.
    unsafe {
        for (i, sum) in (0..M).zip(sum) {
            for (n, sum) in (0..N).zip(sum) {
                let to = target.pointer(i, n);
                if columns >= N * WIDTH {
                    sum.store(to)
                } else {
                    store_part(*sum, to, columns.saturating_sub(n * WIDTH))
                };
            }
        }
    }
}

/// The first `wide` lanes, zeros above.
#[inline(always)]
unsafe fn load_part<V: Lanes>(from: *const f32, wide: usize) -> V {
    let mut lanes = [0f32; WIDTH];
    // SAFETY: the caller's `wide` elements, at most 16.
    unsafe {
        std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), wide.min(WIDTH));
        V::load(lanes.as_ptr())
    }
}

#[inline(always)]
unsafe fn store_part<V: Lanes>(sum: V, to: *mut f32, wide: usize) {
    let mut lanes = [0f32; WIDTH];
    // SAFETY: as above.
    unsafe {
        sum.store(lanes.as_mut_ptr());
        std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, wide.min(WIDTH));
    }
}
