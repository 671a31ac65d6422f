//! Log-probabilities in the two forms of OpenAI's API. They are the target's own, before temperature, penalties, bias and
//! grammar. Every generated token has an entry, the one that ended the turn included.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::engine::contract::{Token, TokenLogprob};
use crate::model::tokenizer::Tokenizer;

/// What an impossible token (-inf) is reported as: JSON has no infinity.
const FLOOR: f32 = -9999.0;

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob.clamp(FLOOR, 0.0) } else { FLOOR }
}

/// A token's bytes as clients see them: special tokens by name.
pub fn shown_bytes(tokenizer: &Tokenizer, id: u32) -> &[u8] {
    tokenizer.token_bytes(id).unwrap_or_default()
}

/// A token as text. One that is no whole character is written as `bytes:\xNN`, as OpenAI does.
pub fn shown(tokenizer: &Tokenizer, id: u32) -> String {
    let bytes = shown_bytes(tokenizer, id);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => format!("bytes:{}", bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect::<String>()),
    }
}

/// One entry of a chat answer's `logprobs.content`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatLogprob {
    pub token: String,
    pub logprob: f32,
    pub bytes: Vec<u8>,
    pub top_logprobs: Vec<ChatTop>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatTop {
    pub token: String,
    pub logprob: f32,
    pub bytes: Vec<u8>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ChatLogprobs {
    pub content: Vec<ChatLogprob>,
}

/// Entries for `tokens`, each with at most `top` alternatives.
pub fn chat(tokenizer: &Tokenizer, tokens: &[Token], top: usize) -> ChatLogprobs {
    let entry = |id: u32, logprob: f32| ChatTop {
        token: shown(tokenizer, id),
        logprob: finite(logprob),
        bytes: shown_bytes(tokenizer, id).to_vec(),
    };
    let content = tokens.iter().filter_map(|token| token.logprob.as_ref()).map(|found| {
        let ChatTop { token, logprob, bytes } = entry(found.token, found.logprob);
        let top_logprobs = found.top.iter().take(top).map(|&(id, logprob)| entry(id, logprob)).collect();
        ChatLogprob { token, logprob, bytes, top_logprobs }
    });
    ChatLogprobs { content: content.collect() }
}

/// A completion's `logprobs`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TextLogprobs {
    pub text_offset: Vec<usize>,
    pub token_logprobs: Vec<Option<f32>>,
    pub tokens: Vec<String>,
    pub top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
}

impl TextLogprobs {
    /// Adds one token whose text begins `offset` characters into the choice's text.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, found: Option<&TokenLogprob>, top: usize, offset: usize) {
        self.tokens.push(shown(tokenizer, id));
        self.text_offset.push(offset);
        self.token_logprobs.push(found.map(|found| finite(found.logprob)));
        self.top_logprobs.push(found.map(|found| {
            let best = found.top.iter().take(top).map(|&(id, logprob)| (id, logprob));
            let all = best.chain([(found.token, found.logprob)]);
            all.map(|(id, logprob)| (shown(tokenizer, id), finite(logprob))).collect()
        }));
    }

    pub fn append(&mut self, mut more: Self) {
        self.text_offset.append(&mut more.text_offset);
        self.token_logprobs.append(&mut more.token_logprobs);
        self.tokens.append(&mut more.tokens);
        self.top_logprobs.append(&mut more.top_logprobs);
    }
}

/// vLLM's `prompt_logprobs`: per prompt token a map from id to its log-probability, rank and text; the first has none.
pub type PromptLogprobs = Vec<Option<BTreeMap<String, PromptLogprob>>>;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PromptLogprob {
    pub logprob: f32,
    pub rank: u32,
    pub decoded_token: String,
}

pub fn prompt(tokenizer: &Tokenizer, entries: &[Option<TokenLogprob>], top: usize) -> PromptLogprobs {
    let entry = |id: u32, logprob: f32, rank: u32| {
        (id.to_string(), PromptLogprob { logprob: finite(logprob), rank, decoded_token: shown(tokenizer, id) })
    };
    let one = |found: &TokenLogprob| {
        let best = found.top.iter().take(top).zip(1..).map(|(&(id, logprob), rank)| entry(id, logprob, rank));
        best.chain([entry(found.token, found.logprob, found.rank)]).collect()
    };
    entries.iter().map(|found| found.as_ref().map(one)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_number_leaves_json() {
        for bad in [f32::NEG_INFINITY, f32::NAN, f32::INFINITY, -1e30] {
            assert_eq!(finite(bad), FLOOR);
        }
        assert_eq!(finite(-0.5), -0.5);
        assert_eq!(finite(1e-7), 0.0);
    }
}
