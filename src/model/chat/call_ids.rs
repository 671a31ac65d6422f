//! Kimi was trained on call ids of the form `functions.NAME:INDEX`, INDEX counting all calls of the conversation from 0. Clients hand back
//! other ids (`call_abc`, cut or repeated ones); the template prints them and the model copies them, so every id is renamed here, in
//! calls and results alike, before anything is rendered.

use std::collections::HashMap;

use super::message::{Conversation, Message, Role};

/// Renames all ids. A result belongs to the first unanswered call of its id, else to the latest one; without an id to the first
/// unanswered call, of its name if it has one. A result that belongs to no call keeps its id and text.
pub fn rename(conversation: &mut Conversation) {
    let mut history = History::default();
    for message in &mut conversation.messages {
        for call in &mut message.tool_calls {
            let new_id = format!("functions.{}:{}", call.name, history.calls.len());
            history.add(&call.name, call.id.replace(new_id.clone()), new_id);
        }
        if message.role == Role::Tool
            && let Some(call) = history.answered_by(message)
        {
            let call = &mut history.calls[call];
            call.answered = true;
            message.tool_call_id = Some(call.new_id.clone());
        }
    }
}

/// One call of the history.
struct Call {
    new_id: String,
    answered: bool,
}

/// Calls with something in common, in order; those before `open` are all answered.
#[derive(Default)]
struct Group {
    calls: Vec<usize>,
    open: usize,
}

impl Group {
    /// The first unanswered one. However often it is asked, every call is passed over once.
    fn first_open(&mut self, calls: &[Call]) -> Option<usize> {
        while self.calls.get(self.open).is_some_and(|call| calls[*call].answered) {
            self.open += 1;
        }
        self.calls.get(self.open).copied()
    }
}

/// All calls so far.
#[derive(Default)]
struct History {
    calls: Vec<Call>,
    all: Group,
    by_id: HashMap<String, Group>,
    by_name: HashMap<String, Group>,
}

impl History {
    fn add(&mut self, name: &str, old_id: Option<String>, new_id: String) {
        let place = self.calls.len();
        self.calls.push(Call { new_id, answered: false });
        self.all.calls.push(place);
        self.by_name.entry(name.to_string()).or_default().calls.push(place);
        if let Some(id) = old_id {
            self.by_id.entry(id).or_default().calls.push(place);
        }
    }

    fn answered_by(&mut self, result: &Message) -> Option<usize> {
        match (&result.tool_call_id, &result.name) {
            (Some(id), _) => {
                let group = self.by_id.get_mut(id)?;
                group.first_open(&self.calls).or_else(|| group.calls.last().copied())
            }
            (None, Some(name)) => self.by_name.get_mut(name)?.first_open(&self.calls),
            (None, None) => self.all.first_open(&self.calls),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn renamed(messages: Value) -> Vec<Vec<String>> {
        let mut conversation = Conversation::parse(&messages, None).unwrap();
        rename(&mut conversation);
        let ids = |message: &Message| match message.role {
            Role::Tool => vec![message.tool_call_id.clone().unwrap_or_default()],
            _ => message.tool_calls.iter().map(|call| call.id.clone().unwrap()).collect(),
        };
        conversation.messages.iter().map(ids).collect()
    }

    fn calls(ids: &[Option<&str>]) -> Value {
        let call = |id: &Option<&str>| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
        json!({"role": "assistant", "tool_calls": ids.iter().map(call).collect::<Vec<_>>()})
    }

    fn result(id: Option<&str>) -> Value {
        json!({"role": "tool", "tool_call_id": id, "content": "x"})
    }

    #[test]
    fn ids_count_over_the_whole_conversation() {
        let ids =
            renamed(json!([calls(&[Some("a"), Some("b")]), result(Some("b")), result(Some("a")), calls(&[Some("c")]), result(Some("c"))]));
        let wanted: [&[&str]; 5] =
            [&["functions.f:0", "functions.f:1"], &["functions.f:1"], &["functions.f:0"], &["functions.f:2"], &["functions.f:2"]];
        assert_eq!(ids, wanted);
    }

    #[test]
    fn a_repeated_id_means_the_calls_in_turn() {
        let turn = [calls(&[Some("0")]), result(Some("0"))];
        let ids = renamed(json!([turn[0], turn[1], turn[0], turn[1], turn[1]]));
        assert_eq!(ids[1..], [["functions.f:0"], ["functions.f:1"], ["functions.f:1"], ["functions.f:1"]]);
        let ids = renamed(json!([calls(&[Some("x"), Some("x")]), result(Some("x")), result(Some("x"))]));
        assert_eq!(ids[1..], [["functions.f:0"], ["functions.f:1"]]);
    }

    #[test]
    fn results_without_an_id_answer_the_open_calls() {
        let ids = renamed(json!([calls(&[None, None]), result(None), result(None), result(None)]));
        assert_eq!(ids[1..], [["functions.f:0"], ["functions.f:1"], [""]]);
    }

    /// Quadratic work would take minutes here.
    #[test]
    fn a_hundred_thousand_results_find_their_calls_at_once() {
        let count = 100_000;
        let mut messages = vec![calls(&vec![Some("x"); count])];
        messages.extend((0..count).map(|_| result(Some("x"))));
        let begun = std::time::Instant::now();
        let ids = renamed(Value::Array(messages));
        assert_eq!((&ids[1][0], &ids[count][0]), (&"functions.f:0".to_string(), &format!("functions.f:{}", count - 1)));
        assert!(begun.elapsed().as_secs() < 20, "{:?}", begun.elapsed());
    }

    #[test]
    fn an_orphan_keeps_its_id() {
        assert_eq!(renamed(json!([calls(&[Some("a")]), result(Some("nobody"))]))[1], ["nobody"]);
    }
}
