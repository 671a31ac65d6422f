//! `POST /tokenize` and `POST /detokenize`, in vLLM's shape.

use hyper::{Response, StatusCode};
use serde_json::{Map, Value, json};

use super::params::token_id;
use super::render;
use crate::model::tokenizer::Tokenizer;
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::http::{self, Body};
use crate::server::openai::logprobs;
use crate::server::state::App;

/// A raw prompt as ids: markers written out in it are markers, `[BOS]` comes first if asked for.
pub fn encode_raw(tokenizer: &Tokenizer, text: &str, add_bos: bool) -> Vec<u32> {
    let mut ids = Vec::new();
    if let Some(bos) = tokenizer.bos().filter(|_| add_bos) {
        ids.push(bos);
    }
    ids.extend(tokenizer.encode_with_markers(text));
    ids
}

/// `prompt` (raw) or `messages` (a chat as the model will see it) to token ids.
pub fn tokenize(app: &App, body: &Map<String, Value>) -> Result<Response<Body>, ApiError> {
    let fields = Fields::root(body);
    super::check_model(app, fields)?;
    let tokenizer = app.engine.tokenizer();
    let tokens = match (fields.get("prompt"), fields.get("messages")) {
        (Some(_), Some(_)) => return Err(ApiError::invalid("prompt", "Both prompt and messages are given: wanted one of them.")),
        (None, None) => return Err(ApiError::invalid("prompt", "prompt is missing: wanted prompt (a string) or messages.")),
        (Some(_), None) => {
            let text = fields.string("prompt")?.unwrap_or_default();
            encode_raw(tokenizer, text, fields.bool("add_special_tokens")?.unwrap_or(true))
        }
        (None, Some(_)) => render::prompt(app, fields)?.ids,
    };
    let mut answer = json!({"count": tokens.len(), "max_model_len": app.engine.info().max_model_len, "tokens": tokens});
    if fields.bool("return_token_strs")?.unwrap_or(false) {
        let texts: Vec<_> = tokens.iter().map(|id| logprobs::shown(tokenizer, *id)).collect();
        answer["token_strs"] = json!(texts);
    }
    Ok(http::json(StatusCode::OK, &answer))
}

/// Token ids to text, special tokens by name.
pub fn detokenize(app: &App, body: &Map<String, Value>) -> Result<Response<Body>, ApiError> {
    let fields = Fields::root(body);
    super::check_model(app, fields)?;
    let Some(list) = fields.array("tokens")? else {
        return Err(ApiError::invalid("tokens", "tokens is missing: wanted a list of token ids."));
    };
    let vocab_size = app.engine.info().vocab_size;
    let ids = list.iter().map(|item| token_id(item, "tokens", vocab_size)).collect::<Result<Vec<_>, _>>()?;
    let tokenizer = app.engine.tokenizer();
    let bytes: Vec<u8> = ids.iter().flat_map(|id| logprobs::shown_bytes(tokenizer, *id)).copied().collect();
    Ok(http::json(StatusCode::OK, &json!({"prompt": String::from_utf8_lossy(&bytes)})))
}
