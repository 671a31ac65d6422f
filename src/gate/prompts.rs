//! What the gate generates from: a built-in set, or a file with one JSON object a line. Read before a model is loaded for minutes,
//! so that a mistake in the file shows at once.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::GateConfig;
use super::hashes::hex;
use crate::cache::slots::BLOCK;
use crate::engine::contract::ModelInfo;
use crate::model::chat::{ChatOptions, ChatTemplate, Conversation};
use crate::model::tokenizer::Tokenizer;
use crate::speculate::budget::MAX_ROWS;

/// One prompt as it goes to the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// How reports name it: the text, or the user's message.
    pub shown: String,
    pub ids: Vec<u32>,
}

/// All prompts of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptSet {
    /// `built-in` or the file's path.
    pub source: String,
    pub prompts: Vec<Prompt>,
    /// Tokens generated per prompt.
    pub max_tokens: u32,
}

/// What turns text into prompts, and how long they may be.
#[derive(Clone, Copy)]
pub struct Renderer<'a> {
    pub tokenizer: &'a Tokenizer,
    pub chat: &'a ChatTemplate,
    pub info: &'a ModelInfo,
}

/// A line of a prompt file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    text: Option<String>,
    user: Option<String>,
    thinking: Option<bool>,
}

/// One prompt before it is rendered.
enum Spec {
    Text(String),
    Chat { user: String, thinking: bool },
}

/// Longer than two splits of the custom kernel with any tokenizer in use, so that a lost split shows.
const LONG: &str = include_str!("long_prompt.txt");

/// The built-in set: raw text, both kinds of chat turns, and one long text.
fn built_in() -> Vec<Spec> {
    let text = |text: &str| Spec::Text(text.into());
    let chat = |user: &str, thinking| Spec::Chat { user: user.into(), thinking };
    vec![
        text("The capital of France is"),
        text("Write one sentence about the ocean:"),
        text("List three primes:"),
        chat("What is the capital of France?", false),
        chat("Tom has 5 apples and buys 7 more. How many has he?", true),
        text(LONG.trim_end()),
    ]
}

impl PromptSet {
    /// The configured file, or the built-in set cut to what the model can hold.
    ///
    /// # Errors
    /// The file cannot be read, a line of it is no prompt or too long for the model, or there is none; the line is named.
    pub fn load(config: &GateConfig, renderer: Renderer<'_>) -> anyhow::Result<Self> {
        match &config.prompts {
            Some(file) => Self::read(file, config.max_tokens, renderer),
            None => Self::built_in(config.max_tokens, renderer),
        }
    }

    fn read(file: &Path, max_tokens: u32, renderer: Renderer<'_>) -> anyhow::Result<Self> {
        let name = file.display();
        let text = std::fs::read_to_string(file).with_context(|| format!("gate prompts {name}"))?;
        let mut prompts = Vec::new();
        for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let place = || format!("gate prompts {name}, line {}", at + 1);
            let prompt = renderer.render(&parse(line).with_context(place)?).with_context(place)?;
            let (found, room) = (prompt.ids.len() + max_tokens as usize, renderer.room());
            ensure!(
                found <= room,
                "{}: found a prompt of {} tokens and {max_tokens} to generate, wanted at most {room} together",
                place(),
                prompt.ids.len()
            );
            prompts.push(prompt);
        }
        ensure!(!prompts.is_empty(), "gate prompts {name}: found no prompt, wanted one JSON object a line");
        Ok(Self { source: name.to_string(), prompts, max_tokens })
    }

    fn built_in(max_tokens: u32, renderer: Renderer<'_>) -> anyhow::Result<Self> {
        let room = renderer.room();
        ensure!(room >= 4, "the gate needs room for 4 tokens, found {room} (engine.max_model_len, engine.kv_tokens)");
        let max_tokens = max_tokens.min((room / 2) as u32);
        let longest = room - max_tokens as usize;
        let render = |spec| {
            let mut prompt = renderer.render(&spec)?;
            prompt.ids.drain(..prompt.ids.len().saturating_sub(longest));
            Ok(prompt)
        };
        let prompts: anyhow::Result<Vec<Prompt>> = built_in().into_iter().map(render).collect();
        Ok(Self { source: "built-in".into(), prompts: prompts?, max_tokens })
    }

    /// SHA-256 over every prompt's token ids: tokenizer and chat template are part of it.
    pub fn sha256(&self) -> String {
        let mut hasher = Sha256::new();
        for prompt in &self.prompts {
            hasher.update((prompt.ids.len() as u64).to_le_bytes());
            prompt.ids.iter().for_each(|id| hasher.update(id.to_le_bytes()));
        }
        hex(&hasher.finalize())
    }
}

