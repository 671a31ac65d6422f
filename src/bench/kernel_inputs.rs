//! Inputs for the verify kernels, made up and put on the card: lengths, slots, trees, queries and KV rows. Called by
//! `kdtree bench kernel`, the criterion bench and the GPU tests.

use cudarc::driver::{CudaFunction, CudaSlice, DevicePtr};

use crate::device::cuda::error::{CudaError, During};
use crate::device::cuda::kv::{ROW, TILE};
use crate::device::cuda::{Call, Gpu, KvRows};

/// bf16 bit pattern of a NaN, for everything that must not be read.
pub const POISON: u16 = 0x7fc0;

/// A small, seeded generator (splitmix64), so that a case can be repeated.
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Uniform in `0 .. below`.
    pub fn below(&mut self, below: usize) -> usize {
        ((u128::from(self.word()) * below as u128) >> 64) as usize
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

/// Shape of a request's draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    Chain,
    Star,
    Tree,
    SelfOnly,
    Full,
}

impl Mask {
    /// Every form, in the order in which tests take turns with them.
    pub const ALL: [Self; 5] = [Self::Chain, Self::Star, Self::Tree, Self::SelfOnly, Self::Full];

    /// One word a row: bit j = row j is visible.
    pub fn rows(self, rows: usize, random: &mut Random) -> Vec<u64> {
        let mut words: Vec<u64> = Vec::with_capacity(rows);
        for i in 0..rows {
            let own = 1u64 << i;
            words.push(match self {
                Self::Full => u64::MAX >> (64 - rows),
                Self::SelfOnly => own,
                _ if i == 0 => own,
                Self::Chain => words[i - 1] | own,
                Self::Star => words[0] | own,
                Self::Tree => words[random.below(i)] | own,
            });
        }
        words
    }
}

/// How prefixes lie in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Slots {
    /// Any slot may follow any other.
    Random,
    /// Aligned blocks of 16, as kdtree's cache hands them out.
    Blocks,
}

/// One request of a case.
#[derive(Clone, Debug)]
pub struct RequestShape {
    pub prefix: usize,
    /// One word a draft row.
    pub mask: Vec<u64>,
}

/// A launch's lists as the host writes them.
#[derive(Clone, Debug, Default)]
pub struct Lists {
    pub qo_indptr: Vec<i32>,
    /// Where each request's prefix starts in `kv_indices`, and its tokens.
    pub kv_begin: Vec<i32>,
    pub kv_len: Vec<i32>,
    pub kv_indices: Vec<i32>,
    pub draft_slots: Vec<i32>,
    pub mask: Vec<u64>,
}

/// A cache on the card with a random order of its slots and of its blocks.
pub struct Cache {
    pub kv: CudaSlice<u16>,
    pub rows: KvRows,
    slots: Vec<i32>,
    blocks: Vec<i32>,
    fill_slots: CudaFunction,
    fill_normal: CudaFunction,
}

impl Cache {
    /// `slots` rows (a multiple of 16), not yet filled.
    pub fn new(gpu: &Gpu, slots: usize, random: &mut Random) -> Result<Self, CudaError> {
        // SAFETY: filled below or by the caller before anything reads it.
        let kv: CudaSlice<u16> = unsafe { gpu.stream.alloc(slots * ROW) }.during("allocating KV rows")?;
        let rows = KvRows::new(kv.device_ptr(&gpu.stream).0, slots)?;
        let module = gpu.module("testing_fill")?;
        let mut order: Vec<i32> = (0..slots as i32).collect();
        random.shuffle(&mut order);
        let mut blocks: Vec<i32> = (0..(slots / TILE) as i32).collect();
        random.shuffle(&mut blocks);
        let (fill_slots, fill_normal) = (gpu.function(&module, "fill_slots", 0)?, gpu.function(&module, "fill_normal", 0)?);
        Ok(Self { kv, rows, slots: order, blocks, fill_slots, fill_normal })
    }

