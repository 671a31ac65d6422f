//! Which rows an operation works on.

use crate::speculate::budget::MAX_ROWS;

/// Consecutive rows of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Group {
    pub request: usize,
    /// First row and number of rows.
    pub first: usize,
    pub rows: usize,
    /// Committed tokens before these rows: keys that every one of them sees.
    pub prefix: usize,
}

/// Rows of one pass. Allocated once for its capacity.
#[derive(Default)]
pub struct CpuRows {
    pub tokens: Vec<u32>,
    pub positions: Vec<u32>,
    /// Cache slot that each row's latent (or context) is written to.
    pub slots: Vec<u32>,
    /// Bit j = row j of the same group is this row or an ancestor; prompt chunks leave it empty and are causal.
    pub ancestors: Vec<u64>,
    pub groups: Vec<Group>,
    /// Slots of the prefix of each group, position after position, one group after the other.
    pub prefix_slots: Vec<u32>,
    /// Where each group's prefix slots begin.
    pub prefix_starts: Vec<usize>,
    /// Rows of another buffer these rows came from (accepted rows).
    pub sources: Vec<u32>,
}

impl CpuRows {
    pub fn with_capacity(rows: usize) -> Self {
        Self {
            tokens: Vec::with_capacity(rows),
            positions: Vec::with_capacity(rows),
            slots: Vec::with_capacity(rows),
            ancestors: Vec::with_capacity(rows),
            sources: Vec::with_capacity(rows),
            ..Self::default()
        }
    }

    pub fn len(&self) -> usize {
        self.positions.len()
    }

    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.ancestors.clear();
        self.groups.clear();
        self.prefix_slots.clear();
        self.prefix_starts.clear();
        self.sources.clear();
    }

    pub fn push(&mut self, token: u32, position: usize, slot: u32) {
        self.tokens.push(token);
        self.positions.push(position as u32);
        self.slots.push(slot);
    }

    /// Opens a group at the current end whose prefix lies in `prefix`.
    pub fn open_group(&mut self, request: usize, prefix: &[u32]) {
        self.prefix_starts.push(self.prefix_slots.len());
        self.prefix_slots.extend_from_slice(prefix);
        self.groups.push(Group { request, first: self.len(), rows: 0, prefix: prefix.len() });
    }

    /// Closes the group opened last.
    pub fn close_group(&mut self) {
        let end = self.len();
        if let Some(group) = self.groups.last_mut() {
            group.rows = end - group.first;
            debug_assert!(self.ancestors.is_empty() || group.rows <= MAX_ROWS);
        }
    }

    /// Prefix slots of group `index`.
    pub fn prefix(&self, index: usize) -> &[u32] {
        let start = self.prefix_starts[index];
        &self.prefix_slots[start..start + self.groups[index].prefix]
    }
}
