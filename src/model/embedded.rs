//! The default model inside the binary: `models/k26-mini` and its drafter as (file name, bytes). Empty without the feature
//! `embedded-model`. Read through `source::ModelSource` only.

/// Files of one embedded model.
pub type Files = &'static [(&'static str, &'static [u8])];

#[cfg(feature = "embedded-model")]
mod files {
    use super::Files;

    /// Gives bytes the alignment that tensor views need, so that nothing is copied at load.
    #[repr(C, align(64))]
    struct Aligned<T: ?Sized>(T);

    macro_rules! file {
        ($directory:literal, $name:literal) => {{
            static FILE: &Aligned<[u8]> =
                &Aligned(*include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/models/", $directory, "/", $name)));
            ($name, &FILE.0)
        }};
    }

    /// The target, `models/k26-mini`.
    pub static TARGET: Files = &[
        file!("k26-mini", "config.json"),
        file!("k26-mini", "generation_config.json"),
        file!("k26-mini", "model.safetensors.index.json"),
        file!("k26-mini", "model-00001-of-000002.safetensors"),
        file!("k26-mini", "model-00002-of-000002.safetensors"),
        file!("k26-mini", "tiktoken.model"),
        file!("k26-mini", "tokenizer_config.json"),
        file!("k26-mini", "chat_template.jinja"),
    ];

    /// Its drafter, `models/k26-mini-dflash`.
    pub static DRAFTER: Files = &[file!("k26-mini-dflash", "config.json"), file!("k26-mini-dflash", "model.safetensors")];
}

#[cfg(feature = "embedded-model")]
pub use files::{DRAFTER, TARGET};

/// No target in this binary.
#[cfg(not(feature = "embedded-model"))]
pub static TARGET: Files = &[];
/// Nor a drafter.
#[cfg(not(feature = "embedded-model"))]
pub static DRAFTER: Files = &[];
