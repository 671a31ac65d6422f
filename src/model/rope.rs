//! Rotary position embedding with YaRN, as the target (64 rope dimensions, pairs 2i and 2i+1) and the drafter (whole head,
//! pairs i and i + dim/2) use it. Which pairs are rotated is the forward pass's business; frequencies and angles are the same.

use super::config_keys::{Keys, short};

/// Frequencies and magnitude of one rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Dimensions rotated, even; half as many frequencies.
    pub dim: usize,
    pub theta: f64,
    /// Absent = plain rotary embedding.
    pub yarn: Option<Yarn>,
    /// Factor on cos and sin: 1 for every Kimi target and, by default, for its drafters.
    pub magnitude: f64,
}

/// YaRN's parameters (arXiv 2309.00071), as DeepSeek's model file reads them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    pub factor: f64,
    pub original_max_position: f64,
    pub beta_fast: f64,
    pub beta_slow: f64,
    pub mscale: Option<f64>,
    pub mscale_all_dim: Option<f64>,
    /// Transformers' explicit override of the magnitude.
    pub attention_factor: Option<f64>,
}

/// YaRN's magnitude correction `0.1 m ln(s) + 1`, 1 without stretching.
pub fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

impl Rope {
    /// Reads `rope_theta` and `rope_scaling` (or transformers 5's `rope_parameters`, which holds both). The magnitude follows
    /// transformers' rule: `attention_factor`, else the ratio of the two mscales, else `yarn_mscale(factor, 1)`.
    pub(super) fn parse(keys: &Keys, dim: usize) -> Self {
        if !dim.is_multiple_of(2) {
            keys.report("rope dimensions", dim, "an even number");
        }
        let nested = keys.child("rope_parameters").or_else(|| keys.child("rope_scaling"));
        let theta = match &nested {
            Some(scaling) if scaling.get("rope_theta").is_some() => scaling.positive("rope_theta"),
            _ => keys.positive("rope_theta"),
        };
        let yarn = nested.and_then(|scaling| Yarn::parse(&scaling));
        Self { dim, theta, magnitude: yarn.map_or(1.0, |yarn| yarn.magnitude()), yarn }
    }

    /// Angle per position of each pair, fastest first: `dim / 2` values.
    /// Source: DeepSeek-V3's `DeepseekV3YarnRotaryEmbedding`; the change applies at every position, not only beyond the original length.
    pub fn frequencies(&self) -> Vec<f64> {
        let dim = self.dim as f64;
        let plain = |i: usize| self.theta.powf(-2.0 * i as f64 / dim);
        let Some(yarn) = self.yarn else { return (0..self.dim / 2).map(plain).collect() };
        let (low, high) = yarn.ramp_bounds(dim, self.theta);
        (0..self.dim / 2)
            .map(|i| {
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                plain(i) * ((1.0 - ramp) + ramp / yarn.factor)
            })
            .collect()
    }

    /// The frequencies and magnitude that a device needs to rotate rows.
    pub fn angles(&self) -> RopeAngles {
        RopeAngles { frequencies: self.frequencies(), magnitude: self.magnitude }
    }
}

impl Yarn {
    fn parse(keys: &Keys) -> Option<Self> {
        let kind = keys.text("rope_type").or_else(|| keys.text("type"));
        match kind {
            Some("yarn") => {}
            Some("default") => return None,
            other => {
                keys.report("rope_type", other.unwrap_or("nothing"), "yarn or default");
                return None;
            }
        }
        if keys.text("type").is_some_and(|older| Some(older) != kind) {
            keys.report("type", keys.get("type").map(short).unwrap_or_default(), "the same as rope_type");
        }
        keys.only("truncate", true);
        Some(Self {
            factor: keys.positive("factor"),
            original_max_position: keys.positive("original_max_position_embeddings"),
            beta_fast: keys.positive_or("beta_fast", 32.0),
            beta_slow: keys.positive_or("beta_slow", 1.0),
            mscale: keys.not_negative("mscale"),
            mscale_all_dim: keys.not_negative("mscale_all_dim"),
            attention_factor: keys.get("attention_factor").map(|_| keys.positive("attention_factor")),
        })
    }

    /// First and last pair of the transition from kept to stretched frequencies.
    fn ramp_bounds(&self, dim: f64, theta: f64) -> (f64, f64) {
        let correction =
            |rotations: f64| dim * (self.original_max_position / (rotations * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln());
        let low = correction(self.beta_fast).floor().max(0.0);
        let high = correction(self.beta_slow).ceil().min(dim - 1.0);
        // Upstream's guard against a division by zero; kept so that the numbers agree.
        if low == high { (low, high + 0.001) } else { (low, high) }
    }

    fn magnitude(&self) -> f64 {
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(factor), _, _) => factor,
            (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => yarn_mscale(self.factor, m) / yarn_mscale(self.factor, all),
            _ => yarn_mscale(self.factor, 1.0),
        }
    }
}

