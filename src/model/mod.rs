//! What Kimi K2.6 is: configuration, checkpoint, tokenizer, chat template, and the two forward passes.

pub mod tokenizer;
