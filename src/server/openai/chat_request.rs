//! A checked chat request: the prompt as token ids, what the answer must look like, and which tools it may call.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::params::{Common, MAX_TOP_LOGPROBS};
use super::render;
use crate::engine::contract::Request;
use crate::model::chat::ChatPrompt;
use crate::server::chat_output::Markers;
use crate::server::error::ApiError;
use crate::server::fields::{Fields, shown};
use crate::server::grammar::{AnswerForm, AnswerRules, ToolRule};
use crate::server::state::App;

/// Most tools of one request.
const MAX_TOOLS: usize = 1024;

/// One declared tool.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    pub strict: bool,
    pub parameters: Option<Value>,
}

/// Which calls the model may or must make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    None,
    Auto,
    Required,
    Named(String),
}

/// What the answer's content must be.
#[derive(Clone, Debug, PartialEq)]
pub enum ResponseFormat {
    Text,
    Json(Value),
}

fn tools(fields: Fields) -> Result<Vec<Tool>, ApiError> {
    let list = fields.array("tools")?.unwrap_or_default();
    if list.len() > MAX_TOOLS {
        return Err(ApiError::invalid("tools", format!("tools has {} entries: wanted at most {MAX_TOOLS}.", list.len())));
    }
    let tools: Vec<Tool> = list.iter().enumerate().map(|(index, value)| tool(index, value)).collect::<Result<_, _>>()?;
    for (index, tool) in tools.iter().enumerate() {
        if tools[..index].iter().any(|earlier| earlier.name == tool.name) {
            return Err(ApiError::invalid("tools", format!("tools[{index}] repeats the name {:?}.", tool.name)));
        }
    }
    Ok(tools)
}

fn tool(index: usize, value: &Value) -> Result<Tool, ApiError> {
    let path = format!("tools[{index}]");
    let Value::Object(map) = value else {
        return Err(ApiError::invalid(&path, format!("{path} = {}: wanted an object.", shown(value))));
    };
    let fields = Fields::at(map, &path);
    match fields.string("type")? {
        Some("function") | None => {}
        Some(other) => {
            let message = format!("{path}.type = {}: only function tools are supported.", shown(&json!(other)));
            return Err(ApiError::unsupported(format!("{path}.type"), message));
        }
    }
    let function_path = format!("{path}.function");
    let missing = || ApiError::invalid(&function_path, format!("{function_path} is missing: wanted an object with a name."));
    let function = Fields::at(fields.object("function")?.ok_or_else(missing)?, &function_path);
    let name = function.string("name")?.unwrap_or_default();
    // The name stands in the id `functions.NAME:INDEX`, which has to be read back.
    let fits = (1..=128).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte));
    if !fits {
        return Err(function.wrong("name", &json!(name), "1 to 128 letters, digits, `_`, `-` or `.`"));
    }
    function.string("description")?;
    let parameters = function.object("parameters")?.map(|map| Value::Object(map.clone()));
    Ok(Tool { name: name.into(), strict: function.bool("strict")?.unwrap_or(false), parameters })
}

fn tool_choice(fields: Fields, tools: &[Tool]) -> Result<ToolChoice, ApiError> {
    let choice = match fields.get("tool_choice") {
        None => ToolChoice::Auto,
        Some(Value::String(word)) => match word.as_str() {
            "none" => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" | "any" => ToolChoice::Required,
            _ => return Err(fields.wrong("tool_choice", &json!(word), "none, auto, required or a function")),
        },
        Some(Value::Object(map)) => {
            let choice = Fields::at(map, "tool_choice");
            if choice.string("type")? != Some("function") {
                return Err(fields.wrong("tool_choice", &Value::Object(map.clone()), "none, auto, required or a function"));
            }
            let function = choice.object("function")?.and_then(|function| function.get("name"));
            let name = function.or_else(|| map.get("name")).and_then(Value::as_str);
            let missing = || ApiError::invalid("tool_choice.function.name", "tool_choice.function.name is missing: wanted a tool's name.");
            ToolChoice::Named(name.ok_or_else(missing)?.into())
        }
        Some(other) => return Err(fields.wrong("tool_choice", other, "none, auto, required or a function")),
    };
    match &choice {
        ToolChoice::Required if tools.is_empty() => {
            Err(ApiError::invalid("tool_choice", "tool_choice = \"required\" without any tools: wanted at least one."))
        }
        ToolChoice::Named(name) if !tools.iter().any(|tool| &tool.name == name) => {
            let message = format!("tool_choice names {}, which is not among the tools.", shown(&json!(name)));
            Err(ApiError::invalid("tool_choice", message))
        }
        _ => Ok(choice),
    }
}

