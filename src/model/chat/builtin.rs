//! Kimi K2.6's own template, written out: it appends control tokens by id and everything else as ordinary text, so nothing a user writes
//! can become a control token. Used when the checkpoint has no template, when the server forces it, and for tools when the checkpoint's
//! template knows none.

use super::message::{Arguments, Conversation, Message, Role, ToolCall};
use super::python_json::{Separators, dumps};
use super::{ChatOptions, tools_ts};
use crate::model::problem::Problem;
use crate::model::tokenizer::Tokenizer;

/// Ids of the control tokens that the template writes.
pub(super) struct Markers {
    user: u32,
    assistant: u32,
    system: u32,
    middle: u32,
    end: u32,
    pub think: u32,
    pub think_end: u32,
    section: u32,
    section_end: u32,
    call: u32,
    arguments: u32,
    call_end: u32,
}

impl Markers {
    /// The template with the control tokens of this vocabulary; one that is missing is named.
    pub fn of(tokenizer: &Tokenizer) -> Result<Self, Problem> {
        let id = |name: &str| {
            let wanted = "this control token (the built-in chat template writes it)";
            tokenizer.special(name).ok_or_else(|| Problem::new("tokenizer_config.json", name, "nothing", wanted))
        };
        Ok(Self {
            user: id("<|im_user|>")?,
            assistant: id("<|im_assistant|>")?,
            system: id("<|im_system|>")?,
            middle: id("<|im_middle|>")?,
            end: id("<|im_end|>")?,
            think: id("<think>")?,
            think_end: id("</think>")?,
            section: id("<|tool_calls_section_begin|>")?,
            section_end: id("<|tool_calls_section_end|>")?,
            call: id("<|tool_call_begin|>")?,
            arguments: id("<|tool_call_argument_begin|>")?,
            call_end: id("<|tool_call_end|>")?,
        })
    }

    /// Renders a conversation whose call ids are renamed already.
    pub fn render(&self, tokenizer: &Tokenizer, conversation: &Conversation, options: &ChatOptions) -> Vec<u32> {
        let mut page = Page { tokenizer, markers: self, ids: Vec::new(), text: String::new() };
        if !conversation.tools.is_empty() {
            page.open(self.system, "tool_declare");
            page.text(&tools_ts::declare(&conversation.tools));
            page.marker(self.end);
        }
        let loop_start = start_of_tool_loop(conversation);
        let last = conversation.messages.len() - 1;
        for (i, message) in conversation.messages.iter().enumerate() {
            let continued = options.continue_final_message && i == last;
            let reasoning = options.thinking && (options.preserve_thinking || i >= loop_start || continued);
            page.message(message, reasoning, continued);
            if !continued {
                page.marker(self.end);
            }
        }
        if options.add_generation_prompt {
            page.open(self.assistant, "assistant");
            page.marker(self.think);
            if !options.thinking {
                page.marker(self.think_end);
            }
        }
        page.finish()
    }
}

/// First message after the last assistant message without calls: from there on reasoning is kept, as the model is still at its task.
fn start_of_tool_loop(conversation: &Conversation) -> usize {
    let plain = |message: &Message| message.role == Role::Assistant && message.tool_calls.is_empty();
    conversation.messages.iter().rposition(plain).map_or(0, |last| last + 1)
}

/// Collects ids: text between two control tokens is encoded as one stretch.
struct Page<'a> {
    tokenizer: &'a Tokenizer,
    markers: &'a Markers,
    ids: Vec<u32>,
    text: String,
}

impl Page<'_> {
    fn text(&mut self, text: &str) {
        self.text.push_str(text);
    }

    fn marker(&mut self, id: u32) {
        self.flush();
        self.ids.push(id);
    }

    fn flush(&mut self) {
        self.ids.extend(self.tokenizer.encode(&self.text));
        self.text.clear();
    }

    fn finish(mut self) -> Vec<u32> {
        self.flush();
        self.ids
    }

    /// Role marker and name.
    fn open(&mut self, role: u32, name: &str) {
        self.marker(role);
        self.text(name);
        self.marker(self.markers.middle);
    }

    fn message(&mut self, message: &Message, reasoning: bool, continued: bool) {
        let role = match message.role {
            Role::User => self.markers.user,
            Role::Assistant => self.markers.assistant,
            Role::System | Role::Tool => self.markers.system,
        };
        self.open(role, message.name.as_deref().unwrap_or(message.role.name()));
        match message.role {
            Role::Assistant => return self.assistant(message, reasoning, continued),
            Role::Tool => self.text(&format!("## Return of {}\n", message.tool_call_id.as_deref().unwrap_or_default())),
            Role::User | Role::System => {}
        }
        self.text(&message.content);
    }

    fn assistant(&mut self, message: &Message, reasoning: bool, continued: bool) {
        let thoughts = message.reasoning.as_deref().filter(|_| reasoning).unwrap_or_default();
        self.marker(self.markers.think);
        self.text(thoughts);
        // A turn that was cut while it was thinking goes on thinking.
        if continued && message.content.is_empty() && !thoughts.is_empty() {
            return;
        }
        self.marker(self.markers.think_end);
        self.text(&message.content);
        if !message.tool_calls.is_empty() {
            self.marker(self.markers.section);
            message.tool_calls.iter().for_each(|call| self.call(call));
            self.marker(self.markers.section_end);
        }
    }

    fn call(&mut self, call: &ToolCall) {
        self.marker(self.markers.call);
        self.text(call.id.as_deref().unwrap_or_default());
        self.marker(self.markers.arguments);
        match &call.arguments {
            Arguments::Text(text) => self.text(text),
            Arguments::Json(value) => self.text(&dumps(value, &Separators::spaced(), None)),
        }
        self.marker(self.markers.call_end);
    }
}
