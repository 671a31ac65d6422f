//! The machine code in this binary, and which of it a card can run.

use sha2::{Digest, Sha256};

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Targets that every kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Hopper: H100, H200. What the kernels are measured on.
    Sm90a,
    /// RTX PRO 6000 Blackwell, RTX 50. What the kernels are written for.
    Sm120a,
}

impl Target {
    /// The target for a compute capability. "a" code runs on exactly its own capability, so there is nothing to fall back to.
    pub fn for_capability(capability: (i32, i32)) -> Option<Self> {
        match capability {
            (9, 0) => Some(Self::Sm90a),
            (12, 0) => Some(Self::Sm120a),
            _ => None,
        }
    }

    /// As compilers call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sm90a => "sm_90a",
            Self::Sm120a => "sm_120a",
        }
    }
}

/// Whether this build holds kernels.
pub fn built() -> bool {
    !FATBINS.is_empty()
}

/// The fatbin of a kernel file, by the path of its source with `_` for `/`, such as `verify_tree`.
pub fn fatbin(name: &str) -> Option<&'static [u8]> {
    FATBINS.iter().find(|(known, _)| *known == name).map(|(_, bytes)| *bytes)
}

/// SHA-256 over names and bytes of all fatbins of this binary.
pub fn all_sha256() -> String {
    let mut hasher = Sha256::new();
    for (name, bytes) in FATBINS {
        hasher.update(name.as_bytes());
        hasher.update((bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    }
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architecture_specific_code_is_chosen_for_exactly_its_own_capability() {
        assert_eq!(Target::for_capability((9, 0)), Some(Target::Sm90a));
        assert_eq!(Target::for_capability((12, 0)), Some(Target::Sm120a));
        for other in [(8, 9), (9, 1), (10, 0), (10, 3), (12, 1)] {
            assert_eq!(Target::for_capability(other), None);
        }
    }

    #[test]
    fn a_build_has_all_kernels_or_none() {
        for name in ["verify_baseline", "verify_tree", "verify_merge", "bench_ceilings", "testing_reference", "testing_fill"] {
            assert_eq!(fatbin(name).is_some(), built(), "{name}");
        }
        assert_eq!(KERNEL_SHA256.len(), if built() { 64 } else { 0 });
    }
}
