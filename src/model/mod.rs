//! What Kimi K2.6 is: configuration, checkpoint, tokenizer, chat template, and the two forward passes.

pub mod chat;
pub mod checkpoint;
pub mod config;
mod config_keys;
mod draft_config;
pub mod drafter;
pub mod embedded;
pub mod int4;
pub mod inventory;
pub mod problem;
pub mod progress;
pub mod quantization;
pub mod report;
pub mod rope;
mod scan;
mod shard_file;
pub mod source;
pub mod synthetic;
pub mod target;
pub mod tensor;
pub mod tokenizer;
pub mod weights;
