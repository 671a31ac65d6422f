//! Mode `validate`: baseline and custom verify attention side by side, worst values per layer.

use half::bf16;

use crate::engine::contract::LayerDiff;

/// Differences gathered since they were last taken.
#[derive(Default)]
pub struct Validation {
    layers: Vec<Sums>,
}

#[derive(Clone, Copy, Default)]
struct Sums {
    diff: LayerDiff,
    dot: f64,
    own: f64,
    other: f64,
}

impl Validation {
    /// Takes in one layer's outputs, rows of `width` values.
    pub fn compare(&mut self, layer: usize, width: usize, baseline: &[f32], custom: &[f32]) {
        if self.layers.len() <= layer {
            self.layers.resize(layer + 1, Sums::default());
        }
        let sums = &mut self.layers[layer];
        for (a, b) in baseline.chunks_exact(width).zip(custom.chunks_exact(width)) {
            for (&a, &b) in a.iter().zip(b) {
                // A NaN on either side must show: it becomes an infinite difference.
                let abs = (a - b).abs();
                sums.diff.max_abs = sums.diff.max_abs.max(if abs.is_nan() { f32::INFINITY } else { abs });
                sums.diff.max_ulp = sums.diff.max_ulp.max(ulp_distance(a, b));
                let (a, b) = (f64::from(a), f64::from(b));
                sums.dot += a * b;
                sums.own += a * a;
                sums.other += b * b;
            }
            sums.diff.rows += 1;
            sums.diff.argmax_equal += u64::from(largest(a) == largest(b));
        }
    }

    /// Per layer, and starts anew.
    pub fn take(&mut self) -> Vec<LayerDiff> {
        let finish = |sums: Sums| {
            let norm = (sums.own * sums.other).sqrt();
            let cosine = if norm > 0.0 {
                sums.dot / norm
            } else if sums.own == sums.other {
                1.0
            } else {
                0.0
            };
            LayerDiff { cosine: if cosine.is_nan() { 0.0 } else { cosine }, ..sums.diff }
        };
        std::mem::take(&mut self.layers).into_iter().map(finish).collect()
    }
}

fn largest(row: &[f32]) -> usize {
    let mut best = 0;
    for (at, value) in row.iter().enumerate() {
        if value.abs() > row[best].abs() {
            best = at;
        }
    }
    best
}

/// Steps between two values on the bf16 grid, zero counted once.
pub fn ulp_distance(a: f32, b: f32) -> u32 {
    if a.is_nan() || b.is_nan() {
        return if a.is_nan() && b.is_nan() { 0 } else { u32::MAX };
    }
    let place = |x: f32| {
        let bits = i32::from(bf16::from_f32(x).to_bits());
        if bits & 0x8000 != 0 { -(bits & 0x7fff) } else { bits }
    };
    place(a).abs_diff(place(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ulps_count_steps_of_bf16_across_zero() {
        assert_eq!(ulp_distance(1.0, 1.0 + 1.0 / 128.0), 1);
        assert_eq!(ulp_distance(0.0, -0.0), 0);
        let tiny = f32::from_bits(0x0001_0000);
        assert_eq!(ulp_distance(tiny, -tiny), 2);
        assert_eq!(ulp_distance(f32::NAN, 1.0), u32::MAX);
    }

    #[test]
    fn a_difference_in_one_layer_shows_there_only() {
        let mut validation = Validation::default();
        validation.compare(0, 2, &[1.0, 2.0], &[1.0, 2.0]);
        validation.compare(1, 2, &[1.0, 2.0], &[2.0, 1.0]);
        let diffs = validation.take();
        assert_eq!((diffs[0].max_abs, diffs[0].max_ulp, diffs[0].argmax_equal), (0.0, 0, 1));
        assert!(diffs[0].cosine > 0.999_999);
        assert_eq!((diffs[1].max_abs, diffs[1].argmax_equal, diffs[1].rows), (1.0, 0, 1));
        assert!(validation.take().is_empty());
    }
}
