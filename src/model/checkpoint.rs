//! A model's weights on disk or in the binary: safetensors shards behind an index, compared with the inventory at open, handed out as
//! typed views. Both forward passes load from here; `kdtree check` reads the headers only.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use safetensors::Dtype;
use serde_json::Value;

use super::config::{DraftConfig, TargetConfig};
use super::config_keys::{parse_object, short};
use super::inventory::{Inventory, Named, TensorSpec, Wanted};
use super::problem::{Problem, Problems};
use super::shard_file::{Entry, ShardFile};
use super::source::ModelSource;
use super::tensor::{Int4Matrix, Matrix, as_bf16};

/// The file that says which shard holds which tensor.
pub const INDEX: &str = "model.safetensors.index.json";
/// The only file of a checkpoint without an index.
pub const SINGLE: &str = "model.safetensors";

/// An opened checkpoint: every tensor of its inventory is there, once, with the right type and shape.
pub struct Checkpoint {
    source: ModelSource,
    pub(super) inventory: Inventory,
    pub(super) files: Vec<ShardFile>,
    pub(super) places: HashMap<String, Place>,
    /// What was found and not used.
    pub skipped: Skipped,
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub file: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub begin: usize,
    pub end: usize,
}

/// Tensors that are known and not needed (vision, copies, empty ones).
#[derive(Clone, Debug, Default)]
pub struct Skipped {
    pub tensors: usize,
    pub bytes: u64,
    /// One line per reason.
    pub notes: BTreeSet<String>,
}

impl Checkpoint {
    /// Opens the target's weights.
    ///
    /// # Errors
    /// Everything that is missing, surplus, cut, or of another type or shape than `config` implies.
    pub fn open_target(source: &ModelSource, config: &TargetConfig) -> Result<Self, Problems> {
        Self::open(source, Inventory::target(config))
    }

    /// Opens the drafter's weights; errors as for the target.
    pub fn open_drafter(source: &ModelSource, config: &DraftConfig) -> Result<Self, Problems> {
        Self::open(source, Inventory::drafter(config))
    }

    /// Opens what an inventory asks for; errors as for `open_target`.
    pub fn open(source: &ModelSource, inventory: Inventory) -> Result<Self, Problems> {
        let (checkpoint, problems) = Self::inspect(source, inventory);
        Problems::unless_empty(&source.to_string(), problems, checkpoint)
    }

    /// Reads the headers and compares them with the inventory. With problems, the checkpoint's data must not be used.
    pub fn inspect(source: &ModelSource, inventory: Inventory) -> (Self, Vec<Problem>) {
        let mut opening = Opening {
            checkpoint: Self { source: source.clone(), inventory, files: Vec::new(), places: HashMap::new(), skipped: Skipped::default() },
            problems: Vec::new(),
            excused: HashSet::new(),
        };
        match read_index(source) {
            Ok(index) => {
                for (file, promised) in &index.shards {
                    opening.shard(file, promised.as_ref(), &index);
                }
                opening.unlisted_shards(&index);
                opening.compare(&index);
            }
            Err(problem) => opening.problems.push(problem),
        }
        (opening.checkpoint, opening.problems)
    }

    /// Where the files come from.
    pub fn source(&self) -> &ModelSource {
        &self.source
    }

    /// What was asked for.
    pub fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    /// Bytes of the tensors used.
    pub fn bytes(&self) -> u64 {
        self.inventory.tensors.iter().filter_map(|spec| self.places.get(&spec.name)).map(|place| (place.end - place.begin) as u64).sum()
    }

