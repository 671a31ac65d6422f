//! Kimi was trained on call ids of the form `functions.NAME:INDEX`, INDEX counting all calls of the conversation from 0. Clients hand back
//! other ids (`call_abc`, cut or repeated ones); the template prints them and the model copies them, so every id is renamed here, in
//! calls and results alike, before anything is rendered.

use super::message::{Conversation, Message, Role};

/// One call of the history.
struct Call {
    old_id: Option<String>,
    new_id: String,
    name: String,
    answered: bool,
}

/// Renames all ids. A result belongs to the first unanswered call of its id, else to the latest one; without an id to the first
/// unanswered call, of its name if it has one. A result that belongs to no call keeps its id and text.
pub fn rename(conversation: &mut Conversation) {
    let mut calls: Vec<Call> = Vec::new();
    for message in &mut conversation.messages {
        for call in &mut message.tool_calls {
            let new_id = format!("functions.{}:{}", call.name, calls.len());
            let old_id = call.id.replace(new_id.clone());
            calls.push(Call { old_id, new_id, name: call.name.clone(), answered: false });
        }
        if message.role == Role::Tool
            && let Some(call) = answered_call(message, &calls)
        {
            calls[call].answered = true;
            message.tool_call_id = Some(calls[call].new_id.clone());
        }
    }
}

fn answered_call(result: &Message, calls: &[Call]) -> Option<usize> {
    match &result.tool_call_id {
        Some(id) => {
            let same_id = |call: &Call| call.old_id.as_ref() == Some(id);
            calls.iter().position(|call| same_id(call) && !call.answered).or_else(|| calls.iter().rposition(same_id))
        }
        None => {
            let fits = |call: &Call| result.name.as_ref().is_none_or(|name| *name == call.name);
            calls.iter().position(|call| fits(call) && !call.answered)
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

    #[test]
    fn an_orphan_keeps_its_id() {
        assert_eq!(renamed(json!([calls(&[Some("a")]), result(Some("nobody"))]))[1], ["nobody"]);
    }
}
