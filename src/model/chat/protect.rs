//! Keeps users' text from turning into control tokens inside a checkpoint's Jinja template, whose output is one string of both.
//!
//! A control token is recognised in the output by its name. Before rendering, every character in users' text that begins or ends such a
//! name (`<`, `>`, `[`, `]` for Kimi) is replaced by a private character that occurs nowhere in the conversation or the template, so a name
//! in the output begins and ends with characters the template wrote. What remains is a template that puts users' text between the two
//! ends of a name, `<|{{ name }}|>`: a text that is part of a name gets one more private character in front, which breaks the name. After
//! rendering the output is cut at the names left, and private characters in the stretches between are put back. Text without such
//! characters passes unchanged, so templates can test, compare and trim it.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::message::ChatError;
use crate::model::tokenizer::Tokenizer;

/// What is known of a tokenizer's control tokens.
pub(super) struct Protector {
    /// First and last characters of their names.
    edges: Vec<char>,
    /// Names in lower case.
    names: Vec<String>,
    /// Private characters that the template's source uses itself.
    reserved: HashSet<char>,
}

/// The replacements chosen for one conversation.
pub(super) struct Protection<'a> {
    protector: &'a Protector,
    /// Edge character and its stand-in.
    stand_ins: Vec<(char, char)>,
    /// Put in front of text that is part of a name.
    guard: char,
    /// Marks the end of the message that is to be continued.
    pub end: char,
}

impl Protector {
    /// What must be protected from this vocabulary's markers in this template.
    pub fn new(tokenizer: &Tokenizer, template: &str) -> Self {
        let mut edges: Vec<char> =
            tokenizer.special_names().flat_map(|name| [name.chars().next(), name.chars().next_back()]).flatten().collect();
        edges.sort_unstable();
        edges.dedup();
        let names = tokenizer.special_names().map(str::to_lowercase).collect();
        let mut reserved = HashSet::new();
        note_private(template, &mut reserved);
        tokenizer.special_names().for_each(|name| note_private(name, &mut reserved));
        Self { edges, names, reserved }
    }

    /// Chooses characters that none of the values (with all they hold) uses.
    ///
    /// # Errors
    /// A conversation that uses nearly every private character Unicode has.
    pub fn choose<'v>(&self, values: impl IntoIterator<Item = &'v Value>) -> Result<Protection<'_>, ChatError> {
        let mut used = self.reserved.clone();
        values.into_iter().for_each(|value| note_private_in(value, &mut used));
        let mut free = private_characters().filter(|character| !used.contains(character));
        let mut next =
            || free.next().ok_or_else(|| ChatError::new("messages", "found every private-use character of Unicode, wanted fewer"));
        let stand_ins = self.edges.iter().map(|&edge| Ok((edge, next()?))).collect::<Result<_, ChatError>>()?;
        Ok(Protection { protector: self, stand_ins, guard: next()?, end: next()? })
    }
}

impl Protection<'_> {
    /// A user's text as the template may see it.
    pub fn text(&self, text: &str) -> String {
        let mut protected = self.edges_only(text);
        let lower = text.to_lowercase();
        if !text.is_empty() && self.protector.names.iter().any(|name| name.contains(&lower)) {
            protected.insert(0, self.guard);
        }
        protected
    }

    /// Any value: all texts in it. Keys keep their beginning, as templates look values up by them.
    pub fn value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.text(text)),
            Value::Array(items) => Value::Array(items.iter().map(|item| self.value(item)).collect()),
            Value::Object(fields) => Value::Object(self.fields(fields)),
            scalar => scalar.clone(),
        }
    }

    /// An object with every key and value protected.
    pub fn fields(&self, fields: &Map<String, Value>) -> Map<String, Value> {
        fields.iter().map(|(key, value)| (self.edges_only(key), self.value(value))).collect()
    }

    fn edges_only(&self, text: &str) -> String {
        text.chars().map(|c| self.stand_ins.iter().find(|(edge, _)| *edge == c).map_or(c, |(_, stand_in)| *stand_in)).collect()
    }

    /// Ids of a template's output.
    pub fn encode(&self, tokenizer: &Tokenizer, output: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        for (range, marker) in tokenizer.markers(output) {
            match marker {
                Some(id) => ids.push(id),
                None => ids.extend(tokenizer.encode(&self.restore(&output[range]))),
            }
        }
        ids
    }

    fn restore(&self, text: &str) -> String {
        let original = |c: char| self.stand_ins.iter().find(|(_, stand_in)| *stand_in == c).map_or(c, |(edge, _)| *edge);
        text.chars().filter(|c| *c != self.guard && *c != self.end).map(original).collect()
    }
}

/// Supplementary private-use planes, then the private-use area of the basic plane.
fn private_characters() -> impl Iterator<Item = char> {
    ('\u{f0000}'..='\u{ffffd}').chain('\u{100000}'..='\u{10fffd}').chain('\u{e000}'..='\u{f8ff}')
}

fn note_private(text: &str, used: &mut HashSet<char>) {
    used.extend(text.chars().filter(|c| matches!(c, '\u{e000}'..='\u{f8ff}' | '\u{f0000}'..='\u{10ffff}')));
}

fn note_private_in(value: &Value, used: &mut HashSet<char>) {
    match value {
        Value::String(text) => note_private(text, used),
        Value::Array(items) => items.iter().for_each(|item| note_private_in(item, used)),
        Value::Object(fields) => fields.iter().for_each(|(key, value)| {
            note_private(key, used);
            note_private_in(value, used);
        }),
        _ => {}
    }
}
