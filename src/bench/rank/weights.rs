//! Weights made up on the card: no host, no file. Scaled so that activations keep their size and routing is spread.

use std::cell::Cell;

use crate::device::cuda::CudaDevice;
use crate::device::cuda::attention::CudaAbsorbed;
use crate::device::cuda::buffers::{CudaMatrix, CudaVector};
use crate::device::cuda::products::CudaExperts;
use crate::device::{Device, MlaShape, Result};
use crate::model::tensor::Matrix;
use crate::model::weights::{Piece, Weights};
use crate::parallel::Rank;
use half::bf16;

/// See the module.
pub struct MadeUp<'a> {
    device: &'a CudaDevice,
    seed: Cell<u64>,
}

impl<'a> MadeUp<'a> {
    /// Weights for models on `device`; every tensor gets numbers of its own.
    pub fn new(device: &'a CudaDevice) -> Self {
        Self { device, seed: Cell::new(1) }
    }

    fn seed(&self) -> u64 {
        self.seed.replace(self.seed.get() + 1)
    }

    fn random(&self, n: usize, k: usize, scale: f32) -> Result<CudaMatrix> {
        CudaMatrix::random(self.device, n, k, scale, self.seed())
    }
}

impl Weights<CudaDevice> for MadeUp<'_> {
    fn bytes(&self) -> u64 {
        0
    }

    fn matrix(&self, pieces: &[Piece]) -> Result<CudaMatrix> {
        let [_, k] = pieces[0].part_shape();
        let n = pieces.iter().map(|piece| piece.part_shape()[0]).sum();
        self.random(n, k, (k as f32).sqrt().recip())
    }

    fn table(&self, piece: &Piece) -> Result<CudaMatrix> {
        let [n, k] = piece.part_shape();
        self.random(n, k, 1.0)
    }

    fn vector(&self, name: &str, size: usize) -> Result<CudaVector> {
        let value = if name.ends_with("bias") { 0.0 } else { 1.0 };
        self.device.vector(&vec![value; size])
    }

    fn absorbed(&self, piece: &Piece, shape: MlaShape) -> Result<CudaAbsorbed> {
        let [rows, columns] = piece.part_shape();
        let mut state = self.seed();
        let scale = (columns as f32).sqrt().recip();
        let mut value = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Uniform with the wanted standard deviation.
            bf16::from_f32(((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 3f32.sqrt() * scale)
        };
        let data: Vec<bf16> = (0..rows * columns).map(|_| value()).collect();
        self.device.absorbed(Matrix { rows, columns, data: data.into() }, shape)
    }

    fn experts(&self, _: &str, count: usize, inner: usize, hidden: usize, part: Rank) -> Result<CudaExperts> {
        CudaExperts::random(self.device, count, inner / part.size, hidden, (hidden as f32).sqrt().recip(), self.seed())
    }
}
