//! What `serve` makes of the gate: may this engine become ready, and with which kernel? Runs on the engine thread, after warm-up.

use super::certificate::{Certificate, Verdict};
use super::{Gate, OnFailure};
use crate::device::Verify;
use crate::engine::driver::{Driver, greedy};

/// How a server that may become ready stands.
#[derive(Clone, Debug)]
pub struct Standing {
    /// The mode it serves in.
    pub verify: Verify,
    pub gate: Outcome,
}

/// What became of the gate.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Passed now, or before by exactly this combination.
    Passed { certificate: Box<Certificate>, remembered: bool },
    /// Failed: the baseline kernel serves.
    Failed { certificate: Box<Certificate>, reason: String },
    /// Switched off by the configuration.
    Disabled,
    /// `verify = off`: the custom kernel is not served, so there is nothing to prove.
    Baseline,
}

/// Why an engine must not become ready.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The verdict of a gate that blocks. Another start would end the same way.
    #[error("the gate failed: {0}")]
    Blocked(String),
    #[error("{0}")]
    Failed(String),
}

impl Outcome {
    /// The certificate, where the gate ran or was remembered.
    pub fn certificate(&self) -> Option<&Certificate> {
        match self {
            Self::Passed { certificate, .. } | Self::Failed { certificate, .. } => Some(certificate),
            Self::Disabled | Self::Baseline => None,
        }
    }

    /// Whether the custom kernel has been proved.
    pub fn passed(&self) -> bool {
        matches!(self, Self::Passed { .. })
    }
}

impl std::fmt::Display for Standing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "verify {}, ", self.verify)?;
        match &self.gate {
            Outcome::Passed { remembered: false, .. } => f.write_str("gate passed"),
            Outcome::Passed { remembered: true, .. } => f.write_str("gate passed before"),
            Outcome::Failed { reason, .. } => write!(f, "GATE FAILED: {reason}"),
            Outcome::Disabled => f.write_str("gate disabled"),
            Outcome::Baseline => f.write_str("gate not needed"),
        }
    }
}

/// Runs the gate (`None` = disabled), draws the consequence, and lets the engine produce one real completion as it will serve.
///
/// # Errors
/// The engine must not become ready.
pub fn decide(driver: &mut dyn Driver, gate: Option<&Gate>, on_failure: OnFailure) -> Result<Standing, Refusal> {
    let outcome = match gate {
        _ if driver.verify() == Verify::Off => Outcome::Baseline,
        None => Outcome::Disabled,
        Some(gate) => judge(driver, gate, on_failure)?,
    };
    if matches!(outcome, Outcome::Failed { .. }) {
        driver.set_verify(Verify::Off).map_err(|error| Refusal::Failed(error.to_string()))?;
    }
    first_completion(driver).map_err(Refusal::Failed)?;
    Ok(Standing { verify: driver.verify(), gate: outcome })
}

fn judge(driver: &mut dyn Driver, gate: &Gate, on_failure: OnFailure) -> Result<Outcome, Refusal> {
    let checked = gate.check(driver).map_err(|error| Refusal::Failed(format!("{error:#}")))?;
    let certificate = Box::new(checked.certificate);
    if certificate.verdict == Verdict::Passed {
        let (prompts, seconds) = (certificate.report.prompts.len(), certificate.report.seconds);
        tracing::info!(prompts, seconds, remembered = checked.remembered, "gate passed");
        return Ok(Outcome::Passed { certificate, remembered: checked.remembered });
    }
    let reason = certificate.report.reason();
    for line in certificate.report.findings() {
        tracing::error!("gate: {line}");
    }
    match on_failure {
        OnFailure::Block => Err(Refusal::Blocked(reason)),
        OnFailure::Baseline => {
            tracing::error!(reason, "the gate failed: serving with the baseline kernel (verify off)");
            Ok(Outcome::Failed { certificate, reason })
        }
    }
}

/// A few tokens in the mode and with the budget that requests will have.
fn first_completion(driver: &mut dyn Driver) -> Result<(), String> {
    driver.say("first completion".into());
    let mut prompt = driver.tokenizer().encode_prompt("The capital of France is");
    let longest = driver.info().max_model_len - 1;
    prompt.truncate(longest);
    let tokens = (driver.info().max_model_len - prompt.len()).min(8) as u32;
    let results = driver.generate(vec![greedy(prompt, tokens, None)]).map_err(|error| error.to_string())?;
    match results.first().map(|result| (&result.end, result.tokens.len())) {
        Some((Ok(_), 1..)) => Ok(()),
        Some((Err(message), _)) => Err(format!("the first completion failed: {message}")),
        _ => Err("the first completion gave no token".into()),
    }
}
