//! Which tokens a request has seen, for the penalties. One `Seen` per request that has any; the engine feeds it the prompt and
//! every emitted token, and a tree row adds the tokens of its own path, so that each row is penalised by its own branch.

/// Tokens of the prompt and counts of generated tokens. Sized once by the vocabulary; reusable.
#[derive(Clone, Debug)]
pub struct Seen {
    output: Vec<u32>,
    listed: Vec<bool>,
    /// Every token of prompt or output once.
    distinct: Vec<u32>,
}

impl Seen {
    pub fn new(vocab: usize) -> Self {
        Self { output: vec![0; vocab], listed: vec![false; vocab], distinct: Vec::with_capacity(vocab) }
    }

    /// Forgets everything and takes in a new prompt. Ids outside the vocabulary are ignored: no logit exists for them.
    pub fn reset(&mut self, prompt: &[u32]) {
        for &token in &self.distinct {
            self.output[token as usize] = 0;
            self.listed[token as usize] = false;
        }
        self.distinct.clear();
        for &token in prompt {
            self.list(token);
        }
    }

    /// A token was emitted.
    pub fn commit(&mut self, token: u32) {
        if self.list(token) {
            self.output[token as usize] += 1;
        }
    }

    fn list(&mut self, token: u32) -> bool {
        let Some(listed) = self.listed.get_mut(token as usize) else { return false };
        if !std::mem::replace(listed, true) {
            self.distinct.push(token);
        }
        true
    }
}

/// What came before one tree row: everything committed (the anchor included) and the draft tokens of the row's own path.
#[derive(Clone, Copy, Debug)]
pub struct History<'a> {
    pub seen: &'a Seen,
    /// Draft tokens from below the anchor down to the row itself (`Tree::path_tokens`); empty for the anchor's row.
    pub path: &'a [u32],
}

impl History<'_> {
    /// Calls `visit(token, times generated)` once for every token of prompt, output or path; 0 = only in the prompt.
    pub fn for_each(&self, mut visit: impl FnMut(u32, u32)) {
        let on_path = |token: u32| self.path.iter().filter(|&&other| other == token).count() as u32;
        for &token in &self.seen.distinct {
            visit(token, self.seen.output[token as usize] + on_path(token));
        }
        for (at, &token) in self.path.iter().enumerate() {
            let listed = self.seen.listed.get(token as usize).copied().unwrap_or(true);
            if !listed && !self.path[..at].contains(&token) {
                visit(token, on_path(token));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn a_row_sees_what_committing_its_path_would_show(
            prompt in prop::collection::vec(0u32..12, 0..8),
            output in prop::collection::vec(0u32..12, 0..8),
            path in prop::collection::vec(0u32..12, 0..8),
        ) {
            let mut expected = BTreeMap::new();
            prompt.iter().for_each(|&token| { expected.insert(token, 0); });
            output.iter().chain(&path).for_each(|&token| *expected.entry(token).or_insert(0) += 1);
            let mut seen = Seen::new(12);
            seen.reset(&[1, 2, 3]);
            seen.commit(4);
            seen.reset(&prompt);
            output.iter().for_each(|&token| seen.commit(token));
            let mut found = BTreeMap::new();
            History { seen: &seen, path: &path }.for_each(|token, count| assert!(found.insert(token, count).is_none()));
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn ignores_ids_outside_the_vocabulary() {
        let mut seen = Seen::new(2);
        seen.reset(&[7]);
        seen.commit(9);
        History { seen: &seen, path: &[8] }.for_each(|_, _| panic!("nothing was seen"));
    }
}
