//! Kimi's tokenizer: `tiktoken.model`, split pattern, 256 special slots by absolute id.

/// Placeholder until the loader lands.
pub struct Tokenizer;