fn response_format(fields: Fields) -> Result<ResponseFormat, ApiError> {
    let Some(map) = fields.object("response_format")? else { return Ok(ResponseFormat::Text) };
    let format = Fields::at(map, "response_format");
    match format.string("type")? {
        Some("text") => Ok(ResponseFormat::Text),
        Some("json_object") => Ok(ResponseFormat::Json(json!({"type": "object"}))),
        Some("json_schema") => {
            let inner = format.object("json_schema")?;
            let schema =
                inner.and_then(|inner| inner.get("schema").or_else(|| inner.get("json_schema"))).filter(|schema| !schema.is_null());
            let missing = "response_format.json_schema.schema is missing: wanted a JSON schema.";
            schema.map(|schema| ResponseFormat::Json(schema.clone())).ok_or_else(|| ApiError::invalid("response_format", missing))
        }
        Some(other) => Err(format.wrong("type", &json!(other), "text, json_object or json_schema")),
        None => Err(ApiError::invalid("response_format.type", "response_format.type is missing: wanted text, json_object or json_schema.")),
    }
}

/// A checked request, ready to be queued.
pub struct ChatRequest {
    pub common: Common,
    pub prompt: ChatPrompt,
    pub tools: Vec<Tool>,
    pub choice: ToolChoice,
    pub parallel: bool,
    pub format: ResponseFormat,
    /// `Some(k)`: log-probabilities with `k` alternatives.
    pub logprobs: Option<u32>,
    pub include_reasoning: bool,
    room: u32,
}

impl ChatRequest {
    pub fn parse(app: &App, body: &Map<String, Value>) -> Result<Self, ApiError> {
        let fields = Fields::root(body);
        super::check_model(app, fields)?;
        let info = app.engine.info();
        let common = Common::parse(fields, info.vocab_size, &app.config)?;
        fields.refuse_unless("echo", &[json!(false)], "use /v1/completions")?;
        fields.refuse_unless("best_of", &[json!(common.n)], "only best_of equal to n is done")?;
        fields.refuse_unless("modalities", &[json!(["text"])], "this server writes text only")?;
        fields.refuse_unless("audio", &[], "this server writes text only")?;
        fields.refuse_unless("web_search_options", &[], "this server searches nothing")?;
        let logprobs = logprobs(fields)?;
        let format = response_format(fields)?;
        let include_reasoning = fields.bool("include_reasoning")?.unwrap_or(true);
        let parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
        let tools = tools(fields)?;
        let choice = tool_choice(fields, &tools)?;
        let prompt = render::prompt(app, fields)?;
        let mut room = common.room(prompt.ids.len(), info.max_model_len, app.request_slots())?;
        common.fit_logprobs("top_logprobs", logprobs, std::slice::from_mut(&mut room))?;
        common.check_prompt_logprobs(common.prompt_logprobs, prompt.ids.len())?;
        Ok(Self { common, prompt, tools, choice, parallel, format, logprobs, include_reasoning, room })
    }

    /// Whether calls are looked for in the answer.
    pub fn calls_tools(&self) -> bool {
        !self.tools.is_empty() && self.choice != ToolChoice::None
    }

    /// Whether its requests need a grammar, which may take a while to compile.
    pub fn is_bound(&self) -> bool {
        self.calls_tools() || self.format != ResponseFormat::Text
    }

    /// The engine's requests, one for each choice.
    pub fn requests(&self, app: &App, markers: Option<Markers>) -> Result<Vec<Request>, ApiError> {
        let rules = self.rules(app, markers)?.map(Arc::new);
        let constraint = || rules.clone().map(|rules| app.grammars.constraint(rules)).transpose().map_err(ApiError::internal);
        let one = |index: usize| {
            let mut sampling = self.common.sampling.clone();
            sampling.seed = self.common.seed_of(index, || app.random_seed());
            if self.choice == ToolChoice::None
                && let Some(markers) = markers
            {
                sampling.logit_bias.extend([(markers.section_begin, -100.0), (markers.call_begin, -100.0)]);
            }
            Ok(Request {
                prompt: self.prompt.ids.clone(),
                sampling,
                stop: self.common.stop.clone(),
                max_tokens: self.room,
                min_tokens: self.common.min_tokens,
                budget: self.common.budget,
                logprobs: self.logprobs,
                prompt_logprobs: self.common.prompt_logprobs,
                constraint: constraint()?,
                trace: self.common.trace,
            })
        };
        (0..self.common.n).map(one).collect()
    }

