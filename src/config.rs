//! One configuration: a TOML file, under environment variables, under flags. Every key has a default; a wrong one is named.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use crate::device::Verify;
use crate::device::cuda::Numerics;
use crate::engine::options::{DeviceKind, EngineOptions};
use crate::gate::GateConfig;
use crate::server::ServerConfig;
use crate::speculate::budget::Budget;

/// Everything that can be set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub engine: EngineOptions,
    pub server: ServerConfig,
    pub gate: GateConfig,
    pub chat: ChatConfig,
    pub log: LogConfig,
}

/// How conversations become prompts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ChatConfig {
    /// Use K2.6's own template even where the checkpoint brings one.
    pub builtin_template: bool,
}

/// Log lines on standard error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Levels, in the form of `tracing`: `info`, `debug`, `kdtree=trace` ...
    pub filter: String,
    /// One JSON object a line instead of text.
    pub json: bool,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { filter: "info".into(), json: false }
    }
}

/// Flags that stand above the file; each has an environment variable between the two.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Overrides {
    /// Configuration file (TOML)
    #[arg(long, env = "KDTREE_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory of the target model [default: the embedded one]
    #[arg(long, env = "KDTREE_MODEL", value_name = "DIR")]
    pub model: Option<String>,
    /// Directory of the DFlash drafter [default: the embedded one beside the embedded model]
    #[arg(long, env = "KDTREE_DRAFTER", value_name = "DIR")]
    pub drafter: Option<String>,
    /// Where the arithmetic runs
    #[arg(long, env = "KDTREE_DEVICE", value_enum)]
    pub device: Option<DeviceKind>,
    /// Verify attention: baseline kernel, both (returns the baseline), or the custom kernel
    #[arg(long, env = "KDTREE_VERIFY", value_enum)]
    pub verify: Option<Verify>,
    /// Arithmetic of a CUDA device: fast, or exact (a request's bits do not depend on batch or tree)
    #[arg(long, env = "KDTREE_NUMERICS", value_enum)]
    pub numerics: Option<Numerics>,
    /// Rows verified per request and round: off, chain, auto or tree:N
    #[arg(long, env = "KDTREE_BUDGET", value_name = "BUDGET")]
    pub budget: Option<Budget>,
    /// Tensor-parallel ranks
    #[arg(long, env = "KDTREE_RANKS", value_name = "N")]
    pub ranks: Option<usize>,
    /// CPU threads over all ranks; 0 = one per core
    #[arg(long, env = "KDTREE_THREADS", value_name = "N")]
    pub threads: Option<usize>,
    /// Longest prompt plus output, in tokens
    #[arg(long, env = "KDTREE_MAX_MODEL_LEN", value_name = "TOKENS")]
    pub max_model_len: Option<usize>,
    /// KV slots, in tokens
    #[arg(long, env = "KDTREE_KV_TOKENS", value_name = "TOKENS")]
    pub kv_tokens: Option<usize>,
    /// Requests that run at once
    #[arg(long, env = "KDTREE_MAX_RUNNING", value_name = "N")]
    pub max_running: Option<usize>,
}

/// The same for the server, where a command has one.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ServerOverrides {
    /// Address to listen on
    #[arg(long, env = "KDTREE_HOST")]
    pub host: Option<String>,
    /// TCP port; 0 = any free one, named in the log
    #[arg(long, env = "KDTREE_PORT")]
    pub port: Option<u16>,
    /// File of API keys, one a line
    #[arg(long, env = "KDTREE_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
}

impl ServerOverrides {
    /// `config` with what was given above it.
    #[must_use]
    pub fn over(&self, mut config: Config) -> Config {
        set(&mut config.server.host, &self.host);
        set(&mut config.server.port, &self.port);
        if self.api_key_file.is_some() {
            config.server.api_key_file.clone_from(&self.api_key_file);
        }
        config
    }
}

