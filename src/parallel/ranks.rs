//! Ranks of one process: rank 0 runs on the engine's own thread, the others on threads that repeat every command.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use crate::device::identity::DeviceIdentity;
use crate::device::{Device, DeviceError, HostTree, Outcome, Result};
use crate::engine::contract::{LayerDiff, TokenLogprob};
use crate::engine::executor::{Command, Executor};

/// Builds one rank's executor on the thread that will run it.
pub type Build<D> = dyn Fn(usize) -> Result<Executor<D>> + Send + Sync;

/// All ranks behind one front.
pub struct Ranks<D: Device> {
    first: Executor<D>,
    others: Vec<Other>,
}

struct Other {
    commands: Sender<Command>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl<D: Device> Ranks<D> {
    /// Starts `size` ranks; those beyond the first get `threads` CPU threads each, the first works on the caller's pool. Ranks load
    /// at the same time; the first error of any is returned.
    pub fn start(size: usize, threads: usize, build: Arc<Build<D>>) -> Result<Self> {
        let (report, loaded) = channel();
        let others: Vec<Other> = (1..size)
            .map(|rank| {
                let (commands, inbox) = channel::<Command>();
                let (build, report) = (build.clone(), report.clone());
                let thread = std::thread::Builder::new().name(format!("rank-{rank}")).spawn(move || {
                    let _pool = pool(threads)?;
                    let mut executor = match build(rank) {
                        Ok(executor) => executor,
                        Err(error) => {
                            let _ = report.send(Err(error.clone()));
                            return Err(error);
                        }
                    };
                    let _ = report.send(Ok(()));
                    drop(report);
                    for command in inbox {
                        executor.apply(&command)?;
                    }
                    Ok(())
                });
                let thread = thread.map_err(|error| DeviceError(format!("no thread for rank {rank}: {error}")))?;
                Ok(Other { commands, thread: Some(thread) })
            })
            .collect::<Result<_>>()?;
        drop(report);
        let first = build(0)?;
        for _ in 1..size {
            loaded.recv().map_err(|_| DeviceError("a rank ended while loading".into()))??;
        }
        Ok(Self { first, others })
    }

    /// Does a command on every rank; returns when the first rank has done its part.
    pub fn apply(&mut self, command: Command) -> Result<()> {
        self.tell(&command)?;
        self.first.apply(&command)
    }

    fn tell(&self, command: &Command) -> Result<()> {
        let gone = |_| DeviceError("a rank has ended".into());
        self.others.iter().try_for_each(|other| other.commands.send(command.clone()).map_err(gone))
    }

    /// The trees of the round in hand, from the first rank: all grow the same.
    pub fn read_trees(&self) -> Result<Vec<HostTree>> {
        self.first.read_trees()
    }

    /// Ends the round on every rank and returns what the first has read.
    pub fn read_round(&mut self) -> Result<Vec<Outcome>> {
        self.tell(&Command::Read)?;
        self.first.read_round()
    }

    /// Log-probabilities of prompt tokens since the last call, from the first rank.
    pub fn take_prompt_logprobs(&mut self) -> Vec<TokenLogprob> {
        self.first.take_prompt_logprobs()
    }

    /// Worst differences by layer since the last call, of the first rank.
    pub fn take_validation(&self) -> Vec<LayerDiff> {
        self.first.take_validation()
    }

    /// See [`Executor::kept_taps`]: the same on every rank.
    pub fn kept_taps(&self) -> usize {
        self.first.kept_taps()
    }

    /// What rank 0 computes on.
    pub fn identity(&self) -> DeviceIdentity {
        self.first.device.identity()
    }

    /// See [`Device::allocations`], of rank 0.
    pub fn allocations(&self) -> u64 {
        self.first.device.allocations()
    }

    /// Rank 0.
    pub fn first(&mut self) -> &mut Executor<D> {
        &mut self.first
    }
}

impl<D: Device> Drop for Ranks<D> {
    fn drop(&mut self) {
        for other in &mut self.others {
            // Closing the channel ends the rank; its thread is joined so that its memory is free afterwards.
            let (closed, _) = channel();
            other.commands = closed;
            if let Some(thread) = other.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

/// A rayon pool whose first thread is the caller's: while it lives, everything this thread splits runs on it, without a hand-over.
/// A thread can belong to one pool only.
pub fn pool(threads: usize) -> Result<rayon::ThreadPool> {
    let builder = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).use_current_thread();
    builder.thread_name(|at| format!("cpu-{at}")).build().map_err(|error| DeviceError(format!("no CPU threads: {error}")))
}