    /// Slots in all.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Gives a case its slots, from place `start` of the cache's order on (and round again when it is used up). `before` words of
    /// garbage precede every prefix and follow the last.
    pub fn lists(&self, requests: &[RequestShape], slots: Slots, start: usize, before: usize) -> Lists {
        let mut at = match slots {
            Slots::Random => start,
            Slots::Blocks => start.next_multiple_of(TILE),
        };
        let mut take = |tokens: usize, out: &mut Vec<i32>| {
            match slots {
                Slots::Random => out.extend((at..at + tokens).map(|i| self.slots[i % self.slots.len()])),
                Slots::Blocks => {
                    out.extend((at..at + tokens).map(|i| self.blocks[i / TILE % self.blocks.len()] * TILE as i32 + (i % TILE) as i32))
                }
            }
            at += if slots == Slots::Blocks { tokens.next_multiple_of(TILE) } else { tokens };
        };
        let garbage = [i32::MAX, -7, i32::MIN, 1 << 29];
        let mut lists = Lists { qo_indptr: vec![0], ..Lists::default() };
        for request in requests {
            lists.kv_indices.extend(garbage.iter().cycle().take(before));
            lists.kv_begin.push(lists.kv_indices.len() as i32);
            lists.kv_len.push(request.prefix as i32);
            take(request.prefix, &mut lists.kv_indices);
            take(request.mask.len(), &mut lists.draft_slots);
            lists.mask.extend(&request.mask);
            lists.qo_indptr.push(lists.draft_slots.len() as i32);
        }
        lists.kv_indices.extend(garbage.iter().cycle().take(before));
        lists
    }

    /// Fills every row with normal numbers x `scale`.
    pub fn fill(&self, gpu: &Gpu, scale: f32, seed: u64) -> Result<(), CudaError> {
        fill(gpu, &self.fill_normal, self.kv.device_ptr(&gpu.stream).0, self.kv.len(), scale, seed)
    }

    /// Fills an array of bf16 with normal numbers x `scale`.
    pub fn fill_array(&self, gpu: &Gpu, array: &CudaSlice<u16>, scale: f32, seed: u64) -> Result<(), CudaError> {
        fill(gpu, &self.fill_normal, array.device_ptr(&gpu.stream).0, array.len(), scale, seed)
    }

    /// NaN everywhere but in the slots that `inputs` names, which get numbers that depend on slot and seed only.
    pub fn poison_all_but(&self, gpu: &Gpu, lists: &Lists, inputs: &Inputs, scale: f32, seed: u64) -> Result<(), CudaError> {
        poison(gpu, &self.kv)?;
        let prefixes = lists.kv_begin.iter().zip(&lists.kv_len).map(|(&begin, &len)| (&inputs.kv_indices, begin as usize, len as usize));
        for (list, offset, count) in prefixes.chain([(&inputs.draft_slots, 0, lists.draft_slots.len())]) {
            if count == 0 {
                continue;
            }
            let (mut kv, mut slots) = (self.kv.device_ptr(&gpu.stream).0, list.device_ptr(&gpu.stream).0 + 4 * offset as u64);
            let (mut count, mut scale, mut seed) = (count as i64, scale, seed);
            let arguments = &mut [
                (&raw mut kv).cast(),
                (&raw mut slots).cast(),
                (&raw mut count).cast(),
                (&raw mut scale).cast(),
                (&raw mut seed).cast(),
            ];
            // SAFETY: types as in kernels/testing/fill.cu; all slots of a list made by `lists` are inside the cache.
            unsafe { gpu.launch(&self.fill_slots, (16 * gpu.sms, 1, 1), 192, 0, arguments)? };
        }
        Ok(())
    }
}

fn fill(gpu: &Gpu, function: &CudaFunction, mut data: u64, count: usize, mut scale: f32, mut seed: u64) -> Result<(), CudaError> {
    let mut count = count as i64;
    let arguments = &mut [(&raw mut data).cast(), (&raw mut count).cast(), (&raw mut scale).cast(), (&raw mut seed).cast()];
    // SAFETY: types as in kernels/testing/fill.cu; `data` has `count` elements.
    unsafe { gpu.launch(function, (16 * gpu.sms, 1, 1), 256, 0, arguments) }
}

/// Overwrites an array with NaN.
pub fn poison(gpu: &Gpu, array: &CudaSlice<u16>) -> Result<(), CudaError> {
    gpu.context.bind_to_thread().during("binding the context")?;
    // SAFETY: the array has `len` elements of two bytes.
    unsafe { cudarc::driver::sys::cuMemsetD16Async(array.device_ptr(&gpu.stream).0, POISON, array.len(), gpu.stream.cu_stream()) }
        .result()
        .during("poisoning an array")
}

