//! `kdtree doctor`: which card, which machine code, and why.

use std::process::ExitCode;

use super::output::print;
use crate::device::cuda::error::CudaError;
use crate::device::cuda::{gpu, image};

/// Say which card and which kernels this machine would use, and why.
#[derive(clap::Args, Debug)]
pub struct Args {}

/// Prints the findings. Exit code 0 with a usable card, 1 without one.
pub fn run(_: Args) -> anyhow::Result<ExitCode> {
    let (text, usable) = report(gpu::driver_version(), gpu::cards());
    print(text)?;
    Ok(if usable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The findings as text, and whether any card can be used.
fn report(driver: Result<i32, CudaError>, cards: Result<Vec<gpu::Card>, CudaError>) -> (String, bool) {
    let mut lines = Vec::new();
    if image::built() {
        let short = image::KERNEL_SHA256.get(..12).unwrap_or_default();
        lines.push(format!("kernels: sm_90a and sm_120a, built by nvcc {}, sm_90a code {short}", image::NVCC_VERSION));
    } else {
        lines.push(format!("kernels: none. {}", CudaError::BuiltWithout));
    }
    let new_enough = match &driver {
        Ok(version) if *version >= 13000 => {
            lines.push(format!("driver: CUDA {}.{}", version / 1000, version % 1000 / 10));
            true
        }
        Ok(version) => {
            lines.push(format!("driver: {}", CudaError::OldDriver { found: *version }));
            false
        }
        Err(e) => {
            lines.push(format!("driver: {e}"));
            false
        }
    };
    let mut usable = false;
    match cards {
        Ok(cards) => {
            for card in cards {
                let why = match card.target {
                    Some(target) if !image::built() => format!("would run {}, but this build holds no kernels", target.name()),
                    Some(target) if new_enough => {
                        usable = true;
                        format!("image {}: architecture-specific code for exactly this capability", target.name())
                    }
                    Some(target) => format!("would run {}, but the driver is too old", target.name()),
                    None => "no image: this build holds code for 9.0 and 12.0 only, and such code runs on no other capability".into(),
                };
                lines.push(format!(
                    "card {}: {}, compute capability {}.{}; {why}",
                    card.ordinal, card.name, card.capability.0, card.capability.1
                ));
            }
        }
        Err(e) if driver.is_ok() => lines.push(format!("cards: {e}")),
        Err(_) => {}
    }
    lines.push(if usable { "device: cuda".into() } else { "device: cpu".to_owned() });
    (lines.join("\n") + "\n", usable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::image::Target;

    fn card(capability: (i32, i32)) -> gpu::Card {
        gpu::Card { ordinal: 0, name: "a card".into(), capability, target: Target::for_capability(capability), memory: 96 << 30 }
    }

    #[test]
    fn without_a_driver_it_says_so_and_chooses_the_cpu() {
        let (text, usable) = report(Err(CudaError::NoDriver), Err(CudaError::NoDriver));
        assert!(!usable && text.contains("libcuda.so.1") && text.ends_with("device: cpu\n"), "{text}");
    }

    #[test]
    fn an_unknown_capability_is_refused_with_the_reason() {
        let (text, usable) = report(Ok(13000), Ok(vec![card((8, 9))]));
        assert!(!usable && text.contains("8.9; no image"), "{text}");
    }

    #[test]
    fn a_known_card_gets_the_image_of_its_capability_when_kernels_are_built() {
        let (text, usable) = report(Ok(13000), Ok(vec![card((12, 0))]));
        assert_eq!(usable, image::built());
        assert!(text.contains("sm_120a"), "{text}");
        assert!(!report(Ok(12080), Ok(vec![card((12, 0))])).1);
    }
}
