//! Where the weights of a rank come from: a checkpoint, or numbers made up for a bench. `Target` and `Drafter` ask by name and shape.

use rayon::prelude::*;

use super::checkpoint::Checkpoint;
use super::tensor::{Cut, Int4Matrix, Matrix};
use crate::device::host::{HostExpert, stack};
use crate::device::{Device, MlaShape, Result};
use crate::parallel::Rank;

/// A matrix of the whole model and the part of it that is wanted.
#[derive(Clone, Debug)]
pub struct Piece {
    pub name: String,
    /// `[rows, columns]` of the whole.
    pub shape: [usize; 2],
    pub cut: Cut,
    /// Part `index` of `size`.
    pub part: Rank,
}

impl Piece {
    /// The part of `part` of a tensor of this name and whole shape.
    pub fn new(name: impl Into<String>, shape: [usize; 2], cut: Cut, part: Rank) -> Self {
        Self { name: name.into(), shape, cut, part }
    }

    /// `[rows, columns]` of the part.
    pub fn part_shape(&self) -> [usize; 2] {
        let [rows, columns] = self.shape;
        match self.cut {
            Cut::Rows => [rows / self.part.size, columns],
            Cut::Columns => [rows, columns / self.part.size],
            Cut::Whole | Cut::NotHeld => self.shape,
        }
    }
}

/// See the module.
pub trait Weights<D: Device> {
    /// Bytes of the whole, for progress.
    fn bytes(&self) -> u64;
    /// The pieces, one under the other.
    fn matrix(&self, pieces: &[Piece]) -> Result<D::Matrix>;
    fn table(&self, piece: &Piece) -> Result<D::Table>;
    fn vector(&self, name: &str, size: usize) -> Result<D::Vector>;
    fn absorbed(&self, piece: &Piece, shape: MlaShape) -> Result<D::Absorbed>;
    /// `count` routed experts of `module`, each `gate` and `up` `[inner, hidden]` and `down` `[hidden, inner]`, this rank's slices.
    fn experts(&self, module: &str, count: usize, inner: usize, hidden: usize, part: Rank) -> Result<D::Experts>;
}

/// The weights of a checkpoint.
pub struct Stored<'a, D: Device> {
    pub device: &'a D,
    pub checkpoint: &'a Checkpoint,
}

impl<D: Device> Stored<'_, D> {
    fn cut(&self, piece: &Piece) -> Result<Matrix<'_>> {
        let whole = self.checkpoint.matrix(&piece.name, piece.shape)?;
        let (rank, ranks) = (piece.part.index, piece.part.size);
        if piece.cut == Cut::Columns {
            return Ok(whole.fetch().cut(piece.cut, rank, ranks));
        }
        Ok(whole.cut(piece.cut, rank, ranks).fetch())
    }
}

fn expert<'a>(checkpoint: &'a Checkpoint, module: &str, inner: usize, hidden: usize, part: Rank) -> Result<HostExpert<'a>> {
    let of = |which: &str, shape: [usize; 2], cut: Cut| -> Result<Int4Matrix<'a>> {
        let whole = checkpoint.int4(&format!("{module}.{which}_proj"), shape)?;
        if cut == Cut::Columns {
            return Ok(whole.fetch().cut(cut, part.index, part.size));
        }
        Ok(whole.cut(cut, part.index, part.size).fetch())
    };
    Ok(HostExpert {
        gate: of("gate", [inner, hidden], Cut::Rows)?,
        up: of("up", [inner, hidden], Cut::Rows)?,
        down: of("down", [hidden, inner], Cut::Columns)?,
    })
}

impl<D: Device> Weights<D> for Stored<'_, D> {
    fn bytes(&self) -> u64 {
        self.checkpoint.bytes()
    }

    fn matrix(&self, pieces: &[Piece]) -> Result<D::Matrix> {
        match pieces {
            [piece] => self.device.matrix(self.cut(piece)?),
            pieces => self.device.matrix(stack(&pieces.iter().map(|piece| self.cut(piece)).collect::<Result<Vec<_>>>()?)),
        }
    }

    fn table(&self, piece: &Piece) -> Result<D::Table> {
        self.device.table(self.cut(piece)?)
    }

    fn vector(&self, name: &str, size: usize) -> Result<D::Vector> {
        self.device.vector(&self.checkpoint.vector(name, size)?)
    }

    fn absorbed(&self, piece: &Piece, shape: MlaShape) -> Result<D::Absorbed> {
        self.device.absorbed(self.cut(piece)?, shape)
    }

    fn experts(&self, module: &str, count: usize, inner: usize, hidden: usize, part: Rank) -> Result<D::Experts> {
        // On all threads, as each waits for the disk: the cut by columns reads all of `down`.
        let checkpoint = self.checkpoint;
        let expert = |number| expert(checkpoint, &format!("{module}.experts.{number}"), inner, hidden, part);
        let experts: Result<Vec<HostExpert<'_>>> = (0..count).into_par_iter().map(expert).collect();
        self.device.experts(&experts?)
    }
}
