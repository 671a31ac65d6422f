//! Writes safetensors files and their index.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::Fill;
use super::values;
use crate::model::checkpoint::{INDEX, SINGLE};
use crate::model::inventory::{TensorSpec, Wanted};

/// Numbers of a tensor of `Fill::Repeated`.
const PERIOD: usize = 1 << 16;

/// A tensor to write.
pub struct Entry {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: u64,
    content: Content,
}

/// What a tensor holds.
pub enum Content {
    Hole,
    /// A tensor of the inventory with its own stream of random numbers.
    Random {
        spec: TensorSpec,
        seed: u64,
        /// Numbers before they repeat.
        period: usize,
    },
    /// 32-bit numbers.
    Numbers([u32; 2]),
}

impl Entry {
    /// A tensor of the inventory under its name on disk; `number` makes its random numbers its own.
    pub fn of_spec(spec: &TensorSpec, prefix: &str, fill: Fill, number: u64) -> Self {
        let dtype = match spec.wanted {
            Wanted::Bf16 => "BF16",
            Wanted::F32 => "F32",
            Wanted::I32 | Wanted::I32OrI64 => "I32",
        };
        let content = match fill {
            Fill::Holes => Content::Hole,
            // Any two tensors differ in the upper half, so their streams never meet.
            Fill::Random(seed) | Fill::Repeated(seed) => Content::Random {
                spec: spec.clone(),
                seed: seed.wrapping_add(number << 32),
                period: if matches!(fill, Fill::Repeated(_)) { PERIOD } else { usize::MAX },
            },
        };
        Self { name: format!("{prefix}{}", spec.name), dtype, shape: spec.shape.clone(), bytes: spec.bytes(), content }
    }

    /// A `weight_shape` tensor that states these sizes.
    pub fn stating(mut self, [rows, columns]: [usize; 2]) -> Self {
        self.content = Content::Numbers([rows as u32, columns as u32]);
        self
    }

    /// A bf16 tensor that takes no room on a disk with sparse files.
    pub fn bf16_hole(name: String, shape: &[usize]) -> Self {
        let elements: u64 = shape.iter().map(|&size| size as u64).product();
        Self { name, dtype: "BF16", shape: shape.to_vec(), bytes: 2 * elements, content: Content::Hole }
    }
}

/// Spreads tensors over at most `count` files of about equal size, in order, and writes the index.
pub fn write(directory: &Path, entries: Vec<Entry>, count: usize) -> io::Result<()> {
    let count = count.max(1);
    let total: u64 = entries.iter().map(|entry| entry.bytes).sum();
    let mut files: Vec<Vec<Entry>> = std::iter::repeat_with(Vec::new).take(count).collect();
    let mut done = 0_u64;
    for entry in entries {
        let number = ((done as u128 * count as u128) / total as u128) as usize;
        done += entry.bytes;
        files[number].push(entry);
    }
    // A large tensor can span what several files would have held.
    files.retain(|entries| !entries.is_empty());
    let count = files.len();
    let in_file = |(number, entries): (usize, &Vec<Entry>)| -> Vec<(String, Value)> {
        entries.iter().map(|entry| (entry.name.clone(), shard_name(number, count).into())).collect()
    };
    let map: Map<String, Value> = files.iter().enumerate().flat_map(in_file).collect();
    files.par_iter().enumerate().try_for_each(|(number, entries)| write_file(&directory.join(shard_name(number, count)), entries))?;
    std::fs::write(directory.join(INDEX), json!({"metadata": {"total_size": total}, "weight_map": map}).to_string())
}

/// One file without an index.
pub fn write_single(directory: &Path, entries: Vec<Entry>) -> io::Result<()> {
    write_file(&directory.join(SINGLE), &entries)
}

fn shard_name(number: usize, count: usize) -> String {
    format!("model-{:05}-of-{count:06}.safetensors", number + 1)
}

fn write_file(path: &Path, entries: &[Entry]) -> io::Result<()> {
    let mut header = Map::from_iter([("__metadata__".to_string(), json!({"format": "pt"}))]);
    let mut end = 0;
    for entry in entries {
        let range = [end, end + entry.bytes];
        end = range[1];
        header.insert(entry.name.clone(), json!({"dtype": entry.dtype, "shape": entry.shape, "data_offsets": range}));
    }
    let mut header = Value::Object(header).to_string();
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut hole = 0;
    for entry in entries {
        match &entry.content {
            Content::Hole => hole += entry.bytes,
            Content::Random { spec, seed, period } => {
                skip(&mut file, &mut hole)?;
                write_repeated(&mut file, &values::random(spec, *seed, *period), entry.bytes as usize)?;
            }
            Content::Numbers(numbers) => {
                skip(&mut file, &mut hole)?;
                numbers.iter().try_for_each(|number| file.write_all(&number.to_le_bytes()))?;
            }
        }
    }
    let file = file.into_inner().map_err(|error| error.into_error())?;
    file.set_len(8 + header.len() as u64 + end)
}

fn write_repeated(file: &mut impl Write, values: &[u8], mut left: usize) -> io::Result<()> {
    while left > 0 {
        let piece = &values[..left.min(values.len())];
        file.write_all(piece)?;
        left -= piece.len();
    }
    Ok(())
}

/// Moves over tensors that stay holes.
fn skip(file: &mut BufWriter<File>, hole: &mut u64) -> io::Result<()> {
    if *hole > 0 {
        file.seek(SeekFrom::Current(*hole as i64))?;
        *hole = 0;
    }
    Ok(())
}
