//! The OpenAI API: one file per route, and what the routes share.

pub mod chat;
pub mod chat_request;
pub mod completions;
pub mod logprobs;
pub mod models;
pub mod params;
pub mod render;
pub mod stream;
pub mod tokenize;
pub mod types;

use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::Fields;
use super::state::App;

/// The body as a JSON object, strictly: UTF-8, no NaN, no trailing text; a byte order mark is let through.
pub fn parse_object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let body = body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(body);
    if body.trim_ascii().is_empty() {
        return Err(ApiError::body("The request body is empty: wanted a JSON object."));
    }
    match serde_json::from_slice(body) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(ApiError::body("The request body is JSON but not an object.")),
        Err(error) => Err(ApiError::body(format!("The request body is not valid JSON: {error}."))),
    }
}

/// Refuses a request for another model. Absent = the one there is.
pub fn check_model(app: &App, fields: Fields) -> Result<(), ApiError> {
    let Some(asked) = fields.string("model")? else { return Ok(()) };
    let served = &app.engine.info().name;
    if asked.is_empty() || asked == served || app.config.served_names.iter().any(|name| name == asked) {
        return Ok(());
    }
    Err(ApiError::model_not_found(asked, served))
}

/// Refuses a field that needs the engine while there is none to answer, before any work is done.
pub fn check_ready(app: &App) -> Result<(), ApiError> {
    use crate::engine::handle::Health;
    let why = match app.engine.health() {
        Health::Ready => return Ok(()),
        Health::Loading(what) => format!("The model is not ready yet: {what}."),
        Health::Draining => "The server is shutting down.".into(),
        Health::Dead(_) => "The engine has stopped.".into(),
    };
    Err(ApiError { close: true, ..ApiError::unavailable(why, app.config.retry_after_s) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_json_object_is_refused_without_a_panic() {
        let deep = "[".repeat(200_000);
        let bodies: [&[u8]; 9] =
            [b"", b"  ", b"null", b"[]", b"\"x\"", b"{\"a\":", b"{\"a\":NaN}", b"{\"a\":\"\xC4\xE3\xBA\xC3\"}", deep.as_bytes()];
        for body in bodies {
            let error = parse_object(body).unwrap_err();
            assert_eq!(error.status, 400);
            assert!(error.message.len() < 200, "{}", error.message);
        }
        assert!(parse_object(b"\xEF\xBB\xBF{\"a\":1}").is_ok());
        assert!(parse_object(b"{\"a\":1e400}").unwrap_err().message.contains("out of range"));
    }
    /// Names that are asked for in a call, and those in the list of refused fields.
    fn fields_read() -> std::collections::BTreeSet<String> {
        let name = regex::Regex::new(r#"[a-z_]\(\s*(?:fields, )?"([a-z_]+)"[,)]|\(\s*"([a-z_]+)", &"#).unwrap();
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/server/openai");
        let files = std::fs::read_dir(folder).unwrap().map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap());
        let code = files.map(|text| text.split("#[cfg(test)]").next().unwrap_or_default().to_owned()).collect::<String>();
        let ids = ["chatcmpl", "cmpl"];
        let found = name.captures_iter(&code).filter_map(|found| Some(found.get(1).or(found.get(2))?.as_str().to_owned()));
        found.filter(|name| !ids.contains(&name.as_str())).collect()
    }

    #[test]
    fn every_field_that_is_read_stands_in_the_documentation() {
        let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/api.md")).unwrap();
        let words: std::collections::HashSet<&str> = page.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
        let read = fields_read();
        assert!(read.len() > 80 && read.contains("temperature") && read.contains("use_beam_search"), "{read:?}");
        let missing: Vec<_> = read.iter().filter(|name| !words.contains(name.as_str())).collect();
        assert!(missing.is_empty(), "docs/api.md does not name {missing:?}");
    }
}
