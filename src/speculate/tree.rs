//! The draft tree of one request and round: best-first growth (DDTree, arXiv 2604.12989) from the drafter's marginals, the chain
//! and the single row as special cases, and the tree mask. The CPU device grows with it; the CUDA kernel is tested against it.

use super::budget::MAX_ROWS;
use super::top_k::{log_sum_exp, top_k};

/// Rows in verification order. Row 0 is the anchor (the last emitted token, whose KV is not written yet), parents precede
/// children, and siblings stand in decreasing probability. Row i sits at position `prefix length + depth[i]` and sees the whole
/// prefix and the rows of `ancestors[i]`. Only the first `rows` entries mean anything.
#[derive(Clone, Debug)]
pub struct Tree {
    pub rows: usize,
    pub token: [u32; MAX_ROWS],
    /// Row of the parent; `parent[0] = 0`.
    pub parent: [u8; MAX_ROWS],
    pub depth: [u8; MAX_ROWS],
    /// Bit j = row j is this row or an ancestor of it.
    pub ancestors: [u64; MAX_ROWS],
    /// Log-probability under the drafter of the path from the anchor to this row; 0 for the anchor.
    pub logprob: [f64; MAX_ROWS],
}

/// The drafter's best tokens per depth: `[depths, k]` row-major, each row best first (ties: lower id). `logprobs` are over the full
/// vocabulary. `rows - 1` candidates per depth are always enough; at depth d (from 1) `rows - d` are. Fewer can cut a tree short.
/// A candidate whose log-probability is not finite does not exist.
#[derive(Clone, Copy, Debug)]
pub struct Marginals<'a> {
    pub depths: usize,
    pub k: usize,
    pub ids: &'a [u32],
    pub logprobs: &'a [f32],
}

impl Marginals<'_> {
    fn logprob(&self, depth: usize, rank: usize) -> Option<f64> {
        let inside = (1..=self.depths).contains(&depth) && rank < self.k;
        let value = f64::from(*self.logprobs.get((depth - 1) * self.k + rank).filter(|_| inside)?);
        value.is_finite().then_some(value)
    }

    fn id(&self, depth: usize, rank: usize) -> u32 {
        self.ids[(depth - 1) * self.k + rank]
    }
}

/// A prefix that may enter the tree next: the `rank`-th token of its depth under `parent`.
#[derive(Clone, Copy)]
struct Candidate {
    logprob: f64,
    parent: u8,
    depth: u8,
    rank: u8,
}

impl Candidate {
    /// Most probable first; ties by depth, parent, rank. No two candidates share (parent, rank), so the order is total.
    fn before(&self, other: &Self) -> bool {
        let place = |c: &Self| (c.depth, c.parent, c.rank);
        self.logprob > other.logprob || (self.logprob == other.logprob && place(self) < place(other))
    }
}

impl Tree {
    /// A tree of the single row `anchor`.
    pub const fn new(anchor: u32) -> Self {
        let mut tree = Self {
            rows: 1,
            token: [0; MAX_ROWS],
            parent: [0; MAX_ROWS],
            depth: [0; MAX_ROWS],
            ancestors: [0; MAX_ROWS],
            logprob: [0.0; MAX_ROWS],
        };
        tree.token[0] = anchor;
        tree.ancestors[0] = 1;
        tree
    }

    /// Back to the single row `anchor`: plain decoding.
    pub fn root(&mut self, anchor: u32) {
        self.rows = 1;
        self.token[0] = anchor;
        self.parent[0] = 0;
        self.depth[0] = 0;
        self.ancestors[0] = 1;
        self.logprob[0] = 0.0;
    }

    /// The `rows - 1` most probable prefixes under the product of the marginals, in decreasing probability.
    ///
    /// Best-first: take the best candidate, then offer its next sibling and its first child. A sibling's weight is its elder's
    /// minus the elder's term plus its own, in f64 from f32 terms: the reference implementation's arithmetic, so that equal inputs
    /// give equal trees. Ties go by (depth, parent, rank); the reference breaks them by rank tuple, which differs only between
    /// prefixes of exactly equal weight, where either tree is optimal. A smaller budget's tree is a prefix of a larger one's.
    ///
    /// `rows` is held between 1 and `MAX_ROWS`; the tree ends short when the candidates do.
    pub fn grow(&mut self, anchor: u32, marginals: &Marginals, rows: usize) {
        self.root(anchor);
        let rows = rows.clamp(1, MAX_ROWS);
        // Every taken candidate is replaced by its sibling and adds one child, so the frontier never exceeds the rows.
        let mut frontier = [Candidate { logprob: 0.0, parent: 0, depth: 0, rank: 0 }; MAX_ROWS];
        let mut open = 0;
        if let Some(logprob) = marginals.logprob(1, 0) {
            frontier[0] = Candidate { logprob, parent: 0, depth: 1, rank: 0 };
            open = 1;
        }
        while self.rows < rows && open > 0 {
            let best = best_of(&frontier[..open]);
            let taken = frontier[best];
            let (depth, rank) = (usize::from(taken.depth), usize::from(taken.rank));
            let row = self.push(taken.parent, marginals.id(depth, rank), taken.logprob);
            match (marginals.logprob(depth, rank), marginals.logprob(depth, rank + 1)) {
                (Some(elder), Some(own)) => {
                    frontier[best] = Candidate { logprob: taken.logprob - elder + own, rank: taken.rank + 1, ..taken };
                }
                _ => {
                    open -= 1;
                    frontier[best] = frontier[open];
                }
            }
            if let Some(own) = marginals.logprob(depth + 1, 0) {
                frontier[open] = Candidate { logprob: taken.logprob + own, parent: row, depth: taken.depth + 1, rank: 0 };
                open += 1;
            }
        }
    }