/// cos and sin of a position, computed in f64 and rounded once: at position 262,143 an f32 angle would already be off by 0.01.
#[derive(Clone, Debug)]
pub struct RopeAngles {
    /// Radians per position, one per pair.
    pub frequencies: Vec<f64>,
    pub magnitude: f64,
}

impl RopeAngles {
    /// Fills `cos` and `sin`, one value per pair each.
    pub fn cos_sin(&self, position: u32, cos: &mut [f32], sin: &mut [f32]) {
        assert_eq!(cos.len(), self.frequencies.len(), "one cosine per pair");
        assert_eq!(sin.len(), self.frequencies.len(), "one sine per pair");
        for ((frequency, cos), sin) in self.frequencies.iter().zip(cos).zip(sin) {
            let (s, c) = (f64::from(position) * frequency).sin_cos();
            *cos = (c * self.magnitude) as f32;
            *sin = (s * self.magnitude) as f32;
        }
    }

    /// cos and sin of positions `0..positions`, row-major `[positions, pairs]` each.
    pub fn table(&self, positions: usize) -> (Vec<f32>, Vec<f32>) {
        let pairs = self.frequencies.len();
        let (mut cos, mut sin) = (vec![0.0; positions * pairs], vec![0.0; positions * pairs]);
        for (position, (cos, sin)) in cos.chunks_exact_mut(pairs).zip(sin.chunks_exact_mut(pairs)).enumerate() {
            self.cos_sin(position as u32, cos, sin);
        }
        (cos, sin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kimi(factor: f64, beta_fast: f64) -> Rope {
        let yarn = Yarn {
            factor,
            original_max_position: 4096.0,
            beta_fast,
            beta_slow: 1.0,
            mscale: Some(1.0),
            mscale_all_dim: Some(1.0),
            attention_factor: None,
        };
        Rope { dim: 64, theta: 50000.0, magnitude: yarn.magnitude(), yarn: Some(yarn) }
    }

    fn close(found: f64, wanted: f64) {
        assert!((found / wanted - 1.0).abs() < 2e-9, "found {found:e}, wanted {wanted:e}");
    }

    #[test]
    fn frequencies_of_the_three_kimi_generations() {
        let table = [
            (64.0, 32.0, (8.0, 20.0), [4.377665595e-2, 4.465848749e-3, 1.583749910e-4, 1.807023387e-5, 4.382206456e-7]),
            (64.0, 1.0, (19.0, 20.0), [4.768861244e-2, 8.794286766e-3, 1.621759908e-3, 1.807023387e-5, 4.382206456e-7]),
            (32.0, 1.0, (19.0, 20.0), [4.768861244e-2, 8.794286766e-3, 1.621759908e-3, 3.614046774e-5, 8.764412912e-7]),
        ];
        for (factor, beta_fast, bounds, wanted) in table {
            let rope = kimi(factor, beta_fast);
            assert_eq!(rope.yarn.unwrap().ramp_bounds(64.0, 50000.0), bounds);
            let freq = rope.frequencies();
            assert_eq!((freq.len(), freq[0]), (32, 1.0));
            close(freq[8], 6.687403050e-2);
            for (i, wanted) in [9, 14, 19, 20, 31].into_iter().zip(wanted) {
                close(freq[i], wanted);
            }
            assert_eq!(rope.magnitude, 1.0);
        }
    }

    #[test]
    fn magnitude_correction_of_the_softmax() {
        close(yarn_mscale(64.0, 1.0), 1.4158883083359672);
        close(yarn_mscale(32.0, 1.0), 1.3465735902799727);
        assert_eq!(yarn_mscale(1.0, 1.0), 1.0);
    }

    #[test]
    fn magnitude_follows_transformers_when_a_mscale_is_missing() {
        let mut yarn = kimi(64.0, 32.0).yarn.unwrap();
        yarn.mscale_all_dim = None;
        close(yarn.magnitude(), 1.4158883083359672);
        yarn.attention_factor = Some(2.0);
        assert_eq!(yarn.magnitude(), 2.0);
    }

    #[test]
    fn plain_rope_without_scaling() {
        let freq = Rope { dim: 4, theta: 10000.0, yarn: None, magnitude: 1.0 }.frequencies();
        close(freq[1], 0.01);
    }

    #[test]
    fn far_positions_are_exact_to_an_f32() {
        let angles = kimi(64.0, 32.0).angles();
        let (mut cos, mut sin) = (vec![0.0; 32], vec![0.0; 32]);
        angles.cos_sin(262_143, &mut cos, &mut sin);
        // cos and sin of 262143 radians, from 60-digit arithmetic.
        assert_eq!((cos[0], sin[0]), (-0.609_161_5_f32, 0.793_046_2_f32));
        for (c, s) in cos.iter().zip(&sin) {
            assert!((c * c + s * s - 1.0).abs() < 1e-6);
        }
        let (table_cos, table_sin) = angles.table(3);
        angles.cos_sin(2, &mut cos, &mut sin);
        assert_eq!((&table_cos[64..], &table_sin[64..]), (&cos[..], &sin[..]));
    }
}
