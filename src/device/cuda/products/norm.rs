//! RMSNorms in front of products (kernels/products/norm.cuh): what a launch must know to do one on the way, and the launch of its own that
//! does it for more rows. Queries come with the latents of their rows, which go into the cache beside them.

use cudarc::driver::sys::CUdeviceptr;

use super::super::buffers::{CudaVector, View};
use super::super::device::CudaDevice;
use super::super::gpu::Gpu;
use crate::device::Result;

/// Rows `x + added`, which go to `sum`, normed.
#[derive(Clone, Copy)]
pub(in crate::device::cuda) struct Normed<'a> {
    pub x: View,
    pub added: Option<View>,
    pub sum: Option<View>,
    pub weight: &'a CudaVector,
    pub eps: f32,
}

/// Mirror of `struct Norm` in norm.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Norm {
    added: CUdeviceptr,
    added_stride: i64,
    sum: CUdeviceptr,
    sum_stride: i64,
    weight: CUdeviceptr,
    pub factors: CUdeviceptr,
    eps: f32,
    unused: i32,
}

/// Mirror of `struct Latents` in kernels/attention/latent.cuh. `cache` 0: none are stored.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::device::cuda) struct Latents {
    pub rows: CUdeviceptr,
    pub weight: CUdeviceptr,
    pub cos: CUdeviceptr,
    pub sin: CUdeviceptr,
    pub counts: CUdeviceptr,
    pub positions: CUdeviceptr,
    pub slots: CUdeviceptr,
    pub cache: CUdeviceptr,
    pub eps: f32,
    pub unused: i32,
}

/// Mirror of `struct Prepare` in norm.cuh.
#[repr(C)]
struct Prepare {
    x: CUdeviceptr,
    x_stride: i64,
    norm: Norm,
    out: CUdeviceptr,
    half: CUdeviceptr,
    rest: CUdeviceptr,
    units: i32,
    slice: i32,
    groups: i32,
    unused: i32,
}

impl Normed<'_> {
    /// As the kernels want it; the factors go to `factors`.
    pub(super) fn on_the_way(&self, gpu: &Gpu, factors: CUdeviceptr) -> Norm {
        let place = |view: Option<View>| view.map_or((0, 0), |view| (view.at, view.stride as i64));
        let ((added, added_stride), (sum, sum_stride)) = (place(self.added), place(self.sum));
        Norm { added, added_stride, sum, sum_stride, weight: self.weight.at(gpu), factors, eps: self.eps, unused: 0 }
    }
}

impl CudaDevice {
    /// Enqueues the norm of `rows` rows whose product cuts k into `(units, units of a slice, groups)`: f32 rows to `out` or bf16 rows to
    /// `half` (and their second terms), addresses that are 0 where there is none; factors to `factors`; latents into their cache.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn prepare_rows(
        &self,
        normed: Normed<'_>,
        rows: usize,
        (units, slice, groups): (i32, i32, i32),
        out: CUdeviceptr,
        (half, rest): (CUdeviceptr, CUdeviceptr),
        factors: CUdeviceptr,
        mut latents: Latents,
    ) -> Result<()> {
        let (x, x_stride) = (normed.x.at, normed.x.stride as i64);
        let mut prepare =
            Prepare { x, x_stride, norm: normed.on_the_way(&self.gpu, factors), out, half, rest, units, slice, groups, unused: 0 };
        let mut arguments = [(&raw mut prepare).cast(), (&raw mut latents).cast()];
        let (kernel, together) = if latents.cache == 0 { (&self.products.prepare_rows, 1) } else { (&self.products.prepare_and_store, 2) };
        let grid = (rows as u32, together as u32, 1);
        // SAFETY: the structs mirror the kernels'; views and scratch hold `rows` rows, live rows have slots within the cache.
        unsafe { self.gpu.launch_dependent(kernel, grid, 256 * groups as u32, 0, &mut arguments[..together])? };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirrors_have_the_size_the_kernels_assert() {
        assert_eq!((size_of::<Norm>(), size_of::<Latents>(), size_of::<Prepare>()), (56, 72, 112));
    }
}
