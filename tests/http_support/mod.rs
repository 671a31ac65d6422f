//! What the HTTP tests share: a plain client that sees every byte, and the real binary as a child process.
#![allow(dead_code)]

pub mod wire;
