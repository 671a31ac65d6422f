//! The random number of a position. Counter-based (Philox4x32-10, Salmon et al. 2011), so that it depends on nothing but the seed
//! and the position: not on the batch, the budget, the rows drawn before it, or the machine. That is what makes a seeded request
//! replay under every budget, and what a CUDA kernel can compute for itself.

/// A number in [0, 1) with 53 random bits, for the token at absolute position `position` of a request seeded with `seed`.
/// All rows of a tree at one depth share it; at most one of them lies on the accepted path.
pub fn uniform(seed: u64, position: u64) -> f64 {
    let words = philox([position as u32, (position >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(words[0]) << 32 | u64::from(words[1]);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// Philox4x32 with ten rounds.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_answers() {
        let max = u32::MAX;
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([max; 4], [max; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    /// Chi-square of `cells` equally likely cells, as a distance from its mean in standard deviations.
    fn excess(counts: &[u32]) -> f64 {
        let expected = counts.iter().sum::<u32>() as f64 / counts.len() as f64;
        let chi: f64 = counts.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
        let freedom = counts.len() as f64 - 1.0;
        (chi - freedom) / (2.0 * freedom).sqrt()
    }

    #[test]
    fn is_even_along_positions_and_along_seeds() {
        let cell = |u: f64| (u * 64.0) as usize;
        for other in [0, 1, 77, u64::MAX] {
            let (mut positions, mut seeds) = ([0; 64], [0; 64]);
            for n in 0..65_536 {
                positions[cell(uniform(other, n))] += 1;
                seeds[cell(uniform(n, other))] += 1;
            }
            assert!(excess(&positions).abs() < 4.0 && excess(&seeds).abs() < 4.0);
        }
    }

    #[test]
    fn neighbours_in_position_and_seed_are_independent() {
        let cell = |a: f64, b: f64| (a * 8.0) as usize * 8 + (b * 8.0) as usize;
        let (mut positions, mut seeds) = ([0; 64], [0; 64]);
        for n in 0..65_536 {
            positions[cell(uniform(5, n), uniform(5, n + 1))] += 1;
            seeds[cell(uniform(n, 9), uniform(n + 1, 9))] += 1;
        }
        assert!(excess(&positions).abs() < 4.0 && excess(&seeds).abs() < 4.0);
    }

    #[test]
    fn stays_below_one_and_is_the_top_of_the_generators_words() {
        assert!((0..10_000).all(|n| (0.0..1.0).contains(&uniform(3, n))));
        // From the published answer for counter 0 and key 0.
        assert_eq!(uniform(0, 0), (0x6627_e8d5_e169_c58d_u64 >> 11) as f64 / (1u64 << 53) as f64);
    }
}
