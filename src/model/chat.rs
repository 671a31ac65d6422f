//! Turns a conversation into the ids of a prompt: by the checkpoint's own Jinja template, or by K2.6's built-in one. Used by the server,
//! the gate and the benches.
//!
//! Whatever users write (content, names, ids, tool schemas, results, reasoning, arguments, keyword arguments) stays ordinary text; only
//! the template writes control tokens. See `builtin` and `protect` for how each of the two sees to it.

mod builtin;
mod call_ids;
mod jinja;
mod message;
mod protect;
mod python_json;
mod tools_ts;

use std::sync::Arc;

use serde_json::{Map, Value};

use self::builtin::Markers;
use self::jinja::Jinja;
pub use self::message::{Arguments, ChatError, Conversation, Message, Role, ToolCall};
use super::config_keys::parse_object;
use super::problem::Problems;
use super::source::ModelSource;
use super::tokenizer::Tokenizer;

const TEMPLATE: &str = "chat_template.jinja";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// Keyword arguments that the server decides, not the client.
const RESERVED: [&str; 8] =
    ["messages", "tools", "tools_ts_str", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template", "documents"];

/// How a conversation is rendered.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatOptions {
    /// Let the model think before it answers.
    pub thinking: bool,
    /// Keep the reasoning of every earlier turn, not only of the running tool loop.
    pub preserve_thinking: bool,
    /// Open the assistant's turn at the end.
    pub add_generation_prompt: bool,
    /// Leave the last message, the assistant's, open so that the model goes on with it. Excludes `add_generation_prompt`.
    pub continue_final_message: bool,
    /// Further variables for the checkpoint's template.
    pub kwargs: Map<String, Value>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self { thinking: true, preserve_thinking: false, add_generation_prompt: true, continue_final_message: false, kwargs: Map::new() }
    }
}

impl ChatOptions {
    /// Takes over a request's `chat_template_kwargs`: `thinking` (also called `enable_thinking`), `preserve_thinking`, and others, which only
    /// the checkpoint's template can use.
    ///
    /// # Errors
    /// A reserved name, a switch that is no boolean, or two names of one switch that disagree.
    pub fn apply_kwargs(&mut self, kwargs: &Map<String, Value>) -> Result<(), ChatError> {
        let path = |key: &str| format!("chat_template_kwargs.{key}");
        let switch = |key: &str| match kwargs.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(on)) => Ok(Some(*on)),
            Some(other) => Err(ChatError::new(path(key), format!("found {other}, wanted true or false"))),
        };
        if let Some(key) = kwargs.keys().find(|key| RESERVED.contains(&key.as_str())) {
            return Err(ChatError::new(path(key), "cannot be set by a request"));
        }
        let thinking = match (switch("thinking")?, switch("enable_thinking")?) {
            (Some(a), Some(b)) if a != b => {
                return Err(ChatError::new(path("enable_thinking"), format!("found {b}, wanted the same as thinking ({a})")));
            }
            (a, b) => a.or(b),
        };
        self.thinking = thinking.unwrap_or(self.thinking);
        self.preserve_thinking = switch("preserve_thinking")?.unwrap_or(self.preserve_thinking);
        let others = kwargs.iter().filter(|(key, _)| !["thinking", "enable_thinking", "preserve_thinking"].contains(&key.as_str()));
        self.kwargs.extend(others.map(|(key, value)| (key.clone(), value.clone())));
        Ok(())
    }
}

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatPrompt {
    pub ids: Vec<u32>,
    /// Whether the prompt ends inside the assistant's reasoning: then the model's first tokens are reasoning.
    pub reasoning_open: bool,
    /// Index of the next tool call of the conversation, for ids `functions.NAME:INDEX`.
    pub next_call: usize,
}

/// `Send + Sync`; one per process, shared.
pub struct ChatTemplate {
    tokenizer: Arc<Tokenizer>,
    markers: Markers,
    jinja: Option<Jinja>,
}