    /// A bf16 matrix `[rows, columns]` by its name without prefix, `model.layers.3.self_attn.q_a_proj.weight`.
    ///
    /// # Errors
    /// No such tensor, or another type or shape (not after a successful open with names and shapes of the inventory).
    pub fn matrix(&self, name: &str, [rows, columns]: [usize; 2]) -> Result<Matrix<'_>, Problem> {
        let bytes = self.typed(name, Dtype::BF16, &[rows, columns])?;
        Ok(Matrix { rows, columns, data: as_bf16(bytes) })
    }

    /// A vector of bf16 (norms) or f32 (router bias) as f32. Errors as for `matrix`.
    pub fn vector(&self, name: &str, size: usize) -> Result<Vec<f32>, Problem> {
        if self.place(name)?.dtype == Dtype::F32 {
            let bytes = self.typed(name, Dtype::F32, &[size])?;
            return Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect());
        }
        let bytes = self.typed(name, Dtype::BF16, &[size])?;
        Ok(as_bf16(bytes).iter().map(|value| value.to_f32()).collect())
    }

    /// The INT4 matrix `[rows, columns]` of a module, `model.layers.3.mlp.experts.17.gate_proj`.
    ///
    /// # Errors
    /// As for `matrix`; also when the module's `weight_shape` says something else.
    pub fn int4(&self, module: &str, [rows, columns]: [usize; 2]) -> Result<Int4Matrix<'_>, Problem> {
        let scale_name = format!("{module}.weight_scale");
        let groups = self.place(&scale_name)?.shape.get(1).copied().unwrap_or(0).max(1);
        let scales = as_bf16(self.typed(&scale_name, Dtype::BF16, &[rows, groups])?);
        let packed = self.typed(&format!("{module}.weight_packed"), Dtype::I32, &[rows, columns / 8])?;
        self.check_stated_shape(&format!("{module}.weight_shape"), [rows, columns])?;
        Ok(Int4Matrix { rows, columns, group: columns / groups, packed: packed.into(), scales })
    }

    /// The two numbers of a `weight_shape` tensor must be the matrix's.
    pub(super) fn check_stated_shape(&self, name: &str, wanted: [usize; 2]) -> Result<(), Problem> {
        let place = self.place(name)?;
        let bytes = self.files[place.file].tensor(place.begin, place.end);
        let width = place.dtype.bitsize() / 8;
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
        let stated: Vec<u64> = bytes.chunks_exact(width).map(number).collect();
        if stated == wanted.map(|size| size as u64) {
            return Ok(());
        }
        Err(Problem::new(&self.files[place.file].name, name, format!("{stated:?}"), format!("{wanted:?}")))
    }

    fn place(&self, name: &str) -> Result<&Place, Problem> {
        self.places.get(name).ok_or_else(|| Problem::new(self.source.to_string(), name, "nothing", "a tensor of this name"))
    }

    fn typed(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&[u8], Problem> {
        let place = self.place(name)?;
        let file = &self.files[place.file];
        if place.dtype != dtype || place.shape != shape {
            let found = format!("{} {:?}", place.dtype, place.shape);
            return Err(Problem::new(&file.name, name, found, format!("{dtype} {shape:?}")));
        }
        Ok(file.tensor(place.begin, place.end))
    }
}

/// Which file holds what.
struct Index {
    /// File -> names on disk that it must hold; `None` without an index file.
    shards: BTreeMap<String, Option<HashSet<String>>>,
    /// Name on disk -> file.
    files: HashMap<String, String>,
}

fn read_index(source: &ModelSource) -> Result<Index, Problem> {
    let Some(text) = source.text(INDEX)? else {
        if source.bytes(SINGLE)?.is_none() {
            let missing = source.missing(SINGLE);
            return Err(Problem { subject: "weights".into(), wanted: format!("{INDEX} or {SINGLE}"), ..missing });
        }
        return Ok(Index { shards: BTreeMap::from([(SINGLE.to_string(), None)]), files: HashMap::new() });
    };
    let object = parse_object(INDEX, &text)?;
    let Some(Value::Object(map)) = object.get("weight_map") else {
        let found = object.get("weight_map").map_or("nothing".to_string(), short);
        return Err(Problem::new(INDEX, "weight_map", found, "an object from tensor names to file names"));
    };
    let mut shards: BTreeMap<String, Option<HashSet<String>>> = BTreeMap::new();
    let mut files = HashMap::new();
    for (name, file) in map {
        let Some(file) = file.as_str() else { return Err(Problem::new(INDEX, name, short(file), "a file name")) };
        shards.entry(file.to_string()).or_default().get_or_insert_default().insert(name.clone());
        files.insert(name.clone(), file.to_string());
    }
    Ok(Index { shards, files })
}

/// The state of an inspection.
struct Opening {
    checkpoint: Checkpoint,
    problems: Vec<Problem>,
    /// Names (without prefix) whose absence is already explained by a problem of their file or of the index.
    excused: HashSet<String>,
}

impl Opening {
    fn shard(&mut self, file: &str, promised: Option<&HashSet<String>>, index: &Index) {
        match self.open_shard(file, promised) {
            Ok(None) => {}
            Ok(Some((shard, entries))) => {
                let number = self.checkpoint.files.len();
                self.checkpoint.files.push(shard);
                self.promised_but_absent(file, promised, &entries);
                for entry in entries {
                    self.entry(number, file, entry, promised, index);
                }
            }
            Err(problem) => {
                self.problems.push(problem);
                match promised {
                    Some(promised) => promised.iter().for_each(|name| self.excuse(name)),
                    None => self.excused.extend(self.checkpoint.inventory.tensors.iter().map(|spec| spec.name.clone())),
                }
            }
        }
    }

    /// `Ok(None)`: not there and not needed, as all it holds is vision.
    fn open_shard(&mut self, file: &str, promised: Option<&HashSet<String>>) -> Result<Option<(ShardFile, Vec<Entry>)>, Problem> {
        if let Some(bytes) = self.checkpoint.source.bytes(file)? {
            return ShardFile::open(file, bytes, &mut self.problems).map(Some);
        }
        let unused = |name: &String| matches!(self.checkpoint.inventory.read_name(name), Named::Skipped(_));
        if promised.is_some_and(|promised| promised.iter().all(unused)) {
            self.checkpoint.skipped.notes.insert(format!("{file}: not there and not needed"));
            return Ok(None);
        }
        let wanted = format!("the file with {} tensors that {INDEX} names", promised.map_or(0, HashSet::len));
        Err(Problem { subject: "the shard".into(), wanted, ..self.checkpoint.source.missing(file) })
    }

