//! Recorded rounds: one CUDA graph per bucket and verify mode, captured the first time such a round comes along and replayed from
//! then on. What changes from round to round is device data, so a replay is one launch on the host.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::error::During;
use super::gpu::Gpu;
use crate::device::{Bucket, Result, Verify};

/// See the module.
#[derive(Default)]
pub struct Graphs {
    recorded: RefCell<HashMap<(Bucket, Verify), CudaGraph>>,
    /// Set once buffers have their final size: before, their addresses may still change.
    settled: Cell<bool>,
}

impl Graphs {
    /// From now on graphs are captured: nothing that a launch points at moves any more.
    pub fn settle(&self) {
        self.settled.set(true);
    }

    /// Replays the graph of `bucket`, capturing it from `body` if there is none; without a bucket, or before settling, runs `body`.
    pub fn run(&self, gpu: &Gpu, bucket: Option<Bucket>, verify: Verify, body: impl FnOnce() -> Result<()>) -> Result<()> {
        let Some(bucket) = bucket.filter(|_| self.settled.get()) else { return body() };
        if let Some(graph) = self.recorded.borrow().get(&(bucket, verify)) {
            return Ok(graph.launch().during("replaying a round")?);
        }
        let recorded = gpu.alone(|| -> Result<_> {
            let graph = capture(gpu, body)?;
            // Else the first launch would do it, when a collective may be in flight.
            if let (Some(graph), true) = (&graph, gpu.peers.is_some()) {
                graph.upload().during("uploading a recorded round")?;
                gpu.synchronize()?;
            }
            Ok(graph)
        })?;
        if let Some(graph) = recorded {
            graph.launch().during("starting a recorded round")?;
            self.recorded.borrow_mut().insert((bucket, verify), graph);
        }
        Ok(())
    }
}

/// Captures what `body` enqueues. `None` when it enqueued nothing.
fn capture(gpu: &Gpu, body: impl FnOnce() -> Result<()>) -> Result<Option<CudaGraph>> {
    gpu.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).during("recording a round")?;
    let done = body();
    // A capture must be ended even when recording failed; the error of the body is the one that says why.
    let graph = gpu.stream.end_capture(CUgraphInstantiate_flags(0)).during("ending the recording of a round");
    done?;
    Ok(graph?)
}

/// Microseconds of one replay of what `body` enqueues: the median of `repeats` after two that are not counted.
pub fn timed(gpu: &Gpu, repeats: usize, body: impl FnOnce() -> Result<()>) -> Result<f64> {
    let Some(graph) = capture(gpu, body)? else { return Ok(0.0) };
    let mut times = Vec::with_capacity(repeats);
    for _ in 0..repeats + 2 {
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        let start = gpu.stream.record_event(flags).during("recording an event")?;
        graph.launch().during("replaying")?;
        let end = gpu.stream.record_event(flags).during("recording an event")?;
        times.push(f64::from(start.elapsed_ms(&end).during("timing")?) * 1e3);
    }
    gpu.synchronize()?;
    let mut counted = times.split_off(2);
    counted.sort_by(f64::total_cmp);
    Ok(counted[counted.len() / 2])
}
