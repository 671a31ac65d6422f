//! Random weights of sensible scale, one reproducible stream per tensor.

use half::bf16;

use crate::model::int4;
use crate::model::inventory::{Part, TensorSpec, Wanted};
use crate::speculate::uniform::uniform;

/// Standard deviation of the 4-bit values drawn by `nibbles`.
const NIBBLE_DEVIATION: f64 = 2.3;
/// Standard deviation of a uniform number in -1..1.
const UNIFORM_DEVIATION: f64 = 0.577_350_269_189_625_8;

/// The bytes of a tensor's first elements, at most `most` of them.
pub fn random(spec: &TensorSpec, seed: u64, most: usize) -> Vec<u8> {
    let count = most.min(spec.elements() as usize);
    // Between -1 and 1.
    let spread = |i: usize| 2.0 * uniform(seed, i as u64) - 1.0;
    match (spec.part, spec.wanted) {
        (_, Wanted::F32) => (0..count).flat_map(|i| ((0.05 * spread(i)) as f32).to_le_bytes()).collect(),
        (Part::ExpertsPacked, _) => nibbles(seed, 8 * count),
        (Part::ExpertsScales, _) => {
            let scale = 1.0 / (NIBBLE_DEVIATION * (32.0 * spec.shape[1] as f64).sqrt());
            bf16_bytes(count, |i| scale * (1.0 + 0.2 * spread(i)))
        }
        _ if spec.shape.len() == 1 => bf16_bytes(count, |i| 1.0 + 0.1 * spread(i)),
        _ if spec.name.ends_with("embed_tokens.weight") => bf16_bytes(count, spread),
        _ => {
            let scale = 1.0 / (UNIFORM_DEVIATION * (spec.shape[1] as f64).sqrt());
            bf16_bytes(count, |i| scale * spread(i))
        }
    }
}

fn bf16_bytes(count: usize, value: impl Fn(usize) -> f64) -> Vec<u8> {
    (0..count).flat_map(|i| bf16::from_f64(value(i)).to_le_bytes()).collect()
}

/// Bell-shaped 4-bit values, as trained weights have them: the sum of three uniform numbers.
fn nibbles(seed: u64, count: usize) -> Vec<u8> {
    let value = |i: usize| {
        let sum: f64 = (0..3).map(|j| uniform(seed, (3 * i + j) as u64) - 0.5).sum();
        // Three uniform numbers have a deviation of one half together.
        (sum * 2.0 * NIBBLE_DEVIATION).round().clamp(-8.0, 7.0) as i8
    };
    int4::pack_row(&(0..count).map(value).collect::<Vec<i8>>())
}