    fn excuse(&mut self, on_disk: &str) {
        if let Named::Tensor(name) = self.checkpoint.inventory.read_name(on_disk) {
            self.excused.insert(name.to_string());
        }
    }

    fn promised_but_absent(&mut self, file: &str, promised: Option<&HashSet<String>>, entries: &[Entry]) {
        let held: HashSet<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
        let mut absent: Vec<&String> = promised.into_iter().flatten().filter(|name| !held.contains(name.as_str())).collect();
        absent.sort_unstable();
        for name in absent {
            self.problems.push(Problem::new(file, name, "nothing", format!("the tensor, as {INDEX} says")));
            self.excuse(name);
        }
    }

    fn entry(&mut self, number: usize, file: &str, entry: Entry, promised: Option<&HashSet<String>>, index: &Index) {
        let name = match self.checkpoint.inventory.read_name(&entry.name) {
            Named::Tensor(name) => name.to_string(),
            Named::Skipped(reason) => return self.skip(&entry, reason),
        };
        if promised.is_some_and(|promised| !promised.contains(&entry.name)) {
            let wanted = match index.files.get(&entry.name) {
                Some(other) => format!("nothing here ({INDEX} places it in {other})"),
                None => format!("an entry in {INDEX}"),
            };
            self.problems.push(Problem::new(file, &entry.name, describe(entry.dtype, &entry.shape), wanted));
            self.excuse(&entry.name);
            return;
        }
        if let Some(earlier) = self.checkpoint.places.get(&name) {
            let wanted = format!("one (another is in {})", self.checkpoint.files[earlier.file].name);
            self.problems.push(Problem::new(file, &entry.name, "a second tensor of this name", wanted));
            return;
        }
        let Entry { dtype, shape, begin, end, .. } = entry;
        self.checkpoint.places.insert(name, Place { file: number, dtype, shape, begin, end });
    }

    fn skip(&mut self, entry: &Entry, reason: &str) {
        let skipped = &mut self.checkpoint.skipped;
        skipped.tensors += 1;
        skipped.bytes += entry.end.saturating_sub(entry.begin) as u64;
        skipped.notes.insert(reason.to_string());
    }

    /// A shard that the index does not name is a sign of a mixed-up directory.
    fn unlisted_shards(&mut self, index: &Index) {
        match self.checkpoint.source.file_names() {
            Ok(names) => {
                for name in names.iter().filter(|name| name.ends_with(".safetensors") && !index.shards.contains_key(*name)) {
                    let wanted =
                        if index.files.is_empty() { format!("only {SINGLE}") } else { format!("only the files that {INDEX} names") };
                    self.problems.push(Problem::new(name, "the shard", "a further file of weights", wanted));
                }
            }
            Err(problem) => self.problems.push(problem),
        }
    }

    fn compare(&mut self, index: &Index) {
        let Checkpoint { inventory, places, files, skipped, .. } = &mut self.checkpoint;
        let known: HashSet<&str> = inventory.tensors.iter().map(|spec| spec.name.as_str()).collect();
        let home = if index.files.is_empty() { SINGLE } else { INDEX };
        for spec in &inventory.tensors {
            match places.get(&spec.name) {
                None if self.excused.contains(&spec.name) => {}
                None => self.problems.push(Problem::new(home, &spec.name, "nothing", describe_wanted(spec))),
                Some(place) if spec.wanted.accepts(place.dtype) && place.shape == spec.shape => {}
                Some(place) => {
                    let found = describe(place.dtype, &place.shape);
                    self.problems.push(Problem::new(&files[place.file].name, &spec.name, found, describe_wanted(spec)));
                }
            }
        }
        let mut surplus: Vec<(&String, &Place)> = places.iter().filter(|(name, _)| !known.contains(name.as_str())).collect();
        surplus.sort_unstable_by_key(|(name, _)| *name);
        for (name, place) in surplus {
            let file = &files[place.file].name;
            if place.begin == place.end {
                skipped.tensors += 1;
                skipped.notes.insert(format!("{file}: {name}, an empty tensor"));
            } else {
                let found = describe(place.dtype, &place.shape);
                self.problems.push(Problem::new(file, name, found, "nothing (the configuration has no such tensor)"));
            }
        }
    }
}

impl Wanted {
    fn accepts(self, dtype: Dtype) -> bool {
        match self {
            Self::Bf16 => dtype == Dtype::BF16,
            Self::F32 => dtype == Dtype::F32,
            Self::I32 => dtype == Dtype::I32,
            Self::I32OrI64 => matches!(dtype, Dtype::I32 | Dtype::I64),
        }
    }
}

fn describe(dtype: Dtype, shape: &[usize]) -> String {
    format!("{dtype} {shape:?}")
}

fn describe_wanted(spec: &TensorSpec) -> String {
    let dtype = match spec.wanted {
        Wanted::Bf16 => "BF16",
        Wanted::F32 => "F32",
        Wanted::I32 => "I32",
        Wanted::I32OrI64 => "I32 or I64",
    };
    format!("{dtype} {:?}", spec.shape)
}
