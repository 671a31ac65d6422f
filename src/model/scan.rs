//! Looks at every value once before a model may serve: one NaN in a scale spoils every answer that meets its expert, long after loading.

use std::sync::Mutex;

use half::bf16;
use rayon::prelude::*;

use super::checkpoint::{Checkpoint, Place};
use super::int4;
use super::inventory::{Part, TensorSpec, Wanted};
use super::problem::{Problem, Problems};
use super::progress::Progress;

/// Bytes a thread looks at before it reports progress.
const CHUNK: usize = 1 << 20;
/// Above this mean magnitude the nibbles were written with another convention (see `int4::mean_and_magnitude`); uniform noise has 4.0.
const MAX_MAGNITUDE: f64 = 4.6;
const MAX_MEAN: f64 = 1.0;

impl Checkpoint {
    /// Checks that every bf16 and f32 value is finite, that every `weight_shape` says what its matrix is, and that the first expert's
    /// nibbles look like offset-binary weights. Reads all of the checkpoint, on all cores.
    ///
    /// # Errors
    /// Every tensor with a finding.
    pub fn scan_values(&self, progress: &dyn Progress) -> Result<(), Problems> {
        let floats: Vec<(&TensorSpec, &Place)> = self.floats().collect();
        progress.begin("checking values", self.float_bytes());
        let problems = Mutex::new(Vec::new());
        let report = |problem| problems.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(problem);
        floats.par_iter().for_each(|(spec, place)| {
            if let Some(problem) = self.scan_tensor(spec, place, progress) {
                report(problem);
            }
        });
        progress.end();
        self.located().filter(|(spec, _)| spec.part == Part::ExpertsShapes).for_each(|(spec, _)| {
            if let Err(problem) = self.check_stated_shape(&spec.name, self.matrix_shape(&spec.name)) {
                report(problem);
            }
        });
        if let Some(problem) = self.first_expert() {
            report(problem);
        }
        let mut problems = problems.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        problems.sort_unstable_by(|a, b| (&a.file, &a.subject).cmp(&(&b.file, &b.subject)));
        Problems::unless_empty(&self.source().to_string(), problems, ())
    }

    /// Bytes of bf16 and f32 tensors: what a scan reads.
    pub fn float_bytes(&self) -> u64 {
        self.floats().map(|(_, place)| (place.end - place.begin) as u64).sum()
    }

    fn floats(&self) -> impl Iterator<Item = (&TensorSpec, &Place)> {
        self.located().filter(|(spec, _)| matches!(spec.wanted, Wanted::Bf16 | Wanted::F32))
    }

    fn located(&self) -> impl Iterator<Item = (&TensorSpec, &Place)> {
        self.inventory.tensors.iter().filter_map(|spec| Some((spec, self.places.get(&spec.name)?)))
    }

    fn scan_tensor(&self, spec: &TensorSpec, place: &Place, progress: &dyn Progress) -> Option<Problem> {
        let file = &self.files[place.file];
        let (width, scan): (usize, fn(&[u8]) -> Scan) = match spec.wanted {
            Wanted::F32 => (4, scan_f32),
            _ => (2, scan_bf16),
        };
        let scan_chunk = |(number, bytes): (usize, &[u8])| {
            let scan = scan(bytes);
            progress.advance(bytes.len() as u64);
            Scan { first: scan.first.map(|first| first + number * (CHUNK / width)), ..scan }
        };
        let bytes = file.tensor(place.begin, place.end);
        let scan = bytes.par_chunks(CHUNK).enumerate().map(scan_chunk).reduce(Scan::default, Scan::join);
        let first = scan.first?;
        let value = match &bytes[first * width..][..width] {
            [a, b] => bf16::from_le_bytes([*a, *b]).to_f32(),
            quad => f32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]]),
        };
        let columns = spec.shape.last().copied().unwrap_or(1);
        let found = format!("{value} at [{}, {}], {} such values in all", first / columns, first % columns, scan.count);
        Some(Problem::new(&file.name, &spec.name, found, "finite values"))
    }

    /// Rows and columns that the matrix of a `weight_shape` tensor has.
    fn matrix_shape(&self, shape_name: &str) -> [usize; 2] {
        let packed = shape_name.strip_suffix("weight_shape").and_then(|module| self.places.get(&format!("{module}weight_packed")));
        packed.map_or([0, 0], |place| [place.shape[0], place.shape[1] * 8])
    }

    fn first_expert(&self) -> Option<Problem> {
        let (spec, place) = self.located().find(|(spec, _)| spec.part == Part::ExpertsPacked)?;
        let file = &self.files[place.file];
        let (mean, magnitude) = int4::mean_and_magnitude(file.tensor(place.begin, place.end));
        if magnitude <= MAX_MAGNITUDE && mean.abs() <= MAX_MEAN {
            return None;
        }
        let found = format!("4-bit values of mean {mean:.2} and mean magnitude {magnitude:.2}");
        let wanted = format!("a mean within {MAX_MEAN} and a magnitude of at most {MAX_MAGNITUDE} (nibble = value + 8)");
        Some(Problem::new(&file.name, &spec.name, found, wanted))
    }
}

/// Values of a stretch that are not finite.
#[derive(Clone, Copy, Default)]
struct Scan {
    first: Option<usize>,
    count: usize,
}

impl Scan {
    fn join(self, other: Self) -> Self {
        let first = match (self.first, other.first) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        Self { first, count: self.count + other.count }
    }
}

/// A bf16 is NaN or infinite when its eight exponent bits are all ones: then, without its sign, it is at least that of infinity as a
/// whole number. The largest one decides for a whole stretch, which is a single vector instruction per eight values.
fn scan_bf16(bytes: &[u8]) -> Scan {
    const INFINITY: i16 = 0x7f80;
    let unsigned = |pair: &[u8]| i16::from_le_bytes([pair[0], pair[1]]) & i16::MAX;
    if bytes.chunks_exact(2).map(unsigned).fold(0, i16::max) < INFINITY {
        return Scan::default();
    }
    scan(bytes, 2, |pair| unsigned(pair) >= INFINITY)
}

fn scan_f32(bytes: &[u8]) -> Scan {
    scan(bytes, 4, |quad| !f32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]]).is_finite())
}

fn scan(bytes: &[u8], width: usize, bad: impl Fn(&[u8]) -> bool) -> Scan {
    let count = bytes.chunks_exact(width).filter(|value| bad(value)).count();
    Scan { first: bytes.chunks_exact(width).position(bad), count }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_bad_value_is_found_wherever_it_stands(length in 1_usize..5000, at in 0_usize..5000, bits in 0x7f80_u16..=0x7fff, sign: bool) {
            let at = at % length;
            let mut values = vec![0x3f80_u16; length];
            let clean: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            prop_assert!(scan_bf16(&clean).first.is_none());
            values[at] = bits | u16::from(sign) << 15;
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let scan = scan_bf16(&bytes);
            prop_assert_eq!((scan.first, scan.count), (Some(at), 1));
        }

        #[test]
        fn every_finite_f32_passes(bits: u32) {
            let value = f32::from_bits(bits);
            prop_assert_eq!(scan_f32(&value.to_le_bytes()).count == 0, value.is_finite());
        }
    }
}
