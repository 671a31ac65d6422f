//! Sixteen f32 lanes with one meaning on every x86-64 processor: AVX-512 (one register), AVX2 (two), or plain Rust.
//!
//! Every kernel of the CPU device is written once over [`Lanes`] and compiled for each instruction set. All three give the same
//! bits: additions and multiplications happen in the same order, products are fused everywhere (`f32::mul_add` where there is no
//! instruction), and a sum over lanes always folds 16 -> 8 -> 4 -> 2 -> 1. Called by the kernels of `device::cpu` only.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Lanes of one value.
pub const WIDTH: usize = 16;

/// Sixteen f32 lanes.
///
/// # Safety
/// Every method needs the instruction set of the implementing type, and pointers must be readable or writable for [`WIDTH`]
/// elements (no alignment needed).
#[allow(clippy::missing_safety_doc, reason = "the trait's own section speaks for every method")]
pub trait Lanes: Copy {
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Sixteen bf16 values, widened.
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// Nibbles of eight bytes as numbers 0 to 15: the low ones in lanes 0 to 7, the high ones in lanes 8 to 15.
    unsafe fn from_nibbles(bytes: *const u8) -> Self;
    /// Nearest bf16, ties to even, widened again. Finite values only.
    unsafe fn round_bf16(self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `self * by + plus`, rounded once.
    unsafe fn fma(self, by: Self, plus: Self) -> Self;
    unsafe fn max(self, other: Self) -> Self;
    /// Nearest integer, ties to even.
    unsafe fn round(self) -> Self;
    /// `self * 2^n` for integral `n` in -126 ..= 127.
    unsafe fn scale_by_pow2(self, n: Self) -> Self;
    /// Lanes folded 16 -> 8 -> 4 -> 2 -> 1.
    unsafe fn sum(self) -> f32;
    unsafe fn max_lane(self) -> f32;
}

/// e^x in f32 (Cephes' expf with a fused Cody-Waite reduction; below 2 ulp). Inputs below -87.33 give
/// e^-87.33, about 1.2e-38: nothing beside the 1 that every softmax holds; above 88.3 it stays at e^88.3. NaN stays NaN.
///
/// # Safety
/// As [`Lanes`].
#[inline(always)]
pub unsafe fn exp<V: Lanes>(x: V) -> V {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        // The operand order keeps a NaN; the negated maximum is a minimum.
        let below = V::splat(-88.3).max(V::splat(0.0).sub(x));
        let x0 = V::splat(-87.33).max(V::splat(0.0).sub(below));
        let n = x0.mul(V::splat(std::f32::consts::LOG2_E)).round();
        let r = n.fma(V::splat(-0.693_359_4), x0);
        let r = n.fma(V::splat(2.121_944_4e-4), r);
        let mut p = V::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = p.fma(r, V::splat(c));
        }
        p.fma(r.mul(r), r).add(V::splat(1.0)).scale_by_pow2(n)
    }
}

/// Plain Rust: the definition the other two must reproduce.
#[derive(Clone, Copy)]
pub struct Portable([f32; WIDTH]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }

    #[inline(always)]
    fn fold(self, f: impl Fn(f32, f32) -> f32) -> f32 {
        let mut lanes = self.0;
        let mut half = WIDTH / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] = f(lanes[i], lanes[i + half]);
            }
            half /= 2;
        }
        lanes[0]
    }
}

