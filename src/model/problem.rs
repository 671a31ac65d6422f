//! What is wrong with a model's files: one `Problem` per finding, all of them collected before anybody gives up.
//! Used by configuration, checkpoint and `kdtree check`.

use std::collections::HashSet;
use std::fmt;

use serde::Serialize;

/// Longest list printed by `Display`; `kdtree check` prints them all.
const SHOWN: usize = 20;

/// One finding: where, about what, what is there and what should be.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Problem {
    pub file: String,
    /// Tensor name, configuration key, or what else the finding is about.
    pub subject: String,
    pub found: String,
    pub wanted: String,
}

impl Problem {
    /// A finding about `subject` in `file`.
    pub fn new(file: impl Into<String>, subject: impl Into<String>, found: impl fmt::Display, wanted: impl fmt::Display) -> Self {
        Self { file: file.into(), subject: subject.into(), found: found.to_string(), wanted: wanted.to_string() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: found {}, wanted {}", self.file, self.subject, self.found, self.wanted)
    }
}

impl std::error::Error for Problem {}

/// Everything that is wrong with one model, each thing once; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems {
    /// Which model: a directory, or the name of the embedded one.
    pub model: String,
    pub list: Vec<Problem>,
}

impl Problems {
    /// A single finding.
    pub fn one(model: impl Into<String>, problem: Problem) -> Self {
        Self { model: model.into(), list: vec![problem] }
    }

    /// Findings in order, each once.
    pub fn new(model: impl Into<String>, list: Vec<Problem>) -> Self {
        let mut unique: Vec<Problem> = Vec::with_capacity(list.len());
        let mut seen = HashSet::new();
        unique.extend(list.into_iter().filter(|problem| seen.insert(problem.clone())));
        Self { model: model.into(), list: unique }
    }

    /// `Ok(value)` when nothing was found.
    pub fn unless_empty<T>(model: &str, list: Vec<Problem>, value: T) -> Result<T, Self> {
        if list.is_empty() { Ok(value) } else { Err(Self::new(model, list)) }
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [only] = self.list.as_slice() {
            return write!(f, "model {}: {only}", self.model);
        }
        write!(f, "model {}: {} problems", self.model, self.list.len())?;
        for problem in self.list.iter().take(SHOWN) {
            write!(f, "\n  - {problem}")?;
        }
        if self.list.len() > SHOWN {
            write!(f, "\n  - and {} more (`kdtree check` lists them all)", self.list.len() - SHOWN)?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_is_cut_and_says_how_much_is_missing() {
        let list = (0..25).map(|i| Problem::new("f", format!("t{i}"), 1, 2)).collect();
        let text = Problems { model: "m".into(), list }.to_string();
        assert!(text.contains("t19") && !text.contains("t20") && text.contains("and 5 more"), "{text}");
    }

    #[test]
    fn one_problem_is_one_line() {
        let text = Problems::one("m", Problem::new("config.json", "n_group", 8, 1)).to_string();
        assert_eq!(text, "model m: config.json: n_group: found 8, wanted 1");
    }
}
