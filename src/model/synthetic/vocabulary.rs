//! Tokenizer files for a synthetic model: all single bytes, then longer byte strings, then Kimi's control tokens at their offsets.

use std::fmt::Write;
use std::io;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

/// Control tokens by their offset from the first control slot.
const CONTROL: [(usize, &str); 23] = [
    (0, "[BOS]"),
    (1, "[EOS]"),
    (2, "<|im_end|>"),
    (3, "<|im_user|>"),
    (4, "<|im_assistant|>"),
    (6, "<|start_header_id|>"),
    (7, "<|end_header_id|>"),
    (9, "[EOT]"),
    (10, "<|im_system|>"),
    (11, "<|tool_calls_section_begin|>"),
    (12, "<|tool_calls_section_end|>"),
    (13, "<|tool_call_begin|>"),
    (14, "<|tool_call_argument_begin|>"),
    (15, "<|tool_call_end|>"),
    (17, "<|im_middle|>"),
    (18, "<|media_begin|>"),
    (19, "<|media_content|>"),
    (20, "<|media_end|>"),
    (21, "<|media_pad|>"),
    (22, "<think>"),
    (23, "</think>"),
    (254, "[UNK]"),
    (255, "[PAD]"),
];

/// Writes `tiktoken.model` and `tokenizer_config.json` for a vocabulary of this size.
pub fn write(directory: &Path, vocab: usize) -> io::Result<()> {
    let base = vocab.checked_sub(512).map(|longer| 256 + longer);
    let Some(base) = base else {
        return Err(io::Error::other(format!("a vocabulary of {vocab}: at least 512 (256 bytes, 256 control slots)")));
    };
    let mut ranks = String::new();
    for rank in 0..base {
        let _ = writeln!(ranks, "{} {rank}", STANDARD.encode(token(rank)));
    }
    std::fs::write(directory.join("tiktoken.model"), ranks)?;
    let name = |(offset, name): (usize, &str)| {
        let special = !matches!(name, "<think>" | "</think>");
        ((base + offset).to_string(), json!({"content": name, "special": special}))
    };
    let added: Map<String, Value> = CONTROL.into_iter().map(name).collect();
    std::fs::write(directory.join("tokenizer_config.json"), json!({"added_tokens_decoder": added, "bos_token": "[BOS]"}).to_string())
}

/// All bytes, then all pairs, then triples.
fn token(rank: usize) -> Vec<u8> {
    match rank {
        0..256 => vec![rank as u8],
        256..65_792 => ((rank - 256) as u16).to_be_bytes().to_vec(),
        _ => ((rank - 65_792) as u32).to_be_bytes()[1..].to_vec(),
    }
}
