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
    /// Empty, with room for so many rows.
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

    /// Rows in hand.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// Forgets all rows and groups.
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

    /// Adds a row to the group opened last.
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

    /// The last row of the last group, as a tree of its own: everything before it is its prefix.
    pub fn last_as_root(&self, out: &mut Self) {
        out.clear();
        let (Some(group), Some(row)) = (self.groups.last(), self.len().checked_sub(1)) else { return };
        let own = &self.slots[group.first..row];
        let prefix: Vec<u32> = self.prefix(self.groups.len() - 1).iter().chain(own).copied().collect();
        out.open_group(group.request, &prefix);
        out.push(self.tokens[row], self.positions[row] as usize, self.slots[row]);
        out.ancestors.push(1);
        out.close_group();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_row_as_a_root_has_everything_before_it_as_its_prefix() {
        let (mut rows, mut last) = (CpuRows::default(), CpuRows::default());
        rows.open_group(3, &[40, 41]);
        (0..3).for_each(|i| rows.push(100 + i, 2 + i as usize, 50 + i));
        rows.close_group();
        for _ in 0..2 {
            rows.last_as_root(&mut last);
        }
        assert_eq!((last.tokens.as_slice(), last.positions.as_slice(), last.slots.as_slice()), (&[102][..], &[4][..], &[52][..]));
        assert_eq!((last.prefix(0), last.ancestors.as_slice()), (&[40, 41, 50, 51][..], &[1][..]));
        assert_eq!(last.groups, [Group { request: 3, first: 0, rows: 1, prefix: 4 }]);
    }
}
