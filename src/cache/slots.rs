//! KV slots, handed out in aligned blocks of 16 so that a kernel can fetch a block with one copy. The engine owns one allocator; a
//! request holds its blocks from admission to its end.

/// Slots of a block.
pub const BLOCK: usize = 16;

/// Free blocks of a cache of a fixed number of slots.
pub struct Slots {
    total: usize,
    /// Blocks by number, the next one to give out last.
    free: Vec<u32>,
}

/// The slots of one request, position after position. Returned to `Slots::give_back`.
#[derive(Debug)]
pub struct Lease {
    blocks: Vec<u32>,
}

impl Lease {
    /// The slot of every position the lease covers.
    pub fn slots(&self) -> Vec<u32> {
        self.blocks.iter().flat_map(|block| (0..BLOCK as u32).map(move |i| block * BLOCK as u32 + i)).collect()
    }

    /// Tokens that fit the lease.
    pub fn tokens(&self) -> usize {
        self.blocks.len() * BLOCK
    }
}

impl Slots {
    /// `slots` is rounded down to whole blocks.
    pub fn new(slots: usize) -> Self {
        let blocks = slots / BLOCK;
        Self { total: blocks, free: (0..blocks as u32).rev().collect() }
    }

    /// Slots for `tokens` positions, or `None` while too few are free.
    pub fn take(&mut self, tokens: usize) -> Option<Lease> {
        let wanted = tokens.div_ceil(BLOCK);
        if wanted > self.free.len() {
            return None;
        }
        let blocks = self.free.split_off(self.free.len() - wanted);
        Some(Lease { blocks: blocks.into_iter().rev().collect() })
    }

    /// Takes blocks back; the next lease gets them first.
    pub fn give_back(&mut self, lease: Lease) {
        self.free.extend(lease.blocks.into_iter().rev());
        debug_assert!(self.free.len() <= self.total);
    }

    /// Slots in all.
    pub fn total(&self) -> usize {
        self.total * BLOCK
    }

    /// Slots that are leased.
    pub fn used(&self) -> usize {
        (self.total - self.free.len()) * BLOCK
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_slot_is_held_twice_and_none_is_lost(sizes in prop::collection::vec((1usize..200, any::<bool>()), 1..60)) {
            let mut slots = Slots::new(1024 + 5);
            let mut held: Vec<Lease> = Vec::new();
            for (size, release) in sizes {
                if release && !held.is_empty() {
                    let lease = held.swap_remove(size % held.len());
                    slots.give_back(lease);
                } else if let Some(lease) = slots.take(size) {
                    prop_assert!(lease.tokens() >= size && lease.tokens() < size + BLOCK);
                    held.push(lease);
                } else {
                    prop_assert!(slots.total() - slots.used() < size.next_multiple_of(BLOCK));
                }
                let all: Vec<u32> = held.iter().flat_map(Lease::slots).collect();
                let distinct: HashSet<u32> = all.iter().copied().collect();
                prop_assert_eq!(all.len(), distinct.len());
                prop_assert_eq!(all.len(), slots.used());
                prop_assert!(all.iter().all(|&slot| (slot as usize) < slots.total()));
            }
            held.into_iter().for_each(|lease| slots.give_back(lease));
            prop_assert_eq!(slots.used(), 0);
        }

        #[test]
        fn blocks_are_aligned(tokens in 1usize..100) {
            let lease = Slots::new(1024).take(tokens).unwrap();
            for block in lease.slots().chunks_exact(BLOCK) {
                prop_assert!(block[0].is_multiple_of(BLOCK as u32));
                prop_assert!(block.windows(2).all(|pair| pair[1] == pair[0] + 1));
            }
        }
    }
}
