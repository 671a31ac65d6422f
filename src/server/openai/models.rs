//! `GET /v1/models` and `GET /v1/models/NAME`.

use hyper::{Response, StatusCode};
use serde_json::{Value, json};

use crate::server::error::ApiError;
use crate::server::http::{self, Body};
use crate::server::state::App;

/// The model under one of its names. `max_model_len` is what load tools read, and the limit that is enforced.
fn card(app: &App, name: &str) -> Value {
    let info = app.engine.info();
    json!({
        "id": name, "object": "model", "created": app.created, "owned_by": "kdtree", "root": info.name, "parent": null,
        "max_model_len": info.max_model_len,
    })
}

pub fn list(app: &App) -> Response<Body> {
    let names = std::iter::once(&app.engine.info().name).chain(&app.config.served_names);
    let cards: Vec<_> = names.map(|name| card(app, name)).collect();
    http::json(StatusCode::OK, &json!({"object": "list", "data": cards}))
}

pub fn one(app: &App, name: &str) -> Result<Response<Body>, ApiError> {
    let served = &app.engine.info().name;
    let known = name == served || app.config.served_names.iter().any(|known| known == name);
    if known { Ok(http::json(StatusCode::OK, &card(app, name))) } else { Err(ApiError::model_not_found(name, served)) }
}
