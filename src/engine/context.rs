//! How far the drafter's context of a request reaches. Extending it costs a few per cent of a round, so a request that does not draft
//! for the time being has the taps of what it accepts kept instead, and a round that drafts extends the context by all of them in
//! one chunk. The scheduler asks and tells this around every round; the executor holds the taps.

/// An anchor whose taps are kept: row `row` of the pass, at `position` of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    pub row: usize,
    pub request: usize,
    pub position: usize,
}

/// Positions of a request, `count` from `start` on, that the drafter's context lacks and whose taps are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    pub request: usize,
    pub start: usize,
    pub count: usize,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct DraftContext {
    request: usize,
    /// Tokens whose taps can be kept at most.
    most: usize,
    /// Positions in the context, from the first on. The taps of those up to the anchor are kept.
    known: usize,
}

impl DraftContext {
    /// `most` as of `Executor::kept_taps`, at least 1.
    pub fn new(request: usize, most: usize) -> Self {
        Self { request, most, known: 0 }
    }

    /// Prefill has extended the context by the whole prompt.
    pub fn prompt(&mut self, tokens: usize) {
        self.known = tokens;
    }

    /// Before a round: what the context is to be extended by. `committed`: the anchor's position. `drafting`: somebody drafts in this
    /// round; the accepted rows of all who take part extend their contexts then, so that all need to be up to date. Otherwise it
    /// is time when no further taps can be kept.
    pub fn extend(&mut self, committed: usize, drafting: bool) -> Option<Missing> {
        let count = committed - self.known;
        if count == 0 || !(drafting || count == self.most) {
            return None;
        }
        let missing = Missing { request: self.request, start: self.known, count };
        self.known = committed;
        Some(missing)
    }

    /// A round in which nobody drafted: the anchor in row `row` of the pass is kept.
    pub fn keep(&self, row: usize, committed: usize) -> Kept {
        Kept { row, request: self.request, position: committed }
    }

    /// After a round that accepted so many rows.
    pub fn advance(&mut self, accepted: usize, drafting: bool) {
        if drafting {
            self.known += accepted;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A ring of `most` rows, as the executor keeps it: whatever the order of rounds, a round that drafts finds every position in
        /// the context, each taken from the ring before it was overwritten.
        #[test]
        fn a_round_that_drafts_finds_every_position(
            prompt in 1usize..20,
            most in 1usize..12,
            rounds in prop::collection::vec((prop::bool::weighted(0.2), 1usize..9), 0..120),
        ) {
            let mut context = DraftContext::new(3, most);
            context.prompt(prompt);
            let (mut ring, mut held): (Vec<usize>, Vec<usize>) = (vec![usize::MAX; most], (0..prompt).collect());
            let mut committed = prompt;
            for (drafting, accepted) in rounds {
                if let Some(missing) = context.extend(committed, drafting) {
                    prop_assert!(missing.request == 3 && (1..=most).contains(&missing.count));
                    held.extend((missing.start..missing.start + missing.count).map(|position| ring[position % most]));
                }
                let accepted = if drafting { accepted } else { 1 };
                if drafting {
                    prop_assert_eq!(&held, &(0..committed).collect::<Vec<_>>());
                    held.extend(committed..committed + accepted);
                } else {
                    let kept = context.keep(0, committed);
                    ring[kept.position % most] = kept.position;
                }
                context.advance(accepted, drafting);
                committed += accepted;
            }
        }
    }
}
