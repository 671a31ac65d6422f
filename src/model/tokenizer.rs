//! Kimi's tokenizer: byte-level BPE from `tiktoken.model` with Kimi's split pattern, and 256 control slots after the base vocabulary,
//! named by absolute id. Text from users is always encoded as ordinary text: only the program itself writes control tokens.
//! Used by the server (prompts, `/tokenize`), the engine (text of emitted tokens), the gate and the benches.

mod load;
mod split;
mod stream;

use std::collections::HashMap;
use std::ops::Range;

use regex::Regex;
use tiktoken_rs::CoreBPE;

use super::config::TargetConfig;
use super::problem::Problem;
pub use stream::StreamDecoder;

/// Control slots after the base vocabulary.
pub const SPECIAL_SLOTS: usize = 256;

/// What an id outside the vocabulary decodes to.
const UNKNOWN: &[u8] = "\u{fffd}".as_bytes();

/// `Send + Sync`; one per process, shared.
pub struct Tokenizer {
    bpe: CoreBPE,
    /// Bytes of every token, base and control, back to back; `ends[id]` is where token `id` ends.
    bytes: Vec<u8>,
    ends: Vec<u32>,
    /// Ids of the base vocabulary are below this.
    base: usize,
    /// Per control slot: left out of text on request (`special: true` in the configuration, and every unnamed slot).
    hidden: Vec<bool>,
    by_name: HashMap<String, u32>,
    /// Finds names of control tokens, longest first.
    names: Regex,
    /// Put in front of plain prompts, when the configuration says so.
    bos: Option<u32>,
}

impl Tokenizer {
    /// Base tokens and control slots.
    pub fn vocab_size(&self) -> usize {
        self.ends.len()
    }

    /// Whether this tokenizer belongs to a model of this configuration.
    pub fn fits(&self, config: &TargetConfig) -> Result<(), Problem> {
        if self.vocab_size() == config.vocab {
            return Ok(());
        }
        let wanted = format!(
            "{} base tokens (vocab_size {} less {SPECIAL_SLOTS} control slots)",
            config.vocab.saturating_sub(SPECIAL_SLOTS),
            config.vocab
        );
        Err(Problem::new(load::RANKS, "base tokens", self.base, wanted))
    }

    /// Ids of ordinary text. Names of control tokens in it are letters like any others.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        split::parts(text).flat_map(|part| self.bpe.encode_ordinary(part)).collect()
    }

    /// Ids of a plain prompt: ordinary text, after BOS when the configuration asks for it. Chat prompts never get one.
    pub fn encode_prompt(&self, text: &str) -> Vec<u32> {
        self.bos.into_iter().chain(self.encode(text)).collect()
    }

    /// Ids of text written by the program or the checkpoint: names of control tokens become those tokens. Never for users' text.
    pub fn encode_with_markers(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        for (range, marker) in self.markers(text) {
            match marker {
                Some(id) => ids.push(id),
                None => ids.extend(self.encode(&text[range])),
            }
        }
        ids
    }

    /// Cuts text at names of control tokens: the stretches in order, with their id where they are such a name.
    pub(super) fn markers<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (Range<usize>, Option<u32>)> + 'a {
        let mut done = 0;
        let ends = self.names.find_iter(text).map(|found| Some(found.range())).chain([None]);
        ends.flat_map(move |marker| {
            let start = marker.as_ref().map_or(text.len(), |range| range.start);
            let plain = (start > done).then_some((done..start, None));
            done = marker.as_ref().map_or(text.len(), |range| range.end);
            let marker = marker.map(|range| (range.clone(), self.special(&text[range])));
            plain.into_iter().chain(marker)
        })
    }

    /// The id of a control token by its exact name.
    pub fn special(&self, name: &str) -> Option<u32> {
        self.by_name.get(name).copied()
    }

    /// Names of all control tokens, by id.
    pub(super) fn special_names(&self) -> impl Iterator<Item = &str> {
        (self.base..self.vocab_size()).filter_map(|id| std::str::from_utf8(self.token_bytes(id as u32)?).ok())
    }

    /// Whether an id is a control slot (or outside the vocabulary), never produced by `encode`.
    pub fn is_special(&self, id: u32) -> bool {
        id as usize >= self.base
    }

    /// Whether "without special tokens" leaves an id out: control tokens flagged special in the configuration and unnamed slots. Those
    /// flagged otherwise (`<think>`, in some checkpoints the tool markers) stay in the text, as in other servers.
    pub fn is_hidden(&self, id: u32) -> bool {
        let slot = (id as usize).checked_sub(self.base);
        slot.is_some_and(|slot| self.hidden.get(slot).copied().unwrap_or(false))
    }

    /// The id put in front of plain prompts, if any.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The bytes of a token, possibly half a character; a control token's are its name. `None` outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        let end = *self.ends.get(id as usize)? as usize;
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] as usize };
        Some(&self.bytes[start..end])
    }

    /// Text of ids. Bytes that are no UTF-8 and ids outside the vocabulary become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.visible_bytes(id, skip_special)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn visible_bytes(&self, id: u32, skip_special: bool) -> &[u8] {
        if skip_special && self.is_hidden(id) {
            return &[];
        }
        self.token_bytes(id).unwrap_or(UNKNOWN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::source::ModelSource;

    pub fn mini() -> Tokenizer {
        Tokenizer::load(&ModelSource::directory(concat!(env!("CARGO_MANIFEST_DIR"), "/models/k26-mini"))).unwrap()
    }

    #[test]
    fn markers_cut_text_without_losing_any() {
        let tokenizer = mini();
        for text in ["", "plain", "<|im_end|>", "a<|im_end|>b<think></think>", "<|im_end|><|im_end|>x<|im_", "é<|reserved_token_3845|>é"]
        {
            let stretches: Vec<_> = tokenizer.markers(text).collect();
            let joined: String = stretches.iter().map(|(range, _)| &text[range.clone()]).collect();
            assert_eq!(joined, text);
            assert!(
                stretches.iter().all(|(range, id)| id.is_some() == (tokenizer.special(&text[range.clone()]).is_some())),
                "{stretches:?}"
            );
        }
    }

    #[test]
    fn it_can_be_shared_between_threads() {
        fn shared<T: Send + Sync>(_: &T) {}
        shared(&mini());
    }
}
