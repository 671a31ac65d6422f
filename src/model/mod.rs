//! What Kimi K2.6 is: configuration, checkpoint, tokenizer, chat template, and the two forward passes.

pub mod config;
mod config_keys;
mod draft_config;
pub mod embedded;
pub mod problem;
pub mod quantization;
pub mod rope;
pub mod source;
pub mod tokenizer;