impl Lanes for Portable {
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; WIDTH])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller guarantees WIDTH readable elements.
        Self(std::array::from_fn(|i| unsafe { *from.add(i) }))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        for (i, lane) in self.0.into_iter().enumerate() {
            // SAFETY: the caller guarantees WIDTH writable elements.
            unsafe { *to.add(i) = lane };
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller guarantees WIDTH readable elements.
        Self(std::array::from_fn(|i| f32::from_bits(u32::from(unsafe { *from.add(i) }) << 16)))
    }
    #[inline(always)]
    unsafe fn from_nibbles(bytes: *const u8) -> Self {
        // SAFETY: the caller guarantees eight readable bytes.
        Self(std::array::from_fn(|i| f32::from(unsafe { *bytes.add(i % 8) } >> (i / 8 * 4) & 15)))
    }
    #[inline(always)]
    unsafe fn round_bf16(self) -> Self {
        Self(self.0.map(|x| f32::from_bits(x.to_bits().wrapping_add(0x7fff + ((x.to_bits() >> 16) & 1)) & 0xffff_0000)))
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn fma(self, by: Self, plus: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(by.0[i], plus.0[i])))
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // As the instruction does: the second operand where either is NaN.
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        Self(self.0.map(f32::round_ties_even))
    }
    #[inline(always)]
    unsafe fn scale_by_pow2(self, n: Self) -> Self {
        self.zip(n, |y, n| y * f32::from_bits((((n as i32) + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        self.fold(|a, b| a + b)
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        self.fold(|a, b| if a > b { a } else { b })
    }
}

/// AVX2 + FMA: two registers of eight.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub struct Avx2(__m256, __m256);

#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn fold8(v: __m256, f: impl Fn(__m128, __m128) -> __m128) -> f32 {
    // SAFETY: AVX is present where this is instantiated.
    unsafe {
        let v4 = f(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v2 = f(v4, _mm_movehl_ps(v4, v4));
        let v1 = f(v2, _mm_shuffle_ps::<1>(v2, v2));
        _mm_cvtss_f32(v1)
    }
}

#[cfg(target_arch = "x86_64")]
impl Lanes for Avx2 {
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as the trait.
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: as the trait.
        unsafe {
            let widen = |v: __m128i| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(v)));
            Self(widen(_mm_loadu_si128(from.cast())), widen(_mm_loadu_si128(from.add(8).cast())))
        }
    }
    #[inline(always)]
    unsafe fn from_nibbles(bytes: *const u8) -> Self {
        // SAFETY: as the trait.
        unsafe {
            let bytes = _mm_loadl_epi64(bytes.cast());
            let low = _mm_and_si128(bytes, _mm_set1_epi8(15));
            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), _mm_set1_epi8(15));
            Self(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(low)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high)))
        }
    }
    #[inline(always)]
    unsafe fn round_bf16(self) -> Self {
        // SAFETY: as the trait.
        unsafe {
            let round = |v: __m256| {
                let bits = _mm256_castps_si256(v);
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
                _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(0xffff_0000_u32 as i32)))
            };
            Self(round(self.0), round(self.1))
        }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm256_sub_ps(self.0, other.0), _mm256_sub_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm256_div_ps(self.0, other.0), _mm256_div_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn fma(self, by: Self, plus: Self) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm256_fmadd_ps(self.0, by.0, plus.0), _mm256_fmadd_ps(self.1, by.1, plus.1)) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm256_max_ps(self.0, other.0), _mm256_max_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: as the trait.
        unsafe {
            Self(
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0),
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn scale_by_pow2(self, n: Self) -> Self {
        // SAFETY: as the trait.
        unsafe {
            let pow =
                |n: __m256| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127))));
            Self(_mm256_mul_ps(self.0, pow(n.0)), _mm256_mul_ps(self.1, pow(n.1)))
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: as the trait.
        unsafe { fold8(_mm256_add_ps(self.0, self.1), |a, b| _mm_add_ps(a, b)) }
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        // SAFETY: as the trait.
        unsafe { fold8(_mm256_max_ps(self.0, self.1), |a, b| _mm_max_ps(a, b)) }
    }
}

/// AVX-512F: one register.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub struct Avx512(__m512);

#[cfg(target_arch = "x86_64")]
impl Avx512 {
    #[inline(always)]
    unsafe fn halves(self) -> (__m256, __m256) {
        // SAFETY: AVX-512F is present where this is instantiated.
        unsafe {
            let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self.0));
            (_mm512_castps512_ps256(self.0), _mm256_castpd_ps(high))
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Lanes for Avx512 {
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm512_set1_ps(value)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm512_loadu_ps(from)) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as the trait.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: as the trait.
        unsafe {
            let narrow = _mm256_loadu_si256(from.cast());
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(narrow))))
        }
    }
    #[inline(always)]
    unsafe fn from_nibbles(bytes: *const u8) -> Self {
        // SAFETY: as the trait.
        unsafe {
            let bytes = _mm_loadl_epi64(bytes.cast());
            let both = _mm_unpacklo_epi64(bytes, _mm_srli_epi16::<4>(bytes));
            Self(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_and_si128(both, _mm_set1_epi8(15)))))
        }
    }
    #[inline(always)]
    unsafe fn round_bf16(self) -> Self {
        // SAFETY: as the trait.
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            Self(_mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(0xffff_0000_u32 as i32))))
        }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm512_add_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm512_sub_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm512_mul_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm512_div_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn fma(self, by: Self, plus: Self) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm512_fmadd_ps(self.0, by.0, plus.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm512_max_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: as the trait.
        unsafe { Self(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)) }
    }
    #[inline(always)]
    unsafe fn scale_by_pow2(self, n: Self) -> Self {
        // SAFETY: as the trait.
        unsafe {
            let pow = _mm512_slli_epi32::<23>(_mm512_add_epi32(_mm512_cvtps_epi32(n.0), _mm512_set1_epi32(127)));
            Self(_mm512_mul_ps(self.0, _mm512_castsi512_ps(pow)))
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: as the trait.
        unsafe {
            let (low, high) = self.halves();
            fold8(_mm256_add_ps(low, high), |a, b| _mm_add_ps(a, b))
        }
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        // SAFETY: as the trait.
        unsafe {
            let (low, high) = self.halves();
            fold8(_mm256_max_ps(low, high), |a, b| _mm_max_ps(a, b))
        }
    }
}

