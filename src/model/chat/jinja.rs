//! The checkpoint's own chat template, in the environment its authors wrote it for: Jinja2 as transformers sets it up.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, context};
use serde_json::{Map, Value, json};

use super::ChatOptions;
use super::message::{Arguments, ChatError, Conversation, Message, Role, ToolCall};
use super::protect::{Protection, Protector};
use super::python_json::{Separators, dumps, sort_keys};
use super::tools_ts;
use crate::model::problem::Problem;
use crate::model::tokenizer::Tokenizer;

const NAME: &str = "chat_template.jinja";

pub(super) struct Jinja {
    environment: Environment<'static>,
    protector: Protector,
    /// Whether the template declares tools itself.
    pub knows_tools: bool,
}

impl Jinja {
    /// # Errors
    /// A template that does not compile.
    pub fn new(file: &str, source: String, tokenizer: &Tokenizer) -> Result<Self, Problem> {
        let protector = Protector::new(tokenizer, &source);
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        let broken = |error: Error| Problem::new(file, "the template", format!("{error:#}"), "a Jinja template that compiles");
        environment.add_template_owned(NAME, source).map_err(broken)?;
        let template = environment.get_template(NAME).map_err(broken)?;
        let knows_tools = template.undeclared_variables(false).contains("tools");
        Ok(Self { environment, protector, knows_tools })
    }

    /// Renders a conversation whose call ids are renamed already.
    pub fn render(&self, tokenizer: &Tokenizer, conversation: &Conversation, options: &ChatOptions) -> Result<Vec<u32>, ChatError> {
        let tools = Value::Array(conversation.tools.iter().map(sort_keys).collect());
        let plain: Vec<Value> = conversation.messages.iter().map(|message| message_value(message, &Value::clone)).collect();
        let kwargs = Value::Object(options.kwargs.clone());
        let protection = self.protector.choose(plain.iter().chain([&tools, &kwargs]))?;
        let mut messages: Vec<Value> =
            conversation.messages.iter().map(|message| message_value(message, &|value| protection.value(value))).collect();
        if options.continue_final_message {
            mark_end(&mut messages, conversation, &protection);
        }
        let mut variables = protection.fields(&options.kwargs);
        variables.insert("messages".into(), Value::Array(messages));
        if !conversation.tools.is_empty() {
            variables.insert("tools".into(), protection.value(&tools));
            if let Some(text) = tools.as_array().and_then(|tools| tools_ts::typescript(tools)) {
                variables.insert("tools_ts_str".into(), protection.text(&text).into());
            }
        }
        variables.insert("add_generation_prompt".into(), options.add_generation_prompt.into());
        variables.insert("thinking".into(), options.thinking.into());
        variables.insert("preserve_thinking".into(), options.preserve_thinking.into());
        let output = self.run(&variables)?;
        let output = if options.continue_final_message { before_end(&output, &protection)? } else { &output };
        Ok(protection.encode(tokenizer, output))
    }

    fn run(&self, variables: &Map<String, Value>) -> Result<String, ChatError> {
        let template = self.environment.get_template(NAME);
        template.and_then(|template| template.render(context! { ..minijinja::Value::from_serialize(variables) })).map_err(|error| {
            let detail = error.detail().map_or_else(|| error.to_string(), str::to_string);
            ChatError::new("messages", format!("the model's chat template refuses this conversation: {detail}"))
        })
    }
}

/// A message as templates read it; `text` is applied to everything a user wrote.
fn message_value(message: &Message, text: &dyn Fn(&Value) -> Value) -> Value {
    let string = |value: &str| text(&Value::from(value));
    let mut fields = Map::new();
    fields.insert("role".into(), message.role.name().into());
    fields.insert("content".into(), string(&message.content));
    if let Some(name) = &message.name {
        fields.insert("name".into(), string(name));
    }
    if let Some(reasoning) = &message.reasoning {
        fields.insert("reasoning_content".into(), string(reasoning));
    }
    if !message.tool_calls.is_empty() {
        fields.insert("tool_calls".into(), message.tool_calls.iter().map(|call| call_value(call, text)).collect());
    }
    if message.role == Role::Tool {
        fields.insert("tool_call_id".into(), string(message.tool_call_id.as_deref().unwrap_or_default()));
    }
    Value::Object(fields)
}

fn call_value(call: &ToolCall, text: &dyn Fn(&Value) -> Value) -> Value {
    let arguments = match &call.arguments {
        Arguments::Text(arguments) => text(&Value::from(arguments.as_str())),
        Arguments::Json(arguments) => text(arguments),
    };
    let id = text(&Value::from(call.id.as_deref().unwrap_or_default()));
    json!({"id": id, "type": "function", "function": {"name": text(&Value::from(call.name.as_str())), "arguments": arguments}})
}

/// Puts the end mark behind what the last message has: its content, or its reasoning when it was cut while thinking.
fn mark_end(messages: &mut [Value], conversation: &Conversation, protection: &Protection) {
    let (Some(fields), Some(message)) = (messages.last_mut().and_then(Value::as_object_mut), conversation.messages.last()) else { return };
    let key = if message.content.is_empty() && message.reasoning.is_some() { "reasoning_content" } else { "content" };
    if let Some(Value::String(text)) = fields.get_mut(key) {
        text.push(protection.end);
    }
}

fn before_end<'a>(output: &'a str, protection: &Protection) -> Result<&'a str, ChatError> {
    match output.rfind(protection.end) {
        Some(end) => Ok(&output[..end]),
        None => Err(ChatError::new("continue_final_message", "the model's chat template does not print the final message as it is")),
    }
}

/// Python's `json.dumps` with what templates pass to it.
fn tojson(_state: &State, value: minijinja::Value, options: Kwargs) -> Result<minijinja::Value, Error> {
    let separators = match options.get::<Option<minijinja::Value>>("separators")? {
        None => Separators::spaced(),
        Some(pair) => separators(&pair)?,
    };
    let indent = options.get::<Option<usize>>("indent")?;
    let sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let value = serde_json::to_value(&value).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    let value = if sorted { sort_keys(&value) } else { value };
    Ok(minijinja::Value::from(dumps(&value, &separators, indent)))
}

fn separators(pair: &minijinja::Value) -> Result<Separators, Error> {
    let wrong = || Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two strings");
    if pair.kind() != ValueKind::Seq {
        return Err(wrong());
    }
    let parts: Vec<String> = pair.try_iter()?.map(|part| part.as_str().map(str::to_string).ok_or_else(wrong)).collect::<Result<_, _>>()?;
    match <[String; 2]>::try_from(parts) {
        Ok([item, key]) => Ok(Separators { item, key }),
        Err(_) => Err(wrong()),
    }
}
