//! Where keys and values live: slots handed out in aligned blocks.

pub mod slots;
