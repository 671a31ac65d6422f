//! Splitting an index range over the rayon pool, and the shared output that its pieces write without overlapping.
//!
//! Every output element is computed by exactly one piece and by the same instructions wherever the cuts fall, so results do not
//! depend on the number of threads.

use std::marker::PhantomData;
use std::ops::Range;

/// Calls `work` on consecutive pieces of `0..items`, at most one piece per thread and none smaller than `grain`.
pub fn split(items: usize, grain: usize, work: &(impl Fn(Range<usize>) + Sync)) {
    if items == 0 {
        return;
    }
    let pieces = rayon::current_num_threads().min(items.div_ceil(grain.max(1))).max(1);
    halve(0, pieces, items, pieces, work);
}

/// The same with several pieces per thread, for work whose items cost differently.
pub fn split_fine(items: usize, grain: usize, work: &(impl Fn(Range<usize>) + Sync)) {
    if items == 0 {
        return;
    }
    let threads = rayon::current_num_threads();
    let wanted = if threads == 1 { 1 } else { threads * 4 };
    let pieces = wanted.min(items.div_ceil(grain.max(1))).max(1);
    halve(0, pieces, items, pieces, work);
}

/// Pieces `first..last` of `pieces` equal parts of `0..items`, by a tree of joins.
fn halve(first: usize, last: usize, items: usize, pieces: usize, work: &(impl Fn(Range<usize>) + Sync)) {
    if last - first == 1 {
        let range = first * items / pieces..last * items / pieces;
        if !range.is_empty() {
            work(range);
        }
        return;
    }
    let middle = (first + last) / 2;
    rayon::join(|| halve(first, middle, items, pieces, work), || halve(middle, last, items, pieces, work));
}

/// A mutable slice that several threads write at places that do not overlap.
#[derive(Clone, Copy)]
pub struct SharedMut<'a, T> {
    data: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer comes from an exclusive borrow that outlives the value, and `at` and `range` ask their callers for disjoint use.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Shares a slice for as long as it is borrowed.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { data: slice.as_mut_ptr(), len: slice.len(), life: PhantomData }
    }

    /// Elements of the slice.
    #[allow(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Where element `at` lies.
    ///
    /// # Safety
    /// `at` is inside the slice, and no two threads may use the same element.
    #[inline(always)]
    pub unsafe fn pointer(&self, at: usize) -> *mut T {
        // SAFETY: in bounds, says the caller.
        unsafe { self.data.add(at) }
    }

    /// `len` elements from `start`.
    ///
    /// # Safety
    /// No other thread may hold a range that overlaps this one.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn range(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start + len <= self.len, "range {start}+{len} outside {}", self.len);
        // SAFETY: in bounds, and the caller keeps ranges disjoint.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }
}
