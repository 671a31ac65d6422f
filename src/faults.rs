//! Test-only fault switches. `KDTREE_FAULT=nan-logits=3,slow-load=2000` plants faults in a binary built with the feature
//! `faults`; without it every question here is answered "no" at compile time and the variable is not even read.

/// What can be made to go wrong, and what the number after `=` means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `nan-logits=N`: the logits of the N-th round of served requests are NaN, once.
    NanLogits,
    /// `sampler-error=N`: choosing the next token (grammar or sampler) fails in the N-th round, once.
    SamplerError,
    /// `engine-panic=N`: the engine thread panics in the N-th round.
    EnginePanic,
    /// `engine-hang=N`: the engine thread sleeps for ever in the N-th round.
    EngineHang,
    /// `slow-load=MS`: loading takes this many milliseconds longer.
    SlowLoad,
    /// `slow-round=MS`: every round takes this many milliseconds longer.
    SlowRound,
    /// `kernel-error=1`: the custom verify kernel returns wrong numbers, which the gate must notice.
    KernelError,
    /// `other-expert=N`: at the N-th near-tie of the CPU's router the runner-up takes the place of the last expert chosen, once, as
    /// coarser arithmetic might decide.
    OtherExpert,
}

impl Fault {
    /// Every fault.
    pub const ALL: [Self; 8] = [
        Self::NanLogits,
        Self::SamplerError,
        Self::EnginePanic,
        Self::EngineHang,
        Self::SlowLoad,
        Self::SlowRound,
        Self::KernelError,
        Self::OtherExpert,
    ];

    /// Its name in `KDTREE_FAULT`.
    pub fn name(self) -> &'static str {
        match self {
            Self::NanLogits => "nan-logits",
            Self::SamplerError => "sampler-error",
            Self::EnginePanic => "engine-panic",
            Self::EngineHang => "engine-hang",
            Self::SlowLoad => "slow-load",
            Self::SlowRound => "slow-round",
            Self::KernelError => "kernel-error",
            Self::OtherExpert => "other-expert",
        }
    }
}

/// The number set for a fault, if it is planted.
#[cfg(not(feature = "faults"))]
#[inline(always)]
pub fn planted(_fault: Fault) -> Option<u64> {
    None
}

/// From now on occasions count: warm-up and gate are over, rounds are those of served requests.
#[cfg(not(feature = "faults"))]
#[inline(always)]
pub fn arm() {}

/// Counts one occasion (a round) for this fault; true exactly on the N-th after `arm`.
#[cfg(not(feature = "faults"))]
#[inline(always)]
pub fn fires(_fault: Fault) -> bool {
    false
}

#[cfg(feature = "faults")]
pub use planted::{arm, fires, planted};

#[cfg(feature = "faults")]
mod planted {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::Fault;

    static ARMED: AtomicBool = AtomicBool::new(false);

    /// From now on occasions count: warm-up and gate are over, rounds are those of served requests.
    pub fn arm() {
        ARMED.store(true, Ordering::Relaxed);
    }

    struct Switch {
        number: Option<u64>,
        occasions: AtomicU64,
    }

    /// Parses `name=number,...`. A name nobody knows would be a test that tests nothing, so it ends the process.
    pub(super) fn parse(text: &str) -> Result<Vec<(Fault, u64)>, String> {
        let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
        items
            .map(|item| {
                let (name, number) = item.split_once('=').unwrap_or((item, "1"));
                let fault = Fault::ALL.into_iter().find(|fault| fault.name() == name);
                let fault = fault.ok_or_else(|| format!("KDTREE_FAULT: unknown fault {name:?}"))?;
                let number = number.parse().map_err(|_| format!("KDTREE_FAULT: {item:?}: wanted a whole number after ="))?;
                Ok((fault, number))
            })
            .collect()
    }

    fn switches() -> &'static [Switch; Fault::ALL.len()] {
        static SWITCHES: OnceLock<[Switch; Fault::ALL.len()]> = OnceLock::new();
        SWITCHES.get_or_init(|| {
            let set = parse(&std::env::var("KDTREE_FAULT").unwrap_or_default()).unwrap_or_else(|error| {
                eprintln!("{error}");
                std::process::exit(2);
            });
            Fault::ALL.map(|fault| Switch {
                number: set.iter().find(|(name, _)| *name == fault).map(|(_, number)| *number),
                occasions: AtomicU64::new(0),
            })
        })
    }

    /// The number set for a fault, if it is planted.
    pub fn planted(fault: Fault) -> Option<u64> {
        switches()[fault as usize].number
    }

    /// Counts one occasion (a round) for this fault; true exactly on the N-th after `arm`.
    pub fn fires(fault: Fault) -> bool {
        if !ARMED.load(Ordering::Relaxed) {
            return false;
        }
        let switch = &switches()[fault as usize];
        switch.number.is_some_and(|number| switch.occasions.fetch_add(1, Ordering::Relaxed) + 1 == number)
    }
}

#[cfg(all(test, feature = "faults"))]
mod tests {
    use super::planted::parse;
    use super::*;

    #[test]
    fn every_fault_is_known_by_its_name() {
        for (place, fault) in Fault::ALL.into_iter().enumerate() {
            assert_eq!(fault as usize, place);
            assert_eq!(parse(&format!(" {}=7 ,", fault.name())), Ok(vec![(fault, 7)]));
        }
        assert!(parse("nan-logit=3").unwrap_err().contains("nan-logit"));
        assert!(parse("nan-logits=x").unwrap_err().contains("whole number"));
    }
}
