//! A conversation as OpenAI's API sends it, read and checked. Every complaint names the field, `messages[2].content`.

use serde_json::{Map, Value};

/// Something in a request that cannot be rendered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{param}: {message}")]
pub struct ChatError {
    /// The field, with its place.
    pub param: String,
    /// What was found and what is wanted.
    pub message: String,
}

impl ChatError {
    /// A complaint about the field `param`.
    pub fn new(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: param.into(), message: message.into() }
    }
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    System,
    User,
    Assistant,
    Tool,
}

impl Role {
    /// As OpenAI and the template write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One turn, read and checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    pub role: Role,
    /// Text; parts are joined with nothing between, absent and null are empty.
    pub content: String,
    /// Replaces the role's name after the role marker.
    pub name: Option<String>,
    /// What the assistant thought: `reasoning_content`, else `reasoning`.
    pub reasoning: Option<String>,
    pub tool_calls: Vec<ToolCall>,
    /// Which call a tool message answers.
    pub tool_call_id: Option<String>,
}

/// A call of a function by the assistant.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    pub id: Option<String>,
    pub name: String,
    pub arguments: Arguments,
}

/// Arguments of a call in the history.
#[derive(Clone, Debug, PartialEq)]
pub enum Arguments {
    /// As the model wrote them, valid JSON or not (a call may have been cut); never empty.
    Text(String),
    /// Given as a JSON value instead of text.
    Json(Value),
}

/// Messages and the tools on offer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// At least one.
    pub messages: Vec<Message>,
    /// OpenAI tool objects; an empty list is no tools.
    pub tools: Vec<Value>,
}

impl Conversation {
    /// Reads the fields `messages` and `tools` of a request. `developer` counts as `system`.
    ///
    /// # Errors
    /// The first field that is missing, of the wrong type, or of a kind a text model cannot read.
    pub fn parse(messages: &Value, tools: Option<&Value>) -> Result<Self, ChatError> {
        let list = match messages {
            Value::Array(list) if !list.is_empty() => list,
            Value::Array(_) => return Err(ChatError::new("messages", "found an empty list, wanted at least one message")),
            other => return Err(ChatError::new("messages", format!("found {}, wanted a list of messages", kind(other)))),
        };
        let messages = list.iter().enumerate().map(|(i, value)| message(&format!("messages[{i}]"), value)).collect::<Result<_, _>>()?;
        let tools = match tools {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(list)) => {
                list.iter().enumerate().try_for_each(|(i, tool)| check_tool(&format!("tools[{i}]"), tool))?;
                list.clone()
            }
            Some(other) => return Err(ChatError::new("tools", format!("found {}, wanted a list of tools", kind(other)))),
        };
        Ok(Self { messages, tools })
    }

    /// Whether anything in it needs a template that knows tools.
    pub fn uses_tools(&self) -> bool {
        let about_tools = |message: &Message| message.role == Role::Tool || !message.tool_calls.is_empty();
        !self.tools.is_empty() || self.messages.iter().any(about_tools)
    }

    /// Calls in the history; the next call of the conversation gets this index.
    pub fn calls(&self) -> usize {
        self.messages.iter().map(|message| message.tool_calls.len()).sum()
    }
}

fn message(path: &str, value: &Value) -> Result<Message, ChatError> {
    let object = object(path, value)?;
    let role = role(path, object)?;
    let content_path = format!("{path}.content");
    let content = match object.get("content") {
        Some(value) if !value.is_null() => text_or_parts(&content_path, value)?,
        _ if matches!(role, Role::Assistant | Role::Tool) => String::new(),
        _ => return Err(ChatError::new(content_path, "found nothing, wanted a string or a list of text parts")),
    };
    let reasoning = match optional_text(path, object, "reasoning_content")? {
        Some(reasoning) => Some(reasoning),
        None => optional_text(path, object, "reasoning")?,
    };
    let tool_calls = tool_calls(path, role, object.get("tool_calls"))?;
    Ok(Message {
        role,
        content,
        name: optional_text(path, object, "name")?.filter(|name| !name.is_empty()),
        reasoning,
        tool_calls,
        tool_call_id: optional_text(path, object, "tool_call_id")?.filter(|id| !id.is_empty()),
    })
}

fn role(path: &str, message: &Map<String, Value>) -> Result<Role, ChatError> {
    let path = format!("{path}.role");
    match message.get("role") {
        Some(Value::String(role)) => match role.as_str() {
            "system" | "developer" => Ok(Role::System),
            "user" => Ok(Role::User),
            "assistant" => Ok(Role::Assistant),
            "tool" => Ok(Role::Tool),
            other => {
                let wanted = "system, developer, user, assistant or tool";
                Err(ChatError::new(path, format!("found {:?}, wanted {wanted}", shorten(other))))
            }
        },
        other => Err(ChatError::new(path, format!("found {}, wanted a string", other.map_or("nothing", kind)))),
    }
}

