//! From a request's fields to the prompt of a conversation, by the model's chat template.

use serde_json::{Map, Value, json};

use crate::model::chat::{ChatError, ChatOptions, ChatPrompt, Conversation};
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::state::App;

/// Most messages of one conversation.
const MAX_MESSAGES: usize = 65_536;

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        Self::invalid(error.param.clone(), error.to_string())
    }
}

/// The prompt that `messages`, `tools` and the template's switches make. `/tokenize` shows the same.
pub fn prompt(app: &App, fields: Fields) -> Result<ChatPrompt, ApiError> {
    fields.refuse_unless("chat_template", &[], "the template is the model's own")?;
    fields.refuse_unless("documents", &[json!([])], "put them into a message")?;
    fields.refuse_unless("functions", &[json!([])], "use tools")?;
    fields.refuse_unless("function_call", &[json!("none"), json!("auto")], "use tool_choice")?;
    let messages = fields.get("messages").unwrap_or(&Value::Null);
    if messages.as_array().is_some_and(|list| list.len() > MAX_MESSAGES) {
        return Err(ApiError::invalid("messages", format!("messages has more than {MAX_MESSAGES} entries.")));
    }
    let conversation = Conversation::parse(messages, fields.get("tools"))?;
    Ok(app.chat.render(&conversation, &options(fields)?)?)
}

/// The template's switches, in every spelling clients use. `chat_template_kwargs` wins over the top-level `thinking`, that over
/// `reasoning_effort`, whose levels other than `none` all mean thinking: the model knows no degrees of it.
fn options(fields: Fields) -> Result<ChatOptions, ApiError> {
    let mut options = ChatOptions {
        add_generation_prompt: fields.bool("add_generation_prompt")?.unwrap_or(true),
        continue_final_message: fields.bool("continue_final_message")?.unwrap_or(false),
        ..ChatOptions::default()
    };
    match fields.string("reasoning_effort")? {
        None => {}
        Some("none") => options.thinking = false,
        Some("minimal" | "low" | "medium" | "high" | "xhigh" | "max") => options.thinking = true,
        Some(other) => return Err(fields.wrong("reasoning_effort", &json!(other), "none, minimal, low, medium, high, xhigh or max")),
    }
    hosted_switches(fields, &mut options)?;
    let empty = Map::new();
    options.apply_kwargs(fields.object("chat_template_kwargs")?.unwrap_or(&empty))?;
    Ok(options)
}

/// The hosted API's spelling: `thinking: {type: enabled | disabled, keep: "all" | null}`.
fn hosted_switches(fields: Fields, options: &mut ChatOptions) -> Result<(), ApiError> {
    let Some(thinking) = fields.object("thinking")? else { return Ok(()) };
    let thinking = Fields::at(thinking, "thinking");
    match thinking.string("type")? {
        None => {}
        Some("enabled") => options.thinking = true,
        Some("disabled") => options.thinking = false,
        Some(other) => return Err(thinking.wrong("type", &json!(other), "enabled or disabled")),
    }
    match thinking.string("keep")? {
        None => {}
        Some("all") => options.preserve_thinking = true,
        Some(other) => return Err(thinking.wrong("keep", &json!(other), "all or null")),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: Value) -> Result<ChatOptions, ApiError> {
        options(Fields::root(body.as_object().unwrap()))
    }

    #[test]
    fn every_spelling_switches_thinking_off() {
        for body in [
            json!({"chat_template_kwargs": {"thinking": false}}),
            json!({"chat_template_kwargs": {"enable_thinking": false}}),
            json!({"thinking": {"type": "disabled"}}),
            json!({"reasoning_effort": "none"}),
            json!({"reasoning_effort": "high", "chat_template_kwargs": {"thinking": false}}),
        ] {
            assert!(!read(body.clone()).unwrap().thinking, "{body}");
        }
        assert!(read(json!({})).unwrap().thinking);
        assert!(read(json!({"thinking": {"type": "enabled", "keep": "all"}})).unwrap().preserve_thinking);
        for body in
            [json!({"thinking": {"type": "off"}}), json!({"reasoning_effort": "huge"}), json!({"chat_template_kwargs": {"thinking": 1}})]
        {
            assert_eq!(read(body).unwrap_err().status, 400);
        }
    }
}