    /// The rules the answers are bound by; `None` when they are free.
    fn rules(&self, app: &App, markers: Option<Markers>) -> Result<Option<AnswerRules>, ApiError> {
        let tools = if self.calls_tools() && markers.is_some() { self.tool_rules(app)? } else { Vec::new() };
        let forced = matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_));
        let form = match &self.format {
            _ if forced && markers.is_some() => AnswerForm::Calls,
            _ if forced => return Err(ApiError::unsupported("tool_choice", "This model's vocabulary has no tool call markers.")),
            ResponseFormat::Json(schema) => {
                let refuse = |why| ApiError::invalid("response_format", format!("response_format: the schema cannot be honoured: {why}."));
                AnswerForm::Json(Box::new(app.grammars.json(schema).map_err(refuse)?))
            }
            ResponseFormat::Text if tools.is_empty() => return Ok(None),
            ResponseFormat::Text => AnswerForm::Free,
        };
        Ok(Some(AnswerRules {
            markers,
            thinking: self.prompt.reasoning_open,
            form,
            tools,
            // A named function is one call of it.
            parallel: self.parallel && !matches!(self.choice, ToolChoice::Named(_)),
            first_call: self.prompt.next_call,
            ends: app.engine.info().stop_ids.clone(),
        }))
    }

    /// Rules for the tools that may be called. A schema that cannot be compiled is refused when `strict`; else any object will do.
    fn tool_rules(&self, app: &App) -> Result<Vec<ToolRule>, ApiError> {
        let any = json!({"type": "object"});
        let named = |tool: &&Tool| !matches!(&self.choice, ToolChoice::Named(name) if *name != tool.name);
        let rule = |(index, tool): (usize, &Tool)| {
            let schema = tool.parameters.as_ref().filter(|schema| schema.as_object().is_some_and(|map| !map.is_empty())).unwrap_or(&any);
            let arguments = app.grammars.arguments(schema).or_else(|why| {
                if tool.strict {
                    let path = format!("tools[{index}].function.parameters");
                    return Err(ApiError::invalid(&path, format!("{path}: the schema cannot be honoured: {why}.")));
                }
                tracing::warn!(tool = %tool.name, %why, "a tool's schema cannot be enforced; any JSON object is accepted as its arguments");
                app.grammars.arguments(&any).map_err(ApiError::internal)
            })?;
            Ok(ToolRule { name: tool.name.clone(), arguments })
        };
        self.tools.iter().enumerate().filter(|(_, tool)| named(tool)).map(rule).collect()
    }
}

fn logprobs(fields: Fields) -> Result<Option<u32>, ApiError> {
    let top = fields.integer("top_logprobs", 0..=MAX_TOP_LOGPROBS)?;
    match (fields.bool("logprobs")?.unwrap_or(false), top) {
        (true, top) => Ok(Some(top.unwrap_or(0) as u32)),
        (false, Some(1..)) => Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs = true.")),
        (false, _) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with<T>(body: Value, read: impl Fn(Fields) -> T) -> T {
        read(Fields::root(body.as_object().unwrap()))
    }

    fn weather() -> Vec<Tool> {
        with(json!({"tools": [{"type": "function", "function": {"name": "get_weather"}}]}), tools).unwrap()
    }

    #[test]
    fn a_choice_of_tools_that_cannot_be_met_is_refused() {
        let weather = weather();
        let choice = |value: Value, tools: &[Tool]| with(json!({"tool_choice": value}), |fields| tool_choice(fields, tools));
        assert_eq!(choice(json!("required"), &weather), Ok(ToolChoice::Required));
        assert_eq!(
            choice(json!({"type": "function", "function": {"name": "get_weather"}}), &weather),
            Ok(ToolChoice::Named("get_weather".into()))
        );
        assert!(choice(json!("required"), &[]).unwrap_err().message.contains("required"));
        assert!(choice(json!({"type": "function", "function": {"name": "nope"}}), &weather).unwrap_err().message.contains("nope"));
        assert!(choice(json!("maybe"), &weather).is_err());
        assert_eq!(choice(Value::Null, &weather), Ok(ToolChoice::Auto));
    }

    #[test]
    fn a_tool_whose_name_could_not_be_read_back_is_refused() {
        for name in ["", "a b", "a:0", "<|im_end|>", "ä"] {
            let body = json!({"tools": [{"type": "function", "function": {"name": name}}]});
            assert!(with(body, tools).unwrap_err().message.contains("tools[0].function.name"));
        }
        assert_eq!(with(json!({"tools": []}), tools), Ok(Vec::new()));
        let twice = json!({"tools": [{"function": {"name": "f"}}, {"function": {"name": "f"}}]});
        assert!(with(twice, tools).unwrap_err().message.contains("repeats"));
    }

    #[test]
    fn an_unknown_format_is_refused() {
        assert!(with(json!({"response_format": {"type": "xml"}}), response_format).is_err());
        assert!(with(json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}), response_format).is_err());
        assert_eq!(with(json!({"response_format": {"type": "text"}}), response_format), Ok(ResponseFormat::Text));
    }
}
