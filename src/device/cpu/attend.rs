//! The three steps of attention over keys that lie anywhere: scores, softmax, weighted sum. Shared by verify, prompt and draft
//! attention. A score is one 16-lane chain over the key's values and one fold; a weighted sum is one chain over the keys in the
//! order given. Neither depends on which queries or keys stand beside it.

use super::simd::{Lanes, WIDTH, dispatch, exp};

dispatch! {
    /// `scores[q * stride + t] = queries[q] . keys[t]`, over `dim` values (a multiple of 16).
    pub fn scores = scores_kernel(queries: &[&[f32]], keys: &[&[f32]], dim: usize, scores: &mut [f32], stride: usize)
}

#[inline(always)]
unsafe fn scores_kernel<V: Lanes>(queries: &[&[f32]], keys: &[&[f32]], dim: usize, scores: &mut [f32], stride: usize) {
    assert!(dim.is_multiple_of(WIDTH) && queries.iter().chain(keys).all(|row| row.len() >= dim) && keys.len() <= stride);
    assert!(queries.is_empty() || scores.len() >= (queries.len() - 1) * stride + keys.len());
    let mut t = 0;
    // SAFETY: every row holds `dim` values, the scores have room for every pair.
    unsafe {
        while keys.len() - t >= 4 {
            score_queries::<V, 4>(queries, &keys[t..t + 4], dim, scores, stride, t);
            t += 4;
        }
        while t < keys.len() {
            score_queries::<V, 1>(queries, &keys[t..t + 1], dim, scores, stride, t);
            t += 1;
        }
    }
}

#[inline(always)]
unsafe fn score_queries<V: Lanes, const T: usize>(
    queries: &[&[f32]],
    keys: &[&[f32]],
    dim: usize,
    scores: &mut [f32],
    stride: usize,
    t: usize,
) {
    // SAFETY: handed on.
    unsafe {
        let mut q = 0;
        while queries.len() - q >= 6 {
            score_tile::<V, T, 6>(queries, keys, dim, scores, stride, q, t);
            q += 6;
        }
        while queries.len() - q >= 2 {
            score_tile::<V, T, 2>(queries, keys, dim, scores, stride, q, t);
            q += 2;
        }
        if q < queries.len() {
            score_tile::<V, T, 1>(queries, keys, dim, scores, stride, q, t);
        }
    }
}

#[inline(always)]
unsafe fn score_tile<V: Lanes, const T: usize, const Q: usize>(
    queries: &[&[f32]],
    keys: &[&[f32]],
    dim: usize,
    scores: &mut [f32],
    stride: usize,
    q: usize,
    t: usize,
) {
    // SAFETY: as `scores_kernel` checked.
    unsafe {
        let query: [*const f32; Q] = std::array::from_fn(|i| queries[q + i].as_ptr());
        let key: [*const f32; T] = std::array::from_fn(|i| keys[i].as_ptr());
        let mut sum = [[V::splat(0.0); Q]; T];
        let mut at = 0;
        while at < dim {
            for (sum, key) in sum.iter_mut().zip(key) {
                let key = V::load(key.add(at));
                for (sum, query) in sum.iter_mut().zip(query) {
                    *sum = V::load(query.add(at)).fma(key, *sum);
                }
            }
            at += WIDTH;
        }
        for (j, sum) in sum.iter().enumerate() {
            for (i, sum) in sum.iter().enumerate() {
                *scores.get_unchecked_mut((q + i) * stride + t + j) = sum.sum();
            }
        }
    }
}

/// Largest scaled score and sum of exponentials of one row of a (partial) softmax.
#[derive(Clone, Copy, Debug)]
pub struct RowStats {
    pub max: f32,
    pub sum: f32,
}

dispatch! {
    /// Turns scores into `exp(scale * score - max)` in place. No score at all gives `max = -inf`, `sum = 0`.
    pub fn softmax = softmax_kernel(scores: &mut [f32], scale: f32) -> RowStats
}

#[inline(always)]
unsafe fn softmax_kernel<V: Lanes>(scores: &mut [f32], scale: f32) -> RowStats {
    if scores.is_empty() {
        return RowStats { max: f32::NEG_INFINITY, sum: 0.0 };
    }
    // SAFETY: whole lanes lie inside the slice; the rest goes through a padded copy.
    unsafe {
        let factor = V::splat(scale);
        let whole = scores.len() / WIDTH * WIDTH;
        let mut tail = [f32::NEG_INFINITY; WIDTH];
        let (body, rest) = scores.split_at_mut(whole);
        for (to, from) in tail.iter_mut().zip(rest.iter()) {
            *to = *from * scale;
        }
        let mut max = V::load(tail.as_ptr());
        for lanes in body.chunks_exact_mut(WIDTH) {
            let scaled = V::load(lanes.as_ptr()).mul(factor);
            scaled.store(lanes.as_mut_ptr());
            max = scaled.max(max);
        }
        let max = max.max_lane();
        let shift = V::splat(max);
        let mut sum = V::splat(0.0);
        for lanes in body.chunks_exact_mut(WIDTH) {
            let weight = exp(V::load(lanes.as_ptr()).sub(shift));
            weight.store(lanes.as_mut_ptr());
            sum = sum.add(weight);
        }
        if !rest.is_empty() {
            exp(V::load(tail.as_ptr()).sub(shift)).store(tail.as_mut_ptr());
            tail[rest.len()..].fill(0.0);
            rest.copy_from_slice(&tail[..rest.len()]);
            sum = sum.add(V::load(tail.as_ptr()));
        }
        RowStats { max, sum: sum.sum() }
    }
}

