//! What does the arithmetic, by name: part of the gate's certificate, so that another card, driver or kernel is proven anew.

use serde::{Deserialize, Serialize};

use super::cpu::simd::Isa;
use super::cuda::{Gpu, image};
use crate::faults::{Fault, planted};

/// Device, driver and kernels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceIdentity {
    pub name: String,
    pub driver: String,
    /// SHA-256 of the kernels' machine code; CPU kernels are part of the binary.
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
    pub fn cuda(gpu: &Gpu) -> Self {
        let (name, target) = (&gpu.name, gpu.target.name());
        let driver = format!("CUDA {}.{}", gpu.driver / 1000, gpu.driver % 1000 / 10);
        Self { name: format!("{name}, {target}"), driver, kernels: format!("{}{}", image::all_sha256(), fault()) }
    }
}

/// A planted fault makes other kernels of them.
fn fault() -> String {
    planted(Fault::KernelError).map_or(String::new(), |number| format!(", with planted fault {number}"))
}