/// Which implementation the processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    Portable,
    Avx2,
    Avx512,
}

impl Isa {
    /// The widest one this processor runs.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self::Avx2;
            }
        }
        Self::Portable
    }
}

/// Defines `$name(isa, args...)`, which runs the generic `$kernel::<V>(args...)` compiled for the given instruction set.
macro_rules! dispatch {
    ($(#[$doc:meta])* $vis:vis fn $name:ident = $kernel:ident($($arg:ident : $type:ty),* $(,)?) $(-> $ret:ty)?) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(isa: $crate::device::cpu::simd::Isa, $($arg: $type),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx512($($arg: $type),*) $(-> $ret)? {
                // SAFETY: this function is compiled for AVX-512F and only called where it was detected.
                unsafe { $kernel::<$crate::device::cpu::simd::Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx2($($arg: $type),*) $(-> $ret)? {
                // SAFETY: this function is compiled for AVX2 and FMA and only called where they were detected.
                unsafe { $kernel::<$crate::device::cpu::simd::Avx2>($($arg),*) }
            }
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Isa::detect` found the feature.
                $crate::device::cpu::simd::Isa::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Isa::detect` found the feature.
                $crate::device::cpu::simd::Isa::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: the portable lanes need no feature.
                _ => unsafe { $kernel::<$crate::device::cpu::simd::Portable>($($arg),*) },
            }
        }
    };
}
pub(crate) use dispatch;

#[cfg(test)]
mod tests {
    use super::*;

    unsafe fn probe<V: Lanes>(a: &[f32; 16], b: &[f32; 16]) -> Vec<f32> {
        // SAFETY: called through `dispatch!`; the arrays hold WIDTH elements.
        unsafe {
            let (x, y) = (V::load(a.as_ptr()), V::load(b.as_ptr()));
            let mut out = vec![x.sum(), y.max_lane()];
            let nibbles = V::from_nibbles(a.as_ptr().cast());
            for v in [
                x.add(y),
                x.sub(y),
                x.mul(y),
                x.div(y.fma(y, V::splat(0.5))),
                x.fma(y, x),
                x.max(y),
                x.round(),
                exp(x),
                nibbles,
                x.mul(y).round_bf16(),
            ] {
                let mut lanes = [0f32; 16];
                v.store(lanes.as_mut_ptr());
                out.extend(lanes);
            }
            out
        }
    }
    dispatch!(fn run_probe = probe(a: &[f32; 16], b: &[f32; 16]) -> Vec<f32>);

    proptest::proptest! {
        #[test]
        fn every_instruction_set_gives_the_same_bits(a: [i16; 16], b: [i16; 16]) {
            let scale = |v: [i16; 16]| v.map(|x| f32::from(x) * 0.003_7);
            let (a, b) = (scale(a), scale(b));
            let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let want = bits(run_probe(Isa::Portable, &a, &b));
            let best = Isa::detect();
            proptest::prop_assert_eq!(&want, &bits(run_probe(best, &a, &b)));
            if best == Isa::Avx512 {
                proptest::prop_assert_eq!(&want, &bits(run_probe(Isa::Avx2, &a, &b)));
            }
        }

        #[test]
        fn exp_is_within_two_ulp(x in -87.0f32..80.0) {
            let got = run_probe(Isa::detect(), &[x; 16], &[0.0; 16])[2 + 7 * 16];
            let want = f64::from(x).exp();
            proptest::prop_assert!(((f64::from(got) - want) / want).abs() < 2.5e-7, "exp({x}) = {got}, want {want}");
        }
    }
}
