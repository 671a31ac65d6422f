//! The pass over a prompt's chunk, which leaves out what nobody reads. Called by the executor.
//!
//! The latents of every row of every layer are read later, so that every row needs the outputs of every layer but the last. What the
//! last layer does beyond latents is for rows whose outputs somebody reads: the drafter where it taps that layer, log-probabilities
//! of the prompt, and the prompt's last row.

use super::{Form, Target};
use crate::device::{Device, Residual, Result};

/// Who reads the outputs of a chunk's rows, beside the sampler, which reads the prompt's last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readers {
    /// The drafter reads `tapped`.
    pub drafter: bool,
    /// Log-probabilities of the prompt are made from `x`.
    pub logprobs: bool,
}

impl<D: Device> Target<D> {
    /// One chunk of a prompt. `last`: the prompt ends with this chunk; where the device can, its last row goes through the last
    /// layer on its own, attending in absorbed form like every row that a token is sampled from. So the logits of
    /// [`Self::head_of_prompt`] are the same whoever else reads.
    pub fn prefill(
        &mut self,
        device: &D,
        rows: &D::Rows,
        latents: &mut D::Latents,
        readers: Readers,
        last: Option<&mut D::Rows>,
    ) -> Result<()> {
        let end = self.layers.len() - 1;
        let (mut alone, among) = if D::LAST_ROW_IS_ROOT { (last, None) } else { (None, last) };
        let all = among.is_some() || readers.logprobs || (readers.drafter && self.taps[end].is_some());
        self.begin(device, rows)?;
        for index in 0..end {
            self.project_rows(device, index, rows, latents, index > 0, true)?;
            self.tap_before(device, index, rows, readers)?;
            self.finish_layer(device, index, rows, Form::Direct, latents)?;
        }
        self.project_rows(device, end, rows, latents, end > 0, all)?;
        self.tap_before(device, end, rows, readers)?;
        if let Some(last) = &mut alone {
            device.last_row(&self.mid, rows, &mut self.last_mid, last)?;
            self.project_last(device, last, latents)?;
        }
        if all {
            self.finish_layer(device, end, rows, Form::Direct, latents)?;
            self.settle(device, rows)?;
            self.tap_before(device, end + 1, rows, readers)?;
        }
        if let Some(last) = among {
            device.last_row(&self.x, rows, &mut self.last, last)?;
        }
        if let Some(last) = alone {
            self.swap_last();
            self.finish_layer(device, end, last, Form::Absorbed, latents)?;
            self.settle(device, last)?;
            self.swap_last();
        }
        Ok(())
    }

    /// Keeps the output of the layer before `index` for the drafter.
    fn tap_before(&mut self, device: &D, index: usize, rows: &D::Rows, readers: Readers) -> Result<()> {
        match index.checked_sub(1).filter(|_| readers.drafter) {
            Some(before) => self.tap_of(device, before, rows, index == self.layers.len()),
            None => Ok(()),
        }
    }

    /// Queries of the prompt's last row for the last layer, from its stream in `last_mid`. Its latents are written again, to the same
    /// bits.
    fn project_last(&mut self, device: &D, last: &D::Rows, latents: &mut D::Latents) -> Result<()> {
        let end = self.layers.len() - 1;
        let layer = &self.layers[end];
        let input = Residual {
            x: &self.last_mid,
            added: None,
            sum: &mut self.last,
            norm: &layer.input_norm,
            eps: self.eps,
            normed: &mut self.normed,
        };
        device.mla_project_normed(&layer.projection, self.shape, input, last, latents, end, &mut self.last_q)
    }

    /// The prompt's last row takes the place of the rows of a pass, and back.
    fn swap_last(&mut self) {
        std::mem::swap(&mut self.x, &mut self.last);
        std::mem::swap(&mut self.mid, &mut self.last_mid);
        std::mem::swap(&mut self.q, &mut self.last_q);
    }
}
