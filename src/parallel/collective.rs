//! Collectives between ranks of one process: sums in rank order, so that every rank gets the same bits each time.

use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};

/// A meeting point of threads that gives up when a rank is lost, instead of waiting for it forever.
pub struct Gate {
    state: Mutex<GateState>,
    moved: Condvar,
    size: usize,
}

#[derive(Default)]
struct GateState {
    arrived: usize,
    generation: u64,
    lost: bool,
}

/// Why a collective failed.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("a rank of this process ended in the middle of a collective")]
pub struct RankLost;

impl Gate {
    /// For `size` ranks.
    pub fn new(size: usize) -> Self {
        Self { state: Mutex::default(), moved: Condvar::new(), size }
    }

    /// Returns once all ranks have called it.
    pub fn wait(&self) -> Result<(), RankLost> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = state.generation;
        state.arrived += 1;
        if state.arrived == self.size {
            state.arrived = 0;
            state.generation += 1;
            self.moved.notify_all();
            return Ok(());
        }
        while state.generation == generation {
            if state.lost {
                return Err(RankLost);
            }
            state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Tells the others that a rank will not come again.
    pub fn lose(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).lost = true;
        self.moved.notify_all();
    }
}

/// One rank's end of the group. Dropping it releases the others with an error.
pub struct Collective {
    rank: usize,
    gate: Arc<Gate>,
    parts: Arc<Vec<RwLock<Vec<f32>>>>,
}

impl Collective {
    /// Ends for `size` ranks, in rank order.
    pub fn group(size: usize) -> Vec<Self> {
        let gate = Arc::new(Gate::new(size));
        let parts = Arc::new((0..size).map(|_| RwLock::default()).collect::<Vec<_>>());
        (0..size).map(|rank| Self { rank, gate: gate.clone(), parts: parts.clone() }).collect()
    }

    fn share(&self, mine: &[f32]) -> Result<(), RankLost> {
        {
            let mut part = self.parts[self.rank].write().unwrap_or_else(PoisonError::into_inner);
            part.clear();
            part.extend_from_slice(mine);
        }
        self.gate.wait()
    }

    /// Replaces `x` by its sum over all ranks, added in rank order.
    pub fn all_reduce(&self, x: &mut [f32]) -> Result<(), RankLost> {
        self.share(x)?;
        for (rank, part) in self.parts.iter().enumerate() {
            let part = part.read().unwrap_or_else(PoisonError::into_inner);
            if rank == 0 {
                x.copy_from_slice(&part);
            } else {
                x.iter_mut().zip(part.iter()).for_each(|(x, part)| *x += part);
            }
        }
        self.gate.wait()
    }

    /// Puts the `width` columns of every rank side by side: row r of `out` = rank 0's row r, rank 1's row r ...
    pub fn gather_columns(&self, x: &[f32], width: usize, out: &mut [f32]) -> Result<(), RankLost> {
        self.share(x)?;
        let wide = width * self.parts.len();
        for (rank, part) in self.parts.iter().enumerate() {
            let part = part.read().unwrap_or_else(PoisonError::into_inner);
            for (to, from) in out.chunks_exact_mut(wide).zip(part.chunks_exact(width)) {
                to[rank * width..(rank + 1) * width].copy_from_slice(from);
            }
        }
        self.gate.wait()
    }
}

impl Drop for Collective {
    fn drop(&mut self) {
        self.gate.lose();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_gathers_in_rank_order_and_reports_a_lost_rank() {
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = Collective::group(3)
                .into_iter()
                .map(|end| {
                    scope.spawn(move || {
                        let rank = end.rank as f32;
                        let mut x = [rank + 1.0, 10.0 * rank];
                        end.all_reduce(&mut x).unwrap();
                        let mut wide = [0.0; 6];
                        end.gather_columns(&[rank, rank + 0.5], 1, &mut wide).unwrap();
                        let lost = end.rank == 2 || end.all_reduce(&mut [0.0; 2]).is_err();
                        (x, wide, lost)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (x, wide, lost) in results {
            assert_eq!(wide, [0.0, 1.0, 2.0, 0.5, 1.5, 2.5]);
            assert!(lost);
            assert_eq!(x, [6.0, 30.0]);
        }
    }
}
