//! The best k entries of a logit row and its log-sum-exp. Used for the drafter's marginals (`tree`) and for reported
//! log-probabilities (`sampling`). One pass, no allocation, ties to the lower id, NaN never selected.

/// Fills `ids` and `values` with the entries of `row` in decreasing value, ties by rising id, and returns how many were found:
/// `min(ids.len(), numbers in row)`. The two outputs must have equal length; what lies beyond the count is left untouched.
pub fn top_k(row: &[f32], ids: &mut [u32], values: &mut [f32]) -> usize {
    let k = ids.len().min(values.len());
    let mut found = 0;
    for (id, &value) in row.iter().enumerate() {
        let full = found == k;
        if value.is_nan() || (full && (k == 0 || value <= values[k - 1])) {
            continue;
        }
        // Ids rise, so an equal value goes behind those already there.
        let at = values[..found].partition_point(|&other| other >= value);
        found = (found + 1).min(k);
        values.copy_within(at..found - 1, at + 1);
        ids.copy_within(at..found - 1, at + 1);
        values[at] = value;
        ids[at] = id as u32;
    }
    found
}

/// log(sum(exp(row))), exponentials in f32 around the row's maximum, summed in f64 in a fixed order. `-inf` for a row without a finite entry, NaN when an
/// entry is NaN.
pub fn log_sum_exp(row: &[f32]) -> f64 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return if row.iter().any(|value| value.is_nan()) { f64::NAN } else { f64::NEG_INFINITY };
    }
    let mut sums = [0f64; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (sum, weight) in sums.iter_mut().zip(exp_below(chunk.map(|value| value - max))) {
            *sum += f64::from(weight);
        }
    }
    let tail: f64 = rest.iter().map(|&value| (f64::from(value) - f64::from(max)).exp()).sum();
    f64::from(max) + (sums.iter().sum::<f64>() + tail).ln()
}

/// Values at a time: plain loops of this length become vector code on any processor, with the same bits on all.
const LANES: usize = 16;

/// e^x for x <= 0 in f32, within 2 ulp (Cephes' expf without fused products); below -87.3 it stays at e^-87.3. NaN stays NaN.
fn exp_below(x: [f32; LANES]) -> [f32; LANES] {
    /// 1.5 * 2^23: adding it rounds to a whole number, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let x = x.map(|x| if x < -87.3 { -87.3 } else { x });
    let shifted = x.map(|x| x * std::f32::consts::LOG2_E + ROUND);
    std::array::from_fn(|i| {
        let n = shifted[i] - ROUND;
        let r = (x[i] - n * 0.693_359_4) + n * 2.121_944_4e-4;
        let mut p = 1.987_569_1e-4_f32;
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = p * r + c;
        }
        (p * (r * r) + r + 1.0) * f32::from_bits(shifted[i].to_bits().wrapping_add(127) << 23)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn equals_a_full_sort(row in prop::collection::vec(-3i8..3, 1..60), k in 0usize..70) {
            let row: Vec<f32> = row.into_iter().map(f32::from).collect();
            let mut order: Vec<u32> = (0..row.len() as u32).collect();
            order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
            order.truncate(k);
            let (mut ids, mut values) = (vec![u32::MAX; k], vec![0.0; k]);
            let found = top_k(&row, &mut ids, &mut values);
            prop_assert_eq!(&ids[..found], &order[..]);
            for (&id, &value) in ids[..found].iter().zip(&values) {
                prop_assert_eq!(row[id as usize], value);
            }
        }
    }

    proptest! {
        #[test]
        fn log_sum_exp_is_that_of_f64(row in prop::collection::vec(-120.0f32..40.0, 1..100)) {
            let exact: f64 = row.iter().map(|&value| f64::from(value).exp()).sum::<f64>().ln();
            prop_assert!((log_sum_exp(&row) - exact).abs() < 3e-7, "{} {exact}", log_sum_exp(&row));
        }
    }

    #[test]
    fn log_sum_exp_shows_a_nan_and_an_empty_row() {
        let mut row = vec![1.0f32; 40];
        row[3] = f32::NAN;
        assert!(log_sum_exp(&row).is_nan());
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY; 20]), f64::NEG_INFINITY);
    }

    #[test]
    fn skips_what_is_not_a_number() {
        let (mut ids, mut values) = ([9; 3], [0.0; 3]);
        assert_eq!(top_k(&[f32::NAN, 1.0, f32::NAN, 2.0], &mut ids, &mut values), 2);
        assert_eq!(ids[..2], [3, 1]);
    }

    #[test]
    fn log_sum_exp_survives_large_logits_and_names_empty_rows() {
        assert!((log_sum_exp(&[1000.0, 1000.0]) - (1000.0 + 2f64.ln())).abs() < 1e-12);
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY; 4]), f64::NEG_INFINITY);
        assert!(log_sum_exp(&[0.0, f32::NAN]).is_nan());
        assert!(log_sum_exp(&[f32::NAN, f32::NAN]).is_nan());
    }
}