/// A launch's inputs and outputs on the card.
pub struct Inputs {
    pub q: CudaSlice<u16>,
    pub out: CudaSlice<u16>,
    pub lse: CudaSlice<f32>,
    pub qo_indptr: CudaSlice<i32>,
    pub kv_begin: CudaSlice<i32>,
    pub kv_len: CudaSlice<i32>,
    pub kv_indices: CudaSlice<i32>,
    pub draft_slots: CudaSlice<i32>,
    pub mask: CudaSlice<u64>,
    pub batch: usize,
    pub rows: usize,
    pub heads: usize,
}

impl Inputs {
    /// Uploads `lists` and makes room for queries and outputs of `rows` draft rows (at least those of the lists).
    pub fn new(gpu: &Gpu, lists: &Lists, heads: usize, rows: usize) -> Result<Self, CudaError> {
        fn up<T: cudarc::driver::DeviceRepr + Copy + Default>(gpu: &Gpu, list: &[T]) -> Result<CudaSlice<T>, CudaError> {
            let list = if list.is_empty() { &[T::default()] } else { list };
            gpu.stream.clone_htod(list).during("uploading a list")
        }
        let rows = rows.max(lists.draft_slots.len()).max(1);
        Ok(Self {
            q: gpu.stream.alloc_zeros(rows * heads * ROW).during("allocating queries")?,
            out: gpu.stream.alloc_zeros(rows * heads * 512).during("allocating outputs")?,
            lse: gpu.stream.alloc_zeros(rows * heads).during("allocating log-sum-exps")?,
            qo_indptr: up(gpu, &lists.qo_indptr)?,
            kv_begin: up(gpu, &lists.kv_begin)?,
            kv_len: up(gpu, &lists.kv_len)?,
            kv_indices: up(gpu, &lists.kv_indices)?,
            draft_slots: up(gpu, &lists.draft_slots)?,
            mask: up(gpu, &lists.mask)?,
            batch: lists.qo_indptr.len() - 1,
            rows,
            heads,
        })
    }

    /// The launch over `cache`. Scale as in K2.6: 1 / sqrt(128 + 64).
    pub fn call<'a>(&self, gpu: &Gpu, kv: &'a KvRows) -> Call<'a> {
        Call {
            q: self.q.device_ptr(&gpu.stream).0,
            kv,
            out: self.out.device_ptr(&gpu.stream).0,
            lse: self.lse.device_ptr(&gpu.stream).0,
            qo_indptr: self.qo_indptr.device_ptr(&gpu.stream).0,
            kv_begin: self.kv_begin.device_ptr(&gpu.stream).0,
            kv_len: self.kv_len.device_ptr(&gpu.stream).0,
            kv_indices: self.kv_indices.device_ptr(&gpu.stream).0,
            draft_slots: self.draft_slots.device_ptr(&gpu.stream).0,
            mask: self.mask.device_ptr(&gpu.stream).0,
            batch: self.batch,
            rows: self.rows,
            scale: 1.0 / 192f32.sqrt(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_sees_itself_and_only_rows_that_exist() {
        let mut random = Random(1);
        for mask in Mask::ALL {
            for rows in [1, 2, 17, 63, 64] {
                let words = mask.rows(rows, &mut random);
                assert!(words.iter().enumerate().all(|(i, w)| w >> i & 1 == 1 && (rows == 64 || w >> rows == 0)), "{mask:?} {rows}");
            }
        }
        assert_eq!(Mask::Chain.rows(64, &mut random)[63], u64::MAX);
        assert_eq!(Mask::Star.rows(3, &mut random), [1, 0b11, 0b101]);
    }

    #[test]
    fn a_tree_rows_ancestors_come_before_it_and_are_closed_upwards() {
        let words = Mask::Tree.rows(64, &mut Random(7));
        for (i, word) in words.iter().enumerate() {
            assert!((0..i).filter(|j| word >> j & 1 == 1).all(|j| words[j] & !word == 0));
            assert!(i == 63 || word >> (i + 1) == 0);
        }
    }
}
