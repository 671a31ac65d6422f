//! The `quantization_config` of a checkpoint: which matrices are INT4 and in groups of how many. One format is supported,
//! compressed-tensors `pack-quantized`, 4 bits, symmetric, in groups along the input dimension. Read by `config`.

use regex::Regex;
use serde_json::{Map, Value};

use super::config_keys::{Keys, short};

/// Prefix of the text model's names inside the multimodal wrapper. Patterns and tensor names come with and without it.
pub const WRAPPER_PREFIX: &str = "language_model.";

/// The supported scheme (`pack-quantized`, 4 bits, symmetric) and what it leaves alone.
#[derive(Clone, Debug)]
pub struct Quantization {
    /// Consecutive input elements that share one scale.
    pub group_size: usize,
    ignore: Vec<Ignore>,
}

/// One entry of the ignore list.
#[derive(Clone, Debug)]
enum Ignore {
    /// A module's full name.
    Name(String),
    /// `re:PATTERN`, anchored at the start of the name only.
    Pattern(Regex),
}

impl Quantization {
    /// `keys` is the object that holds `quantization_config`; anything unsupported is reported by name.
    pub(super) fn parse(keys: &Keys) -> Option<Self> {
        let Some(quantization) = keys.child("quantization_config") else {
            if keys.get("quantization_config").is_none() {
                keys.report("quantization_config", "nothing", "compressed-tensors INT4 experts (unquantised experts are not supported)");
            }
            return None;
        };
        quantization.only_stated("quant_method", "compressed-tensors");
        quantization.only_stated("format", "pack-quantized");
        quantization.only("quantization_status", "compressed");
        quantization.absent("kv_cache_scheme", "the slot type is a setting of the server");
        quantization.absent("sparsity_config", "sparse weights are not supported");
        let group = only_group(&quantization)?;
        group.absent("input_activations", "activations stay BF16");
        group.absent("output_activations", "activations stay BF16");
        match group.strings("targets").as_slice() {
            ["Linear"] => {}
            targets => group.report("targets", format!("{targets:?}"), "[\"Linear\"]"),
        }
        let Some(weights) = group.child("weights") else {
            group.report("weights", "nothing", "an object");
            return None;
        };
        weights.only_stated("num_bits", 4);
        weights.only_stated("type", "int");
        weights.only_stated("symmetric", true);
        weights.only_stated("strategy", "group");
        weights.absent("actorder", "reordered groups are not supported");
        weights.absent("dynamic", "weights are static");
        let group_size = weights.size("group_size");
        if !group_size.is_multiple_of(8) {
            weights.report("group_size", group_size, "a multiple of 8 (the elements of one packed word)");
        }
        let ignore = quantization.strings("ignore").into_iter().filter_map(|entry| Ignore::parse(&quantization, entry)).collect();
        Some(Self { group_size, ignore })
    }

    /// Whether a module (a tensor name without `.weight` and without `language_model.`) stays unquantised.
    pub fn is_ignored(&self, module: &str) -> bool {
        let wrapped = format!("{WRAPPER_PREFIX}{module}");
        self.ignore.iter().any(|entry| match entry {
            Ignore::Name(name) => name == module || *name == wrapped,
            Ignore::Pattern(pattern) => pattern.is_match(module) || pattern.is_match(&wrapped),
        })
    }
}

impl Ignore {
    fn parse(keys: &Keys, entry: &str) -> Option<Self> {
        let Some(pattern) = entry.strip_prefix("re:") else { return Some(Self::Name(entry.to_string())) };
        match Regex::new(&format!("^(?:{pattern})")) {
            Ok(pattern) => Some(Self::Pattern(pattern)),
            Err(error) => {
                keys.report("ignore", format!("{entry:?} ({error})"), "a regular expression");
                None
            }
        }
    }
}

/// The one entry of `config_groups`.
fn only_group<'a>(quantization: &Keys<'a>) -> Option<Keys<'a>> {
    let Some(groups) = quantization.child("config_groups") else {
        quantization.report("config_groups", "nothing", "one group");
        return None;
    };
    let names: Vec<&str> = groups.names().collect();
    match names.as_slice() {
        [name] => groups.child(name),
        names => {
            quantization.report("config_groups", format!("{} groups", names.len()), "one group");
            None
        }
    }
}

/// The two places the configuration may stand in must not contradict each other.
pub(super) fn agree(outer: &Map<String, Value>, text: &Map<String, Value>) -> Result<(), (String, String)> {
    let place = |object: &Map<String, Value>| object.get("quantization_config").filter(|value| !value.is_null()).cloned();
    match (place(outer), place(text)) {
        (Some(outer), Some(text)) if outer != text => Err((short(&outer), format!("the same as text_config's {}", short(&text)))),
        _ => Ok(()),
    }
}
