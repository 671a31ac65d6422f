//! Direct attention of a prompt chunk: keys and values of a segment of the context are expanded into scratch, then attended to; the
//! running output, maximum and sum of every row go on to the next segment. Never captured: how far the rows reach is known here.

use cudarc::driver::DevicePtr;

use super::absorbed::check_widths;
use super::{CudaAbsorbed, CudaLatents, NOPE, ROPE, VALUE, check_shape, scratch};
use crate::device::cuda::buffers::{Argument, CudaAct};
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::rows::CudaRows;
use crate::device::cuda::scratch::Use;
use crate::device::{DeviceError, MlaShape, Result};

/// Tokens expanded at once: at 8 heads their keys and values take 33 MiB, which a Hopper card's second-level cache holds.
const SEGMENT: usize = 8192;
/// Query rows a block of attend_segment works on, and tokens (and outputs) a block of expand_segment.
const QUERY_TILE: usize = 128;
const TOKEN_TILE: usize = 128;
/// Keys a tile of attend_segment.
const KEYS: usize = 64;
/// Shared memory of the two kernels; prompt.cu asserts the same.
pub const EXPAND_SHARED: u32 = 73_728;
pub const ATTEND_SHARED: u32 = 86_016;
const THREADS: u32 = 256;

/// Blocks that share a segment's keys, so that few rows fill the card too. Depends on the chunk alone.
fn splits(rows: usize, heads: usize, sms: usize) -> usize {
    (sms / (rows.div_ceil(QUERY_TILE) * heads)).clamp(1, 16)
}

impl CudaDevice {
    #[allow(clippy::too_many_arguments)]
    pub(in crate::device::cuda) fn attend_direct(
        &self,
        weights: &CudaAbsorbed,
        shape: MlaShape,
        q: &CudaAct,
        rows: &CudaRows,
        latents: &CudaLatents,
        layer: usize,
        out: &mut CudaAct,
    ) -> Result<()> {
        check_shape(shape)?;
        check_widths(weights.heads, shape, q, out)?;
        if rows.bound == 0 {
            return Ok(());
        }
        if rows.group_bound > 1 || rows.reach < rows.bound || rows.reach > self.limits.context {
            let (groups, chunk, reach, context) = (rows.group_bound, rows.bound, rows.reach, self.limits.context);
            return Err(DeviceError(format!(
                "direct attention of {chunk} rows in {groups} groups that reach {reach} tokens: wanted one group within {context} tokens"
            )));
        }
        let (gpu, heads) = (&self.gpu, shape.heads);
        let (prefix, keys) = (rows.reach - rows.bound, rows.reach);
        let splits = splits(rows.bound, heads, gpu.sms as usize);
        let segment = SEGMENT.min(self.limits.context.next_multiple_of(TOKEN_TILE));
        // Sized for any chunk within the limits, so that what warm-up allocates is enough afterwards.
        let most_rows = self.limits.chunk_rows.max(rows.bound);
        let states = (1..=most_rows.div_ceil(QUERY_TILE))
            .map(|tiles| tiles * QUERY_TILE * heads * self::splits(tiles * QUERY_TILE, heads, gpu.sms as usize))
            .max()
            .unwrap_or(0);
        let rope_bytes = segment * ROPE * 2;
        let rope = scratch(self, Use::Expanded, rope_bytes + segment * heads * (NOPE + VALUE) * 2)?;
        let expanded = rope + rope_bytes as u64;
        let sums = scratch(self, Use::Running, states * (VALUE + 2) * 4)?;
        let outputs = sums + (states * 8) as u64;

        let pointers = rows.pointers(gpu);
        let kernels = &self.attention.kernels;
        let int = |value: usize| (value as i32).bits();
        for first in (0..keys).step_by(segment) {
            let tokens = segment.min(keys - first);
            let expand = &mut [
                latents.kv[layer].base,
                weights.kv_b.device_ptr(&gpu.stream).0,
                pointers.tables,
                pointers.table_begins,
                pointers.slots,
                int(prefix),
                int(keys),
                int(first),
                int(heads),
                expanded,
                rope,
            ];
            let grid = (2 * heads as u32, tokens.div_ceil(TOKEN_TILE) as u32, 1);
            // SAFETY: argument types as in prompt.cu; the segment's buffers hold whole tiles, and positions below `keys` have slots.
            unsafe { gpu.enqueue(&kernels.expand_segment, grid, THREADS, EXPAND_SHARED, expand)? };
            let per = tokens.div_ceil(splits).next_multiple_of(KEYS);
            let attend = &mut [
                q.view(gpu).at,
                expanded,
                rope,
                int(rows.bound),
                int(heads),
                int(prefix),
                int(first),
                int(tokens),
                int(per),
                (shape.scale * std::f32::consts::LOG2_E).bits(),
                outputs,
                sums,
            ];
            let grid = (rows.bound.div_ceil(QUERY_TILE) as u32, heads as u32, splits as u32);
            // SAFETY: as above; the state holds `splits` parts of `bound` rows.
            unsafe { gpu.enqueue(&kernels.attend_segment, grid, THREADS, ATTEND_SHARED, attend)? };
        }
        let finish = &mut [outputs, sums, int(rows.bound), int(heads), int(splits), out.view(gpu).at];
        // SAFETY: as above; `out` holds `bound` rows.
        unsafe { gpu.enqueue(&kernels.finish_prompt, (rows.bound as u32, heads as u32, 1), VALUE as u32, 0, finish)? };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_are_spread_over_the_card_and_many_are_not() {
        assert_eq!(splits(512, 8, 132), 4);
        assert_eq!(splits(128, 8, 132), 16);
        assert_eq!(splits(4096, 8, 132), 1);
        assert_eq!(splits(1, 64, 132), 2);
    }
}