impl Overrides {
    /// File, environment and flags together, checked.
    pub fn load(&self) -> anyhow::Result<Config> {
        let mut config = match &self.config {
            Some(path) => Config::read(path)?,
            None => Config::default(),
        };
        let engine = &mut config.engine;
        set(&mut engine.model, &self.model);
        // A drafter belongs to its target: another target does not keep the drafter of the file.
        if self.model.is_some() && self.drafter.is_none() {
            engine.drafter.clear();
        }
        set(&mut engine.drafter, &self.drafter);
        set(&mut engine.device, &self.device);
        set(&mut engine.verify, &self.verify);
        set(&mut engine.numerics, &self.numerics);
        set(&mut engine.budget, &self.budget);
        set(&mut engine.ranks, &self.ranks);
        set(&mut engine.threads, &self.threads);
        set(&mut engine.max_model_len, &self.max_model_len);
        set(&mut engine.kv_tokens, &self.kv_tokens);
        set(&mut engine.max_running, &self.max_running);
        config.check()?;
        Ok(config)
    }
}

fn set<T: Clone>(value: &mut T, over: &Option<T>) {
    if let Some(over) = over {
        *value = over.clone();
    }
}

impl Config {
    /// # Errors
    /// The file cannot be read, or a key or value in it is wrong; the message names file, line and key.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("configuration {}", path.display()))?;
        toml::from_str(&text).map_err(|error| anyhow::anyhow!("configuration {}: {error}", path.display()))
    }

    /// Values that parse but cannot be used.
    pub fn check(&self) -> anyhow::Result<()> {
        let mut problems = self.engine.problems();
        problems.extend(self.server.check().err());
        problems.extend(self.gate.problems());
        anyhow::ensure!(problems.is_empty(), "configuration: {}", problems.join("; "));
        Ok(())
    }

    /// The whole configuration as TOML, each key under what it means.
    pub fn commented(&self) -> anyhow::Result<String> {
        let text = toml::to_string(self)?;
        let mut out = String::from("# Effective configuration of kdtree. Times in seconds, sizes in the unit of the comment.\n");
        let mut table = String::new();
        for line in text.lines() {
            if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
                table = name.to_string();
            } else if let Some((key, _)) = line.split_once(" = ")
                && let Some(comment) = comment_of(&table, key)
            {
                writeln!(out, "# {comment}")?;
            }
            writeln!(out, "{line}")?;
        }
        Ok(out)
    }
}

/// The doc comment of a key, read from the sources at build time, so that help and code cannot differ.
fn comment_of(table: &str, key: &str) -> Option<String> {
    let source = match table {
        "engine" => include_str!("engine/options.rs"),
        "server" => include_str!("server/config.rs"),
        "gate" => include_str!("gate/mod.rs"),
        "chat" | "log" => include_str!("config.rs"),
        _ => return None,
    };
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let at = lines.iter().position(|line| line.starts_with(&format!("pub {key}: ")))?;
    let comments: Vec<&str> = lines[..at].iter().rev().map_while(|line| line.strip_prefix("/// ")).collect();
    let text: Vec<&str> = comments.into_iter().rev().collect();
    (!text.is_empty()).then(|| text.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_printed_under_its_meaning_and_reads_back() {
        let text = Config::default().commented().unwrap();
        assert_eq!(toml::from_str::<Config>(&text).unwrap(), Config::default());
        let lines: Vec<&str> = text.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            if line.contains(" = ") && !line.starts_with('#') {
                assert!(lines[at - 1].starts_with("# "), "{line} has no comment");
            }
        }
    }

    #[test]
    fn flags_stand_above_the_file_and_a_wrong_key_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kdtree.toml");
        std::fs::write(&file, "[engine]\nverify = \"off\"\nbudget = \"chain\"\n").unwrap();
        let flags = Overrides { config: Some(file.clone()), budget: Some(Budget::Tree(8)), ..Overrides::default() };
        let config = flags.load().unwrap();
        assert_eq!((config.engine.verify, config.engine.budget), (Verify::Off, Budget::Tree(8)));
        let server = ServerOverrides { port: Some(9000), ..ServerOverrides::default() };
        let shown = server.over(config).commented().unwrap();
        assert!(shown.contains("\nport = 9000\n") && shown.contains("\nhost = \"127.0.0.1\"\n"), "{shown}");
        for (text, named) in [
            ("[engine]\nverfy = \"off\"\n", "verfy"),
            ("[engine]\nbudget = \"tree:65\"\n", "tree:65"),
            ("[engine]\nranks = 0\n", "engine.ranks"),
        ] {
            std::fs::write(&file, text).unwrap();
            let error = format!("{:#}", flags.load().unwrap_err());
            assert!(error.contains(named), "{error}");
        }
    }
}
