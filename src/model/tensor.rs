//! Views of a checkpoint's tensors as the loader of a device gets them, and their cut over tensor-parallel ranks.

use std::borrow::Cow;
use std::ops::Range;

use half::bf16;

use super::int4;

/// How a tensor is spread over ranks: rank r of n holds part r of n equal parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cut {
    /// Every rank holds all of it.
    Whole,
    /// Output rows.
    Rows,
    /// Input columns; the ranks' products are summed.
    Columns,
    /// Read at load and held by no rank.
    NotHeld,
}

impl Cut {
    /// Bytes one of `ranks` ranks holds of a tensor of this many bytes.
    pub fn bytes_per_rank(self, bytes: u64, ranks: usize) -> u64 {
        match self {
            Self::Whole => bytes,
            Self::Rows | Self::Columns => bytes / ranks as u64,
            Self::NotHeld => 0,
        }
    }

    fn ranges(self, rows: usize, columns: usize, rank: usize, ranks: usize) -> (Range<usize>, Range<usize>) {
        match self {
            Self::Whole | Self::NotHeld => (0..rows, 0..columns),
            Self::Rows => (part(rows, rank, ranks), 0..columns),
            Self::Columns => (0..rows, part(columns, rank, ranks)),
        }
    }
}

/// Part `rank` of `size` elements cut into `ranks` equal parts.
///
/// # Panics
/// When `size` does not divide; `TargetConfig::tp_problems` refuses such a number of ranks beforehand.
pub fn part(size: usize, rank: usize, ranks: usize) -> Range<usize> {
    assert!(rank < ranks && size.is_multiple_of(ranks), "{size} elements over {ranks} ranks");
    let each = size / ranks;
    rank * each..(rank + 1) * each
}

/// A bf16 matrix, row-major `[rows, columns]` (output, input).
#[derive(Clone, Debug)]
pub struct Matrix<'a> {
    pub rows: usize,
    pub columns: usize,
    /// Borrowed from the file unless it had to be copied for alignment or was cut by columns.
    pub data: Cow<'a, [bf16]>,
}

impl<'a> Matrix<'a> {
    /// One row, `columns` values.
    pub fn row(&self, row: usize) -> &[bf16] {
        &self.data[row * self.columns..][..self.columns]
    }

    /// As [`Int4Matrix::fetch`].
    #[must_use]
    pub fn fetch(self) -> Self {
        if let Cow::Borrowed(data) = self.data {
            will_need(bytemuck::cast_slice(data));
        }
        self
    }

    /// The part of a rank.
    pub fn cut(&self, cut: Cut, rank: usize, ranks: usize) -> Matrix<'a> {
        let (rows, columns) = cut.ranges(self.rows, self.columns, rank, ranks);
        Matrix { rows: rows.len(), columns: columns.len(), data: block(&self.data, self.columns, rows, columns) }
    }
}

/// An INT4 matrix `[rows, columns]` with one scale per `group` columns. See `int4` for the layout.
#[derive(Clone, Debug)]
pub struct Int4Matrix<'a> {
    pub rows: usize,
    pub columns: usize,
    pub group: usize,
    /// `[rows, columns / 2]` bytes.
    pub packed: Cow<'a, [u8]>,
    /// `[rows, columns / group]`.
    pub scales: Cow<'a, [bf16]>,
}

impl<'a> Int4Matrix<'a> {
    /// The nibbles of one row, two a byte.
    pub fn packed_row(&self, row: usize) -> &[u8] {
        &self.packed[row * (self.columns / 2)..][..self.columns / 2]
    }

    /// The scales of one row, one a group.
    pub fn scale_row(&self, row: usize) -> &[bf16] {
        &self.scales[row * (self.columns / self.group)..][..self.columns / self.group]
    }

    /// The weights of one row, `columns` values rounded to bf16.
    pub fn unpack_row(&self, row: usize, out: &mut [bf16]) {
        int4::unpack_row(self.packed_row(row), self.scale_row(row), self.group, out);
    }

    /// All weights, row-major.
    pub fn unpack(&self) -> Vec<bf16> {
        let mut out = vec![bf16::ZERO; self.rows * self.columns];
        int4::unpack_row(&self.packed, &self.scales, self.group, &mut out);
        out
    }

    /// Asks the system to have what is borrowed from a mapped file in memory soon, so that the disk is busy before it is needed.
    #[must_use]
    pub fn fetch(self) -> Self {
        if let Cow::Borrowed(packed) = self.packed {
            will_need(packed);
        }
        if let Cow::Borrowed(scales) = self.scales {
            will_need(bytemuck::cast_slice(scales));
        }
        self
    }

