//! Reads `tiktoken.model` (a token in base64 and its rank on every line) and the control tokens of `tokenizer_config.json`.

use std::cell::RefCell;
use std::collections::HashMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use regex::Regex;
use serde_json::Value;
use tiktoken_rs::CoreBPE;

use super::{SPECIAL_SLOTS, Tokenizer};
use crate::model::config_keys::{Keys, parse_object, short};
use crate::model::problem::{Problem, Problems};
use crate::model::source::ModelSource;

pub(super) const RANKS: &str = "tiktoken.model";
const CONFIG: &str = "tokenizer_config.json";

/// Kimi's split pattern, the same in K2, K2-Thinking, K2.5 and K2.6: Han runs, words (ending in lower case; with an upper-case or uncased
/// start), up to three digits, punctuation with the line breaks after it, line breaks, white space.
const PATTERN: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

/// The control slots of a tokenizer.
struct Specials {
    names: Vec<String>,
    hidden: Vec<bool>,
    bos: Option<String>,
}

impl Tokenizer {
    /// # Errors
    /// A file that is missing or damaged: every bad line, rank and control token.
    pub fn load(source: &ModelSource) -> Result<Self, Problems> {
        let model = source.to_string();
        let fail = |problem| Problems::one(model.as_str(), problem);
        let ranks = source.required_text(RANKS).map_err(fail)?;
        let config = source.required_text(CONFIG).map_err(fail)?;
        Self::parse(&model, &ranks, &config)
    }

    /// The same from the text of the files; `model` only names the model in errors.
    pub fn parse(model: &str, ranks: &str, config: &str) -> Result<Self, Problems> {
        let mut problems = Vec::new();
        let base = parse_ranks(ranks, &mut problems);
        Problems::unless_empty(model, problems, ())?;
        let specials = parse_specials(config, base.len()).map_err(|list| Problems::new(model, list))?;
        Self::build(base, specials).map_err(|problem| Problems::one(model, problem))
    }

    fn build(base: Vec<Vec<u8>>, specials: Specials) -> Result<Self, Problem> {
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for token in base.iter().map(Vec::as_slice).chain(specials.names.iter().map(String::as_bytes)) {
            bytes.extend_from_slice(token);
            ends.push(bytes.len() as u32);
        }
        let first = base.len() as u32;
        let by_name: HashMap<String, u32> = (first..).zip(&specials.names).map(|(id, name)| (name.clone(), id)).collect();
        let mut alternatives: Vec<String> = specials.names.iter().map(|name| regex::escape(name)).collect();
        alternatives.sort_unstable_by_key(|name| std::cmp::Reverse(name.len()));
        let pattern = |error: String| Problem::new(RANKS, "split pattern", error, "a pattern that compiles");
        let names = Regex::new(&alternatives.join("|")).map_err(|error| pattern(error.to_string()))?;
        let encoder = base.iter().cloned().zip(0..).collect();
        // Control tokens stay out of the BPE, so that no way of calling it can produce one from text.
        let bpe = CoreBPE::new(encoder, Default::default(), PATTERN).map_err(|error| pattern(error.to_string()))?;
        let bos = specials.bos.and_then(|name| by_name.get(&name).copied());
        Ok(Self { bpe, bytes, ends, base: base.len(), hidden: specials.hidden, by_name, names, bos })
    }
}

