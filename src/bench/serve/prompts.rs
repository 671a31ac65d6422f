//! Distinct prompts: experts, caches and drafts must not profit from requests being alike.

use std::path::Path;

use anyhow::{Context, bail};

/// A small generator with a fixed sequence per seed (splitmix64).
pub struct Dice(u64);

impl Dice {
    /// A generator whose numbers follow from `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        value ^ (value >> 31)
    }

    /// More than 0 and at most 1.
    pub fn fraction(&mut self) -> f64 {
        ((self.roll() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    fn of<'a>(&mut self, list: &[&'a str]) -> &'a str {
        list[(self.roll() % list.len() as u64) as usize]
    }
}

/// The prompts of a run: a file's lines, or made-up questions that are all different.
pub struct Prompts {
    lines: Vec<String>,
    words: usize,
    seed: u64,
}

const ASKS: &[&str] =
    &["Write a short story about", "Explain", "List ten facts about", "Write a letter to", "Compare", "Describe a day of"];
const WHO: &[&str] =
    &["a lighthouse keeper", "the river", "two engineers", "a slow train", "the moon", "an old library", "a baker", "the first winter"];
const WHERE: &[&str] =
    &["in the north", "by the sea", "at night", "on an island", "after the storm", "in a small town", "under the bridge", "far from home"];
const FILL: &[&str] = &[
    "stone", "window", "north", "kettle", "paper", "green", "seven", "morning", "copper", "letter", "slow", "garden", "engine", "winter",
    "blue", "number", "harbour", "table", "quiet", "signal",
];

impl Prompts {
    /// The lines of `file`, or built-in questions.
    pub fn new(file: Option<&Path>, words: usize, seed: u64) -> anyhow::Result<Self> {
        let lines = match file {
            None => Vec::new(),
            Some(file) => {
                let text = std::fs::read_to_string(file).with_context(|| format!("prompts file {}", file.display()))?;
                let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect();
                if lines.is_empty() {
                    bail!("prompts file {}: found no line, wanted one prompt a line", file.display());
                }
                lines
            }
        };
        Ok(Self { lines, words, seed })
    }

    /// Prompt number `index`. Lines of a file come round again; built-in ones are all different.
    pub fn get(&self, index: usize) -> String {
        let mut dice = Dice::new(self.seed ^ (index as u64).wrapping_mul(0xD134_2543_DE82_EF95));
        let filler: Vec<_> = (0..self.words).map(|_| dice.of(FILL)).collect();
        let question = match self.lines.len() {
            0 => format!("{} {} {}, number {index}.", dice.of(ASKS), dice.of(WHO), dice.of(WHERE)),
            count => self.lines[index % count].clone(),
        };
        if filler.is_empty() { question } else { format!("Words: {}. {question}", filler.join(" ")) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn prompts_differ_and_a_seed_repeats_them() {
        let prompts = Prompts::new(None, 3, 7).unwrap();
        let all: HashSet<_> = (0..1000).map(|index| prompts.get(index)).collect();
        assert_eq!(all.len(), 1000);
        assert_eq!(Prompts::new(None, 3, 7).unwrap().get(5), prompts.get(5));
    }

    #[test]
    fn intervals_have_the_mean_they_should() {
        let mut dice = Dice::new(1);
        let mean = (0..20_000).map(|_| -dice.fraction().ln()).sum::<f64>() / 20_000.0;
        assert!((mean - 1.0).abs() < 0.05, "{mean}");
    }
}