/// Content is a string or a list of parts, of which only text can be read.
fn text_or_parts(path: &str, value: &Value) -> Result<String, ChatError> {
    let parts = match value {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        other => return Err(ChatError::new(path, format!("found {}, wanted a string or a list of text parts", kind(other)))),
    };
    let texts = parts.iter().enumerate().map(|(i, part)| part_text(&format!("{path}[{i}]"), part));
    texts.collect()
}

fn part_text<'a>(path: &str, part: &'a Value) -> Result<&'a str, ChatError> {
    if let Value::String(text) = part {
        return Ok(text);
    }
    let part = object(path, part)?;
    let field = match part.get("type").and_then(Value::as_str) {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some(other) => {
            let message = format!("found a part of type {:?}, wanted text: this model reads text only", shorten(other));
            return Err(ChatError::new(format!("{path}.type"), message));
        }
        None => return Err(ChatError::new(format!("{path}.type"), "found nothing, wanted \"text\"")),
    };
    let text = part.get(field);
    text.and_then(Value::as_str)
        .ok_or_else(|| ChatError::new(format!("{path}.{field}"), format!("found {}, wanted a string", text.map_or("nothing", kind))))
}

fn tool_calls(path: &str, role: Role, value: Option<&Value>) -> Result<Vec<ToolCall>, ChatError> {
    let path = format!("{path}.tool_calls");
    let calls = match value {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(calls)) => calls,
        Some(other) => return Err(ChatError::new(path, format!("found {}, wanted a list of calls", kind(other)))),
    };
    if role != Role::Assistant && !calls.is_empty() {
        return Err(ChatError::new(path, format!("found calls in a {} message, wanted them in assistant messages only", role.name())));
    }
    calls.iter().enumerate().map(|(i, call)| tool_call(&format!("{path}[{i}]"), call)).collect()
}

fn tool_call(path: &str, value: &Value) -> Result<ToolCall, ChatError> {
    let call = object(path, value)?;
    let function = object(&format!("{path}.function"), call.get("function").unwrap_or(&Value::Null))?;
    let name = optional_text(&format!("{path}.function"), function, "name")?.filter(|name| !name.is_empty());
    let Some(name) = name else { return Err(ChatError::new(format!("{path}.function.name"), "found nothing, wanted a function's name")) };
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => Arguments::Text("{}".into()),
        Some(Value::String(text)) if text.is_empty() => Arguments::Text("{}".into()),
        Some(Value::String(text)) => Arguments::Text(text.clone()),
        Some(other) => Arguments::Json(other.clone()),
    };
    Ok(ToolCall { id: optional_text(path, call, "id")?.filter(|id| !id.is_empty()), name, arguments })
}

/// A tool of type `function` needs a usable name; other types are passed over when tools are declared.
fn check_tool(path: &str, tool: &Value) -> Result<(), ChatError> {
    let tool = object(path, tool)?;
    match tool.get("type") {
        Some(Value::String(kind)) if kind != "function" => return Ok(()),
        Some(Value::String(_)) => {}
        other => {
            let found = other.map_or("nothing", kind);
            return Err(ChatError::new(format!("{path}.type"), format!("found {found}, wanted \"function\"")));
        }
    }
    let function = object(&format!("{path}.function"), tool.get("function").unwrap_or(&Value::Null))?;
    let path = format!("{path}.function.name");
    match function.get("name").and_then(Value::as_str) {
        Some(name) if is_tool_name(name) => Ok(()),
        Some(name) => {
            let message = format!("found {:?}, wanted 1 to 256 characters without white space, control characters and ':'", shorten(name));
            Err(ChatError::new(path, message))
        }
        None => Err(ChatError::new(path, "found nothing, wanted a function's name")),
    }
}

/// A call's id is `functions.NAME:INDEX`, so a name cannot hold what would make that ambiguous.
fn is_tool_name(name: &str) -> bool {
    (1..=256).contains(&name.chars().count()) && !name.contains(|c: char| c.is_whitespace() || c.is_control() || c == ':')
}

fn object<'a>(path: &str, value: &'a Value) -> Result<&'a Map<String, Value>, ChatError> {
    value.as_object().ok_or_else(|| {
        let found = if value.is_null() { "nothing" } else { kind(value) };
        ChatError::new(path, format!("found {found}, wanted an object"))
    })
}

fn optional_text(path: &str, object: &Map<String, Value>, key: &str) -> Result<Option<String>, ChatError> {
    match object.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(ChatError::new(format!("{path}.{key}"), format!("found {}, wanted a string", kind(other)))),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn shorten(text: &str) -> String {
    if text.chars().count() <= 40 { text.to_string() } else { text.chars().take(40).chain("...".chars()).collect() }
}