impl Renderer<'_> {
    /// Most tokens of a prompt and its answer together.
    fn room(&self) -> usize {
        self.info.max_model_len.min((self.info.kv_slots / BLOCK * BLOCK).saturating_sub(MAX_ROWS))
    }

    fn render(&self, spec: &Spec) -> anyhow::Result<Prompt> {
        let (shown, ids) = match spec {
            Spec::Text(text) => (text, self.tokenizer.encode_prompt(text)),
            Spec::Chat { user, thinking } => {
                let conversation = Conversation::parse(&json!([{"role": "user", "content": user}]), None)?;
                let options = ChatOptions { thinking: *thinking, ..ChatOptions::default() };
                (user, self.chat.render(&conversation, &options)?.ids)
            }
        };
        ensure!(!ids.is_empty(), "found no token in the prompt, wanted at least one");
        Ok(Prompt { shown: shown.clone(), ids })
    }
}

fn parse(line: &str) -> anyhow::Result<Spec> {
    const WANTED: &str = r#"wanted {"text": ...} or {"user": ..., "thinking": true or false}"#;
    let line: Line = serde_json::from_str(line).map_err(|error| anyhow::anyhow!("{error}; {WANTED}"))?;
    Ok(match line {
        Line { text: Some(text), user: None, thinking: None } if !text.is_empty() => Spec::Text(text),
        Line { text: None, user: Some(user), thinking } if !user.is_empty() => Spec::Chat { user, thinking: thinking.unwrap_or(false) },
        Line { text: Some(_), user: None, thinking: None } | Line { text: None, user: Some(_), .. } => bail!("found an empty prompt"),
        Line { text: Some(_), user: None, thinking: Some(_) } => bail!("found thinking without user; {WANTED}"),
        Line { text: Some(_), user: Some(_), .. } => bail!("found both text and user; {WANTED}"),
        Line { text: None, user: None, .. } => bail!("found neither text nor user; {WANTED}"),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::device::cpu::verify::SPLIT;
    use crate::model::source::ModelSource;

    fn info(max_model_len: usize, kv_slots: usize) -> ModelInfo {
        ModelInfo { name: "m".into(), vocab_size: 4096, max_model_len, stop_ids: vec![], max_rows: 64, max_running: 4, kv_slots }
    }

    fn load(text: Option<&str>, info: &ModelInfo) -> anyhow::Result<PromptSet> {
        let tokenizer = Arc::new(Tokenizer::load(&ModelSource::directory("models/k26-mini")).unwrap());
        let chat = ChatTemplate::builtin(tokenizer.clone()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("prompts.jsonl");
        let prompts = text.map(|text| {
            std::fs::write(&file, text).unwrap();
            file.clone()
        });
        let renderer = Renderer { tokenizer: &tokenizer, chat: &chat, info };
        PromptSet::load(&GateConfig { prompts, ..GateConfig::default() }, renderer)
    }

    #[test]
    fn the_built_in_set_crosses_two_borders_between_splits() {
        let set = load(None, &info(8192, 8192)).unwrap();
        assert_eq!((set.prompts.len(), set.max_tokens), (6, 24));
        assert!(set.prompts.iter().any(|prompt| prompt.ids.len() > 2 * SPLIT));
    }

    #[test]
    fn the_built_in_set_fits_a_small_context_and_a_small_cache() {
        for info in [info(64, 8192), info(8192, 64 + 48), info(4, 1024)] {
            let set = load(None, &info).unwrap();
            let longest = set.prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap();
            assert!(longest + set.max_tokens as usize <= info.max_model_len.min(info.kv_slots - 64), "{info:?}");
            assert!(set.max_tokens > 0 && longest > 0);
        }
    }

    #[test]
    fn a_file_gives_its_prompts_and_another_file_another_hash() {
        let info = info(8192, 8192);
        let one = load(Some("{\"text\": \"Hello\"}\n\n{\"user\": \"Hi\", \"thinking\": true}\n"), &info).unwrap();
        assert_eq!(one.prompts.iter().map(|prompt| prompt.shown.as_str()).collect::<Vec<_>>(), ["Hello", "Hi"]);
        let other = load(Some("{\"text\": \"Hello\"}\n{\"user\": \"Hi\", \"thinking\": false}\n"), &info).unwrap();
        assert_ne!(one.sha256(), other.sha256());
    }

    #[test]
    fn a_broken_line_is_named_with_what_was_wanted() {
        let long = format!("{{\"text\": {:?}}}", "word ".repeat(100));
        for (text, line, named) in [
            ("{\"text\": \"a\"}\n{\"text\": ", "line 2", "EOF"),
            ("\n\n[1]", "line 3", "wanted {\"text\""),
            ("{\"txet\": \"a\"}", "line 1", "txet"),
            ("{\"text\": \"\"}", "line 1", "empty prompt"),
            ("{\"user\": \"\"}", "line 1", "empty prompt"),
            ("{\"text\": \"a\", \"user\": \"b\"}", "line 1", "both"),
            ("{\"text\": \"a\", \"thinking\": true}", "line 1", "thinking without user"),
            ("{}", "line 1", "neither"),
            (long.as_str(), "line 1", "at most 64"),
            ("\n", "prompts.jsonl", "no prompt"),
        ] {
            let error = format!("{:#}", load(Some(text), &info(64, 8192)).unwrap_err());
            assert!(error.contains(line) && error.contains(named), "{text:?}: {error}");
        }
    }
}