/// Tokens by rank; ranks must be 0..n without gaps, tokens different, and all single bytes there (or some text could not be encoded).
fn parse_ranks(text: &str, problems: &mut Vec<Problem>) -> Vec<Vec<u8>> {
    let mut tokens: Vec<Option<Vec<u8>>> = Vec::new();
    let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    tokens.resize(lines.len(), None);
    let mut ranks: HashMap<Vec<u8>, usize> = HashMap::new();
    for (number, line) in lines.iter().enumerate() {
        let mut report = |found: String, wanted: &str| problems.push(Problem::new(RANKS, format!("line {}", number + 1), found, wanted));
        let Some((token, rank)) = parse_line(line) else {
            report(short(&Value::from(*line)), "a token in base64, a space and a rank");
            continue;
        };
        match tokens.get_mut(rank) {
            Some(slot @ None) => *slot = Some(token.clone()),
            Some(Some(_)) => report(format!("rank {rank} again"), "each rank once"),
            None => report(format!("rank {rank}"), "ranks from 0 without gaps"),
        }
        if let Some(earlier) = ranks.insert(token, rank) {
            report(format!("the token of rank {earlier} again"), "each token once");
        }
    }
    let missing: Vec<u8> = (0..=255_u8).filter(|byte| !ranks.contains_key([*byte].as_slice())).collect();
    if !missing.is_empty() {
        problems.push(Problem::new(RANKS, "single bytes", format!("{} of them missing", missing.len()), "a token for each of the 256"));
    }
    tokens.into_iter().flatten().collect()
}

fn parse_line(line: &str) -> Option<(Vec<u8>, usize)> {
    let (token, rank) = line.trim_end().split_once(' ')?;
    let token = STANDARD.decode(token).ok().filter(|token| !token.is_empty())?;
    Some((token, rank.parse().ok()?))
}

fn parse_specials(config: &str, base: usize) -> Result<Specials, Vec<Problem>> {
    let object = parse_object(CONFIG, config).map_err(|problem| vec![problem])?;
    let problems = RefCell::new(Vec::new());
    let keys = Keys::new(CONFIG, &object, &problems);
    let mut names: Vec<Option<String>> = vec![None; SPECIAL_SLOTS];
    let mut hidden = vec![true; SPECIAL_SLOTS];
    match keys.child("added_tokens_decoder") {
        Some(added) => {
            for id in added.names() {
                let slot = id.parse::<usize>().ok().and_then(|id| id.checked_sub(base)).filter(|slot| *slot < SPECIAL_SLOTS);
                let Some(slot) = slot else {
                    added.report(id, "this id", format!("ids {base} to {} (256 after the base tokens)", base + SPECIAL_SLOTS - 1));
                    continue;
                };
                let Some(token) = added.child(id) else { continue };
                names[slot] = special_name(&token, id);
                hidden[slot] = token.bool("special").unwrap_or(true);
            }
        }
        None => keys.report("added_tokens_decoder", "nothing", "the control tokens by id"),
    }
    let names: Vec<String> =
        names.into_iter().enumerate().map(|(slot, name)| name.unwrap_or_else(|| format!("<|reserved_token_{}|>", base + slot))).collect();
    let mut seen = HashMap::new();
    for (slot, name) in names.iter().enumerate() {
        if let Some(earlier) = seen.insert(name, slot) {
            keys.report("added_tokens_decoder", format!("{name:?} as {} and {}", base + earlier, base + slot), "each name once");
        }
    }
    let bos = bos_name(&keys, &names);
    let list = problems.into_inner();
    if list.is_empty() { Ok(Specials { names, hidden, bos }) } else { Err(list) }
}

fn special_name(token: &Keys, id: &str) -> Option<String> {
    let name = token.text("content").filter(|name| !name.is_empty());
    if name.is_none() {
        token.report("content", "nothing", format!("the name of token {id}"));
    }
    name.map(str::to_string)
}

/// The BOS token, when plain prompts are to start with it; absent means no.
fn bos_name(keys: &Keys, names: &[String]) -> Option<String> {
    if keys.bool("add_bos_token") != Some(true) {
        return None;
    }
    let name = match keys.get("bos_token") {
        Some(Value::Object(token)) => token.get("content").and_then(Value::as_str),
        other => other.and_then(Value::as_str),
    };
    let known = name.filter(|name| names.iter().any(|known| known == name));
    if known.is_none() {
        keys.report("bos_token", name.unwrap_or("nothing"), "a control token, as add_bos_token is true");
    }
    known.map(str::to_string)
}