    /// The drafter's best token per depth: a tree of width one with at most `rows` rows.
    pub fn chain(&mut self, anchor: u32, marginals: &Marginals, rows: usize) {
        self.root(anchor);
        for depth in 1..rows.clamp(1, MAX_ROWS) {
            let Some(own) = marginals.logprob(depth, 0) else { return };
            let parent = (depth - 1) as u8;
            self.push(parent, marginals.id(depth, 0), self.logprob[depth - 1] + own);
        }
    }

    /// Keeps the first `rows` rows (at least the anchor). Of a tree grown best-first that is the tree of the smaller budget.
    pub fn truncate(&mut self, rows: usize) {
        self.rows = self.rows.min(rows.max(1));
    }

    /// Draft tokens the drafter itself expects to be accepted: the sum of its path probabilities over all rows but the anchor
    /// (DDTree, proposition 1).
    pub fn expected(&self) -> f64 {
        self.logprob[1..self.rows].iter().map(|w| w.exp()).sum()
    }

    /// Tokens from the first draft row down to `row`, itself included, the anchor excluded: what a row's history has beyond the
    /// committed tokens. Fills `tokens` (at least `depth[row]` long) and returns the filled part.
    pub fn path_tokens<'a>(&self, row: usize, tokens: &'a mut [u32; MAX_ROWS]) -> &'a [u32] {
        let depth = usize::from(self.depth[row]);
        let mut at = row;
        for slot in tokens[..depth].iter_mut().rev() {
            *slot = self.token[at];
            at = usize::from(self.parent[at]);
        }
        &tokens[..depth]
    }

    fn push(&mut self, parent: u8, token: u32, logprob: f64) -> u8 {
        let (row, above) = (self.rows, usize::from(parent));
        self.token[row] = token;
        self.parent[row] = parent;
        self.depth[row] = self.depth[above] + 1;
        self.ancestors[row] = self.ancestors[above] | 1 << row;
        self.logprob[row] = logprob;
        self.rows += 1;
        row as u8
    }
}

fn best_of(frontier: &[Candidate]) -> usize {
    let mut best = 0;
    for (at, candidate) in frontier.iter().enumerate().skip(1) {
        if candidate.before(&frontier[best]) {
            best = at;
        }
    }
    best
}

/// Marginals of `depths = logits.len() / vocab` rows of draft logits: per depth the `k` best ids and their log-probabilities over
/// the full vocabulary, into `ids` and `logprobs` (`[depths, k]` both). Top-k on the f32 logits, ties to the lower id; the
/// log-sum-exp in f64, rounded to f32 once. Where the vocabulary has fewer than `k` tokens (or numbers) the rest is filled with
/// `-inf`, which growth skips. Draft logits take no temperature, whatever the request's.
pub fn marginals_from_logits<'a>(logits: &[f32], vocab: usize, k: usize, ids: &'a mut [u32], logprobs: &'a mut [f32]) -> Marginals<'a> {
    let depths = logits.len() / vocab.max(1);
    let filled = depths * k;
    let (ids, logprobs) = (&mut ids[..filled], &mut logprobs[..filled]);
    for depth in 0..depths {
        let row = &logits[depth * vocab..(depth + 1) * vocab];
        let (ids, logprobs) = (&mut ids[depth * k..(depth + 1) * k], &mut logprobs[depth * k..(depth + 1) * k]);
        let found = top_k(row, ids, logprobs);
        let total = log_sum_exp(row);
        for value in &mut logprobs[..found] {
            *value = (f64::from(*value) - total) as f32;
        }
        ids[found..].fill(0);
        logprobs[found..].fill(f32::NEG_INFINITY);
    }
    Marginals { depths, k, ids, logprobs }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
