//! Row-wise arithmetic between the products: RMSNorm, rotary embeddings, SwiGLU.

use super::simd::{Lanes, WIDTH, dispatch, exp};

dispatch! {
    /// `out = x / sqrt(mean(x^2) + eps) * weight`.
    pub fn rms_norm = rms_norm_kernel(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32])
}

#[inline(always)]
unsafe fn rms_norm_kernel<V: Lanes>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == weight.len() && x.len() == out.len());
    // SAFETY: whole lanes inside the slices.
    unsafe {
        let mut sum = V::splat(0.0);
        let chunks = x.chunks_exact(WIDTH);
        let mut rest = 0.0;
        for value in chunks.remainder() {
            rest += value * value;
        }
        for lanes in chunks {
            let lanes = V::load(lanes.as_ptr());
            sum = lanes.fma(lanes, sum);
        }
        let factor = 1.0 / ((sum.sum() + rest) / x.len() as f32 + eps).sqrt();
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = x * factor * weight;
        }
    }
}

dispatch! {
    /// `out = silu(gate) * up`, `silu(x) = x / (1 + e^-x)`; widths are multiples of 16.
    pub fn swiglu = swiglu_kernel(gate: &[f32], up: &[f32], out: &mut [f32])
}

#[inline(always)]
unsafe fn swiglu_kernel<V: Lanes>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == up.len() && gate.len() == out.len() && gate.len().is_multiple_of(WIDTH));
    for at in (0..gate.len()).step_by(WIDTH) {
        // SAFETY: whole lanes inside the slices.
        unsafe {
            let x = V::load(gate.as_ptr().add(at));
            let below = exp(V::splat(0.0).sub(x)).add(V::splat(1.0));
            x.mul(V::load(up.as_ptr().add(at))).div(below).store(out.as_mut_ptr().add(at));
        }
    }
}

dispatch! {
    /// Rotates neighbouring pairs (2i, 2i+1) by the angle of pair i: the target's layout.
    pub fn rope_interleaved = rope_interleaved_kernel(x: &mut [f32], cos: &[f32], sin: &[f32])
}

/// The compiler makes lanes of it; no product is fused in any instruction set.
#[inline(always)]
#[allow(clippy::extra_unused_type_parameters, reason = "it names the instruction set")]
unsafe fn rope_interleaved_kernel<V: Lanes>(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    for ((pair, cos), sin) in x.chunks_exact_mut(2).zip(cos).zip(sin) {
        let (a, b) = (pair[0], pair[1]);
        pair[0] = a * cos - b * sin;
        pair[1] = b * cos + a * sin;
    }
}

/// Rotates pairs (i, i + half) by the angle of pair i: the drafter's layout.
pub fn rope_halves(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = x.split_at_mut(x.len() / 2);
    for (((a, b), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        let (x, y) = (*a, *b);
        *a = x * cos - y * sin;
        *b = y * cos + x * sin;
    }
}
