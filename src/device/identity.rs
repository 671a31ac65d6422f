//! What does the arithmetic, by name: part of the gate's certificate, so that another card, driver or kernel is proven anew.

use serde::{Deserialize, Serialize};

use super::cpu::simd::Isa;
use super::cuda::{Gpu, Numerics, image};
use crate::faults::{Fault, planted};

/// Device, driver and kernels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceIdentity {
    pub name: String,
    pub driver: String,
    /// SHA-256 of the kernels' machine code and which of its numerics run; CPU kernels are part of the binary.
    pub kernels: String,
}

impl DeviceIdentity {
    /// The CPU of this machine.
    pub fn cpu() -> Self {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).map_or("CPU", |(_, name)| name);
        Self { name: format!("{name}, {:?} path", Isa::detect()), driver: "none".into(), kernels: format!("part of the binary{}", fault()) }
    }

    /// A card with its driver; the kernels are hashed as they were loaded.
    pub fn cuda(gpu: &Gpu, numerics: Numerics) -> Self {
        let (name, target) = (&gpu.name, gpu.target.name());
        let driver = format!("CUDA {}.{}", gpu.driver / 1000, gpu.driver % 1000 / 10);
        Self { name: format!("{name}, {target}"), driver, kernels: kernels(&image::all_sha256(), numerics) + &fault() }
    }
}

/// `fast` and `exact` are other kernels of the same machine code: what one has passed says nothing of the other.
fn kernels(sha256: &str, numerics: Numerics) -> String {
    format!("{sha256}, {numerics:?}")
}

/// A planted fault makes other kernels of them.
fn fault() -> String {
    planted(Fault::KernelError).map_or(String::new(), |number| format!(", with planted fault {number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_of_the_numerics_has_passed_does_not_speak_for_the_other() {
        assert_ne!(kernels("ab", Numerics::Fast), kernels("ab", Numerics::Exact));
    }
}
