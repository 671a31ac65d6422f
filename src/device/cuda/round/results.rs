//! What the host reads of a round: one packed copy, and what it means.

use cudarc::driver::result;

use super::super::device::CudaDevice;
use super::super::error::During;
use super::CudaRound;
use super::layout::*;
use super::memory::{result_bytes, result_places};
use super::plan::Planned;
use crate::device::{DeviceError, HostTree, Outcome, Result};
use crate::engine::contract::TokenLogprob;
use crate::speculate::budget::MAX_ROWS;
use crate::speculate::sampling::BadLogits;
use crate::speculate::tree::Tree;

impl CudaRound {
    /// Outcomes of the planned shares, in order. The one wait of a round.
    pub fn read(&mut self, device: &CudaDevice) -> Result<Vec<Outcome>> {
        if !std::mem::take(&mut self.unread) {
            return Ok(Vec::new());
        }
        let (shares, gpu) = (self.planned.len(), &device.gpu);
        let bytes = result_bytes(shares, self.rows, if self.sizes.reports { self.rows } else { 0 });
        // SAFETY: the result is at least that long on both sides, and the copy is awaited below.
        unsafe {
            let target = self.result.target(bytes);
            result::memcpy_dtoh_async(target, self.memory.pointers.result, gpu.stream.cu_stream()).during("reading a round")?;
        }
        gpu.synchronize()?;
        self.staging.clear();
        let (records_at, reports_at) = result_places(shares, self.rows);
        let all = self.result.bytes(bytes);
        let results: &[ShareResult] = bytemuck::cast_slice(&all[..records_at]);
        let records: &[RowResult] = bytemuck::cast_slice(&all[records_at..records_at + self.rows * size_of::<RowResult>()]);
        let reports: &[Report] = if self.sizes.reports { bytemuck::cast_slice(&all[reports_at..]) } else { &[] };
        let mut outcomes = Vec::with_capacity(shares);
        for (planned, result) in self.planned.iter().zip(results) {
            let mut outcome = decode(planned, result, &records[planned.first..][..planned.share.rows], reports, self.limits.vocab)?;
            if self.begun {
                (outcome.path, outcome.tree) = (Vec::new(), None);
            }
            if let Some(running) = &mut self.requests[planned.share.request] {
                running.length += if self.begun { 0 } else { result.accepted as usize };
                running.planned = 0;
            }
            outcomes.push(outcome);
        }
        Ok(outcomes)
    }

    /// The trees of the planned shares. Waits for the card.
    pub fn read_trees(&self, device: &CudaDevice) -> Result<Vec<HostTree>> {
        let empty = TreeData { rows: 0, pad: 0, token: [0; 64], parent: [0; 64], depth: [0; 64], ancestors: [0; 64], logprob: [0.0; 64] };
        let mut trees = vec![empty; self.planned.len()];
        let gpu = &device.gpu;
        // SAFETY: the card holds a tree for every request, and the copy is awaited below.
        unsafe { result::memcpy_dtoh_async(&mut trees, self.memory.pointers.trees, gpu.stream.cu_stream()).during("reading trees")? };
        gpu.synchronize()?;
        self.staging.clear();
        let host = |tree: &TreeData| {
            let rows = (tree.rows as usize).min(MAX_ROWS);
            HostTree { tokens: tree.token[..rows].to_vec(), parents: tree.parent[..rows].to_vec() }
        };
        Ok(trees.iter().map(host).collect())
    }
}

fn decode(planned: &Planned, result: &ShareResult, records: &[RowResult], reports: &[Report], vocab: usize) -> Result<Outcome> {
    let (rows, accepted) = (result.tree_rows as usize, result.accepted as usize);
    if rows == 0 || rows > records.len() || accepted > rows {
        let wanted = records.len();
        return Err(DeviceError(format!("a round came back with {rows} rows, {accepted} of them accepted, wanted 1 to {wanted}")));
    }
    let mut tree = Tree::new(records[0].tree_token);
    tree.rows = rows;
    for (row, record) in records[..rows].iter().enumerate().skip(1) {
        let above = usize::from(record.parent).min(row - 1);
        tree.token[row] = record.tree_token;
        tree.parent[row] = above as u8;
        tree.depth[row] = tree.depth[above] + 1;
        tree.ancestors[row] = tree.ancestors[above] | 1 << row;
        tree.logprob[row] = record.logprob;
    }
    let path: Vec<u8> = records[..accepted].iter().map(|record| record.path).collect();
    let report = |&row: &u8| reports.get(result.first as usize + usize::from(row)).map(token_logprob);
    Ok(Outcome {
        tokens: records[..accepted].iter().map(|record| record.token).collect(),
        logprobs: if planned.reports { path.iter().filter_map(report).collect() } else { Vec::new() },
        path,
        tree: Some(tree),
        fault: fault(result, vocab).map(|bad| bad.to_string()),
    })
}

/// The kinds of `enum Fault` in kernels/round/state.cuh.
fn fault(result: &ShareResult, vocab: usize) -> Option<BadLogits> {
    match result.fault {
        0 => None,
        1 => Some(BadLogits::NotFinite { token: result.fault_token, value: result.fault_value }),
        2 => Some(BadLogits::NothingAllowed),
        _ => Some(BadLogits::BiasOutside { token: result.fault_token, vocab }),
    }
}

pub(super) fn token_logprob(report: &Report) -> TokenLogprob {
    let found = (report.found as usize).min(report.ids.len());
    TokenLogprob {
        token: report.token,
        logprob: report.logprob,
        rank: report.rank,
        top: report.ids[..found].iter().copied().zip(report.logprobs).collect(),
    }
}