dispatch! {
    /// `out[q * width + c] += sum_t weights[q * stride + t] * values[t][c]` for `c < width` (a multiple of 16), keys in order.
    pub fn weighted_sum = weighted_sum_kernel(weights: &[f32], stride: usize, queries: usize, values: &[&[f32]], width: usize, out: &mut [f32])
}

#[inline(always)]
unsafe fn weighted_sum_kernel<V: Lanes>(weights: &[f32], stride: usize, queries: usize, values: &[&[f32]], width: usize, out: &mut [f32]) {
    if queries == 0 || values.is_empty() {
        return;
    }
    assert!(width.is_multiple_of(WIDTH) && values.iter().all(|row| row.len() >= width));
    assert!(weights.len() >= (queries - 1) * stride + values.len() && out.len() >= queries * width);
    let mut column = 0;
    // SAFETY: checked above.
    unsafe {
        while width - column >= 4 * WIDTH {
            sum_columns::<V, 4>(weights, stride, queries, values, width, out, column);
            column += 4 * WIDTH;
        }
        while column < width {
            sum_columns::<V, 1>(weights, stride, queries, values, width, out, column);
            column += WIDTH;
        }
    }
}

#[inline(always)]
unsafe fn sum_columns<V: Lanes, const C: usize>(
    weights: &[f32],
    stride: usize,
    queries: usize,
    values: &[&[f32]],
    width: usize,
    out: &mut [f32],
    column: usize,
) {
    // SAFETY: handed on.
    unsafe {
        let mut q = 0;
        while queries - q >= 4 {
            sum_tile::<V, C, 4>(weights, stride, values, width, out, q, column);
            q += 4;
        }
        while q < queries {
            sum_tile::<V, C, 1>(weights, stride, values, width, out, q, column);
            q += 1;
        }
    }
}

#[inline(always)]
unsafe fn sum_tile<V: Lanes, const C: usize, const Q: usize>(
    weights: &[f32],
    stride: usize,
    values: &[&[f32]],
    width: usize,
    out: &mut [f32],
    q: usize,
    column: usize,
) {
    // SAFETY: as `weighted_sum_kernel` checked.
    unsafe {
        let to = out.as_mut_ptr().add(q * width + column);
        // Loops and not `from_fn`, whose closures may stay calls for the lack of the instruction set.
        let mut sum = [[V::splat(0.0); C]; Q];
        for (i, sum) in sum.iter_mut().enumerate() {
            for (c, sum) in sum.iter_mut().enumerate() {
                *sum = V::load(to.add(i * width + c * WIDTH));
            }
        }
        let weight: [*const f32; Q] = std::array::from_fn(|i| weights.as_ptr().add((q + i) * stride));
        for (t, value) in values.iter().enumerate() {
            let value = value.as_ptr().add(column);
            let mut lanes = [V::splat(0.0); C];
            for (c, lanes) in lanes.iter_mut().enumerate() {
                *lanes = V::load(value.add(c * WIDTH));
            }
            for (sum, weight) in sum.iter_mut().zip(weight) {
                let weight = V::splat(*weight.add(t));
                for (sum, lanes) in sum.iter_mut().zip(lanes) {
                    *sum = weight.fma(lanes, *sum);
                }
            }
        }
        for (i, sum) in sum.iter().enumerate() {
            for (c, sum) in sum.iter().enumerate() {
                sum.store(to.add(i * width + c * WIDTH));
            }
        }
    }
}

/// A softmax over keys as one partial result: running maximum, sum and unnormalised output. Merging partials in order of their keys
/// gives the softmax over all of them (log-sum-exp merge, as in FlashAttention's split-KV).
pub struct Partial<'a> {
    pub stats: RowStats,
    pub output: &'a mut [f32],
}

impl Partial<'_> {
    /// Takes in the partial result over later keys.
    pub fn merge(&mut self, stats: RowStats, output: &[f32]) {
        if stats.max == f32::NEG_INFINITY {
            return;
        }
        if self.stats.max == f32::NEG_INFINITY {
            self.stats = stats;
            self.output.copy_from_slice(output);
            return;
        }
        let max = self.stats.max.max(stats.max);
        let (mine, theirs) = ((self.stats.max - max).exp(), (stats.max - max).exp());
        self.stats = RowStats { max, sum: self.stats.sum * mine + stats.sum * theirs };
        for (own, other) in self.output.iter_mut().zip(output) {
            *own = *own * mine + *other * theirs;
        }
    }

    /// Divides by the sum: the attention output.
    pub fn finish(self) {
        let factor = 1.0 / self.stats.sum;
        self.output.iter_mut().for_each(|value| *value *= factor);
    }
}