    /// The part of a rank. A cut by columns takes the scales of exactly its groups along.
    ///
    /// # Panics
    /// When a part would end inside a group.
    pub fn cut(&self, cut: Cut, rank: usize, ranks: usize) -> Int4Matrix<'a> {
        let (rows, columns) = cut.ranges(self.rows, self.columns, rank, ranks);
        assert!(columns.start.is_multiple_of(self.group) && columns.end.is_multiple_of(self.group), "a cut inside a quantisation group");
        let scaled = |by: usize| columns.start / by..columns.end / by;
        Int4Matrix {
            rows: rows.len(),
            columns: columns.len(),
            group: self.group,
            packed: block(&self.packed, self.columns / 2, rows.clone(), scaled(2)),
            scales: block(&self.scales, self.columns / self.group, rows, scaled(self.group)),
        }
    }
}

/// A block of a row-major matrix: borrowed where whole rows of a borrowed matrix are taken, copied otherwise.
fn block<'a, T: Copy>(data: &Cow<'a, [T]>, width: usize, rows: Range<usize>, columns: Range<usize>) -> Cow<'a, [T]> {
    let whole_rows = rows.start * width..rows.end * width;
    match data {
        Cow::Borrowed(data) if columns.len() == width => Cow::Borrowed(&data[whole_rows]),
        data => {
            let mut block = Vec::with_capacity(rows.len() * columns.len());
            data[whole_rows].chunks_exact(width).for_each(|row| block.extend_from_slice(&row[columns.clone()]));
            Cow::Owned(block)
        }
    }
}

/// A hint only: what cannot be fetched ahead is read when it is touched.
fn will_need(bytes: &[u8]) {
    const PAGE: usize = 4096;
    let start = bytes.as_ptr() as usize / PAGE * PAGE;
    let length = bytes.as_ptr() as usize + bytes.len() - start;
    // SAFETY: this advice changes no memory, whatever the range is.
    unsafe { libc::madvise(start as *mut libc::c_void, length, libc::MADV_WILLNEED) };
}

/// Little-endian bf16 bytes as values: borrowed when the address allows, copied when not.
pub(super) fn as_bf16(bytes: &[u8]) -> Cow<'_, [bf16]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(values) if cfg!(target_endian = "little") => Cow::Borrowed(values),
        _ => Cow::Owned(bytes.chunks_exact(2).map(|pair| bf16::from_le_bytes([pair[0], pair[1]])).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize) -> Vec<bf16> {
        (0..count).map(|i| bf16::from_f32(i as f32)).collect()
    }

    #[test]
    fn ranks_together_hold_every_element_once() {
        let data = numbers(24);
        let whole = Matrix { rows: 4, columns: 6, data: Cow::Borrowed(&data) };
        let rows: Vec<bf16> = (0..2).flat_map(|rank| whole.cut(Cut::Rows, rank, 2).data.into_owned()).collect();
        assert_eq!(rows, data);
        let columns: Vec<Matrix> = (0..3).map(|rank| whole.cut(Cut::Columns, rank, 3)).collect();
        for row in 0..4 {
            let joined: Vec<bf16> = columns.iter().flat_map(|part| part.row(row).to_vec()).collect();
            assert_eq!(joined, whole.row(row));
        }
        assert!(matches!(whole.cut(Cut::Rows, 1, 2).data, Cow::Borrowed(_)), "rows are not copied");
    }

    #[test]
    fn scales_are_cut_with_their_weights() {
        let values: Vec<i8> = (0..2 * 128).map(|i| (i % 16) as i8 - 8).collect();
        let scales = numbers(2 * 4).into_iter().map(|x| x + bf16::ONE).collect();
        let whole =
            Int4Matrix { rows: 2, columns: 128, group: 32, packed: Cow::Owned(int4::pack_row(&values)), scales: Cow::Owned(scales) };
        let all = whole.unpack();
        for rank in 0..2 {
            let part = whole.cut(Cut::Columns, rank, 2);
            let mut row = vec![bf16::ZERO; 64];
            part.unpack_row(1, &mut row);
            assert_eq!(row, all[128 + rank * 64..][..64]);
            assert_eq!(whole.cut(Cut::Rows, rank, 2).unpack(), all[rank * 128..][..128]);
        }
    }

    #[test]
    #[should_panic(expected = "inside a quantisation group")]
    fn a_group_is_never_split() {
        let whole = Int4Matrix { rows: 1, columns: 32, group: 32, packed: Cow::Owned(vec![0; 16]), scales: Cow::Owned(numbers(1)) };
        whole.cut(Cut::Columns, 0, 2);
    }

    #[test]
    fn a_misaligned_view_is_copied_and_equal() {
        let values = numbers(8);
        let bytes: &[u8] = bytemuck::cast_slice(&values);
        let mut shifted = vec![0_u8; bytes.len() + 2];
        let offset = 1 - shifted.as_ptr() as usize % 2;
        shifted[offset..][..bytes.len()].copy_from_slice(bytes);
        let misaligned = as_bf16(&shifted[offset..][..bytes.len()]);
        assert!(matches!(misaligned, Cow::Owned(_)));
        assert_eq!(misaligned.as_ref(), values.as_slice());
        assert!(matches!(as_bf16(bytes), Cow::Borrowed(_)));
    }
}