impl ChatTemplate {
    /// The checkpoint's template: `chat_template.jinja`, else the `chat_template` of `tokenizer_config.json`, else the built-in one.
    ///
    /// # Errors
    /// A template that does not compile, or a tokenizer without Kimi's control tokens.
    pub fn load(source: &ModelSource, tokenizer: Arc<Tokenizer>) -> Result<Self, Problems> {
        let model = source.to_string();
        let fail = |problem| Problems::one(model.as_str(), problem);
        let (file, text) = match source.text(TEMPLATE).map_err(fail)? {
            Some(text) => (TEMPLATE, Some(text)),
            None => {
                let config = source.required_text(TOKENIZER_CONFIG).map_err(fail)?;
                let config = parse_object(TOKENIZER_CONFIG, &config).map_err(fail)?;
                (TOKENIZER_CONFIG, config.get("chat_template").and_then(Value::as_str).map(str::to_string))
            }
        };
        match text {
            Some(text) => Self::jinja(file, text, tokenizer).map_err(|problems| Problems { model, ..problems }),
            None => Self::builtin(tokenizer),
        }
    }

    /// A Jinja template given as text; `file` names it in errors. Errors as for `load`.
    pub fn jinja(file: &str, text: String, tokenizer: Arc<Tokenizer>) -> Result<Self, Problems> {
        let jinja = Jinja::new(file, text, &tokenizer).map_err(|problem| Problems::one("chat template", problem))?;
        Ok(Self { jinja: Some(jinja), ..Self::builtin(tokenizer)? })
    }

    /// K2.6's template, whatever the checkpoint brings.
    ///
    /// # Errors
    /// A tokenizer without Kimi's control tokens.
    pub fn builtin(tokenizer: Arc<Tokenizer>) -> Result<Self, Problems> {
        let markers = Markers::of(&tokenizer).map_err(|problem| Problems::one("chat template", problem))?;
        Ok(Self { tokenizer, markers, jinja: None })
    }

    /// Whether K2.6's own template renders, for lack of one in the checkpoint or by choice.
    pub fn is_builtin(&self) -> bool {
        self.jinja.is_none()
    }

    /// The prompt of a conversation. One that uses tools (on offer or in its history) is rendered by the built-in template when the
    /// checkpoint's knows none: that one would drop declarations, calls and the ids of results without a word.
    ///
    /// # Errors
    /// `continue_final_message` without an assistant's turn to continue, or whatever the checkpoint's template refuses.
    pub fn render(&self, conversation: &Conversation, options: &ChatOptions) -> Result<ChatPrompt, ChatError> {
        check_ending(conversation, options)?;
        let mut renamed = conversation.clone();
        call_ids::rename(&mut renamed);
        let ids = match &self.jinja {
            Some(jinja) if jinja.knows_tools || !conversation.uses_tools() => jinja.render(&self.tokenizer, &renamed, options)?,
            _ => self.markers.render(&self.tokenizer, &renamed, options),
        };
        let is_think = |id: &&u32| **id == self.markers.think || **id == self.markers.think_end;
        let reasoning_open = (options.add_generation_prompt || options.continue_final_message)
            && ids.iter().rev().find(is_think) == Some(&self.markers.think);
        Ok(ChatPrompt { ids, reasoning_open, next_call: conversation.calls() })
    }
}

fn check_ending(conversation: &Conversation, options: &ChatOptions) -> Result<(), ChatError> {
    let Some(last) = conversation.messages.last() else {
        return Err(ChatError::new("messages", "found an empty list, wanted at least one message"));
    };
    if !options.continue_final_message {
        return Ok(());
    }
    if options.add_generation_prompt {
        return Err(ChatError::new("continue_final_message", "excludes add_generation_prompt: set that to false"));
    }
    if last.role != Role::Assistant || !last.tool_calls.is_empty() {
        let message = "wanted an assistant's message without tool calls at the end, to be continued";
        return Err(ChatError::new("continue_final_message", message));
    }
    Ok(())
}
