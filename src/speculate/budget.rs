//! How many rows a round verifies. One code path serves all: plain decoding is a tree of one row, a chain a tree of width one.

use std::fmt;
use std::str::FromStr;

/// Most rows of one request in one round: the tree mask is one u64 per row.
pub const MAX_ROWS: usize = 64;

/// What a request (or the server) asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// One row: plain decoding.
    Off,
    /// The drafter's best token per slot: `block_size` rows.
    Chain,
    /// Best-first tree of this many rows, root included (1 to 64).
    Tree(u8),
    /// Chosen each round from the measured cost of a round and the running acceptance.
    Auto,
}

impl Budget {
    /// Whether a round may verify more than its anchor.
    pub fn drafts(self) -> bool {
        !matches!(self, Self::Off | Self::Tree(0 | 1))
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Chain => f.write_str("chain"),
            Self::Tree(rows) => write!(f, "tree:{rows}"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

impl FromStr for Budget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => return Ok(Self::Off),
            "chain" => return Ok(Self::Chain),
            "auto" => return Ok(Self::Auto),
            _ => {}
        }
        let rows = text.strip_prefix("tree:").and_then(|rows| rows.parse::<u8>().ok());
        match rows {
            Some(rows) if (1..=MAX_ROWS as u8).contains(&rows) => Ok(Self::Tree(rows)),
            _ => Err(format!("budget {text:?}: wanted off, chain, auto or tree:N with N from 1 to {MAX_ROWS} rows")),
        }
    }
}

impl serde::Serialize for Budget {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Budget {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}
