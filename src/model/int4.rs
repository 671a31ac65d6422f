//! Symmetric 4-bit weights in groups, compressed-tensors' `pack-quantized` layout. The checkpoint hands rows of it out, the CPU device
//! unpacks them, the CUDA device does the same arithmetic in its expert kernel.
//!
//! Eight elements share a little-endian 32-bit word, lowest nibble first, so the byte stream is simply two elements a byte, low nibble
//! first. A nibble holds q + 8 with q in -8..=7; the weight is `bf16(q * scale)`, rounded to bf16 before any use.

use half::bf16;

/// Unpacks one row: `packed` has two elements a byte, `scales` one value per `group` elements, `out` gets `2 * packed.len()` elements.
///
/// # Panics
/// When the lengths do not belong together; checkpoint views always fit.
pub fn unpack_row(packed: &[u8], scales: &[bf16], group: usize, out: &mut [bf16]) {
    unpack_with(packed, scales, group, out, |value| value);
}

/// The same, widened to f32 (the values are still those of bf16).
pub fn unpack_row_f32(packed: &[u8], scales: &[bf16], group: usize, out: &mut [f32]) {
    unpack_with(packed, scales, group, out, bf16::to_f32);
}

fn unpack_with<T: Copy>(packed: &[u8], scales: &[bf16], group: usize, out: &mut [T], convert: impl Fn(bf16) -> T) {
    assert_eq!(out.len(), 2 * packed.len(), "two elements a byte");
    assert_eq!(out.len(), group * scales.len(), "one scale per group");
    for ((bytes, scale), out) in packed.chunks_exact(group / 2).zip(scales).zip(out.chunks_exact_mut(group)) {
        // A group has 16 possible values: 16 multiplications and roundings instead of one per element.
        let values = values_of(*scale).map(&convert);
        for (byte, pair) in bytes.iter().zip(out.chunks_exact_mut(2)) {
            pair[0] = values[usize::from(byte & 15)];
            pair[1] = values[usize::from(byte >> 4)];
        }
    }
}

/// The weight of each nibble under one scale.
pub fn values_of(scale: bf16) -> [bf16; 16] {
    let scale = scale.to_f32();
    std::array::from_fn(|nibble| bf16::from_f32((nibble as f32 - 8.0) * scale))
}

/// Packs values of -8..=7, two a byte; the inverse of what `unpack_row` reads.
///
/// # Panics
/// An odd number of values, or one outside the range.
pub fn pack_row(values: &[i8]) -> Vec<u8> {
    assert!(values.len().is_multiple_of(2), "an even number of values");
    let nibble = |value: i8| {
        assert!((-8..=7).contains(&value), "{value} does not fit in 4 bits");
        (value + 8) as u8
    };
    values.chunks_exact(2).map(|pair| nibble(pair[0]) | nibble(pair[1]) << 4).collect()
}

/// Mean of q and of |q| over packed bytes. Trained weights have a mean near 0 and a magnitude near 2.7; read with the wrong
/// convention (two's complement) the histogram splits to both ends and the magnitude exceeds 5.
pub fn mean_and_magnitude(packed: &[u8]) -> (f64, f64) {
    let (mut sum, mut magnitude) = (0_i64, 0_i64);
    for byte in packed {
        for nibble in [byte & 15, byte >> 4] {
            let q = i64::from(nibble) - 8;
            sum += q;
            magnitude += q.abs();
        }
    }
    let count = (2 * packed.len()).max(1) as f64;
    (sum as f64 / count, magnitude as f64 / count)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn packing_matches_the_published_words() {
        let word = |values: [i8; 8]| u32::from_le_bytes(pack_row(&values).try_into().unwrap());
        assert_eq!(word([-8, -7, -6, -5, -4, -3, -2, -1]), 0x7654_3210);
        assert_eq!(word([0, 1, 2, 3, 4, 5, 6, 7]), 0xFEDC_BA98);
        assert_eq!(word([0; 8]), 0x8888_8888);
    }

    #[test]
    fn a_weight_is_rounded_to_bf16() {
        let scale = bf16::from_f32(0.010_009_766);
        let mut out = [bf16::ZERO; 2];
        unpack_row(&pack_row(&[7, -3]), &[scale], 2, &mut out);
        // 7 x 0.010009766 needs 11 bits of mantissa; the nearest bf16 is another number than the product.
        assert_ne!(out[0].to_f32(), 7.0 * scale.to_f32());
        assert_eq!(out, [bf16::from_f32(7.0 * scale.to_f32()), bf16::from_f32(-3.0 * scale.to_f32())]);
    }

    #[test]
    fn the_wrong_reading_of_nibbles_shows_in_the_magnitude() {
        let bell: Vec<i8> = (0..4096).map(|i| [-3, -2, -1, 0, 0, 1, 2, 3][i % 8]).collect();
        let (mean, magnitude) = mean_and_magnitude(&pack_row(&bell));
        assert_eq!((mean, magnitude), (0.0, 1.5));
        let twos_complement: Vec<u8> = bell.chunks_exact(2).map(|p| (p[0] as u8 & 15) | (p[1] as u8 & 15) << 4).collect();
        assert!(mean_and_magnitude(&twos_complement).1 > 5.0);
    }

    proptest! {
        #[test]
        fn unpacking_gives_back_what_was_packed(
            values in proptest::collection::vec(-8_i8..=7, 1..8).prop_map(|v| v.repeat(32)),
            seed in 1_u16..0x7f00,
        ) {
            let scales: Vec<bf16> = (0..values.len() / 32).map(|i| bf16::from_bits(seed.wrapping_add(i as u16) % 0x7000)).collect();
            let mut out = vec![bf16::ZERO; values.len()];
            unpack_row(&pack_row(&values), &scales, 32, &mut out);
            let mut wide = vec![0.0; values.len()];
            unpack_row_f32(&pack_row(&values), &scales, 32, &mut wide);
            for (k, value) in values.iter().enumerate() {
                let wanted = bf16::from_f32(f32::from(*value) * scales[k / 32].to_f32());
                prop_assert_eq!(out[k], wanted);
                prop_assert_eq!(wide[k], wanted.to_f32());
            }
        }
    }
}
