//! One safetensors file: its header, checked against its length, and the bytes of its tensors. Used by `checkpoint`.

use std::collections::HashMap;

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::Deserialize;

use super::problem::Problem;
use super::source::FileBytes;

/// Longest header accepted, the limit of the format's own library.
const MAX_HEADER: u64 = 100_000_000;
/// The header's length stands in front of it.
const LENGTH: usize = 8;

/// An opened file.
pub struct ShardFile {
    pub name: String,
    bytes: FileBytes,
    /// Where the tensors' data begins.
    data: usize,
}

/// One tensor of a file's header; `begin..end` counts from the start of the data.
#[derive(Clone, Debug)]
pub struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub begin: usize,
    pub end: usize,
}

#[derive(Deserialize)]
struct Header {
    #[serde(rename = "__metadata__")]
    _metadata: Option<HashMap<String, String>>,
    #[serde(flatten)]
    tensors: HashMap<String, TensorInfo>,
}

impl ShardFile {
    /// Reads the header. `Err` when the file cannot be used at all; problems of single tensors go to `problems`, and then the
    /// tensors' data must not be read.
    pub fn open(name: &str, bytes: FileBytes, problems: &mut Vec<Problem>) -> Result<(Self, Vec<Entry>), Problem> {
        let data = header_end(name, &bytes)?;
        let header: Header = serde_json::from_slice(&bytes[LENGTH..data])
            .map_err(|error| Problem::new(name, "the header", error, "a safetensors header"))?;
        let mut entries: Vec<Entry> = header
            .tensors
            .into_iter()
            .map(|(name, info)| Entry { name, dtype: info.dtype, shape: info.shape, begin: info.data_offsets.0, end: info.data_offsets.1 })
            .collect();
        entries.sort_unstable_by(|a, b| (a.begin, a.end, &a.name).cmp(&(b.begin, b.end, &b.name)));
        check_layout(name, &entries, bytes.len() - data, problems);
        Ok((Self { name: name.to_string(), bytes, data }, entries))
    }

    /// The bytes of a tensor of a file that was opened without problems.
    pub fn tensor(&self, begin: usize, end: usize) -> &[u8] {
        &self.bytes[self.data + begin..self.data + end]
    }
}

fn header_end(name: &str, bytes: &[u8]) -> Result<usize, Problem> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH>() else {
        return Err(Problem::new(name, "the header", format!("a file of {} bytes", bytes.len()), "at least 8 bytes"));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        return Err(Problem::new(name, "the header", format!("a length of {length} bytes"), format!("at most {MAX_HEADER}")));
    }
    if length > rest.len() as u64 {
        let found = format!("{} bytes, then the end of the file", rest.len());
        return Err(Problem::new(name, "the header", found, format!("{length} bytes (the file is cut)")));
    }
    Ok(LENGTH + length as usize)
}

/// Tensors must lie one after the other, fill their ranges and end with the file.
fn check_layout(file: &str, entries: &[Entry], available: usize, problems: &mut Vec<Problem>) {
    let mut end = 0;
    for entry in entries {
        let range = format!("bytes {}..{}", entry.begin, entry.end);
        if entry.begin != end || entry.end < entry.begin {
            let how = if entry.begin < end { "an overlap with another tensor" } else { "a gap or a reversed range" };
            problems.push(Problem::new(file, &entry.name, format!("{range}, {how}"), format!("a range that begins at {end}")));
        }
        let size = entry.shape.iter().try_fold(entry.dtype.bitsize(), |bits, &size| bits.checked_mul(size));
        if size.is_none_or(|bits| Some(bits) != entry.end.checked_sub(entry.begin).and_then(|bytes| bytes.checked_mul(8))) {
            let wanted = format!("the bytes of {} {:?}", entry.dtype, entry.shape);
            problems.push(Problem::new(file, &entry.name, range, wanted));
        }
        end = end.max(entry.end);
    }
    let cut: Vec<&Entry> = entries.iter().filter(|entry| entry.end > available).collect();
    if let [first, more @ ..] = cut.as_slice() {
        let subject = match more.len() {
            0 => first.name.clone(),
            more => format!("{} and {more} more tensors", first.name),
        };
        problems.push(Problem::new(file, subject, format!("{available} bytes of data"), format!("{end} (the file is cut)")));
    } else if end != available {
        problems.push(Problem::new(file, "the data", format!("{available} bytes"), format!("{end}, as the header says")));
    }
}
