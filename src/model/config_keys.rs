//! Reads keys of one JSON object of a model configuration and collects what is wrong with them. Used by the configuration parsers only.

use std::cell::RefCell;

use serde_json::{Map, Value};

use super::problem::Problem;

/// Largest size accepted for any dimension; keeps products of two of them inside 64 bits.
const MAX_SIZE: u64 = 1 << 31;
/// Stands for a size that could not be read; even and a multiple of a packed word's elements, so that it causes no second complaint.
const STAND_IN: usize = 8;

/// One JSON object, its place in its file, and the list that problems go to.
#[derive(Clone)]
pub struct Keys<'a> {
    file: &'a str,
    /// Path of the object inside the file, ending in a dot unless empty: `text_config.`.
    path: String,
    object: &'a Map<String, Value>,
    problems: &'a RefCell<Vec<Problem>>,
}

impl<'a> Keys<'a> {
    /// The top level of a file; problems go to the list.
    pub fn new(file: &'a str, object: &'a Map<String, Value>, problems: &'a RefCell<Vec<Problem>>) -> Self {
        Self { file, path: String::new(), object, problems }
    }

    /// The value of a key; JSON null counts as absent, as it does for every reader of these files.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Notes that a key has the wrong value.
    pub fn report(&self, key: &str, found: impl std::fmt::Display, wanted: impl std::fmt::Display) {
        self.problems.borrow_mut().push(Problem::new(self.file, format!("{}{key}", self.path), found, wanted));
    }

    /// A nested object; absent = `None`, anything but an object is a problem.
    pub fn child(&self, key: &str) -> Option<Keys<'a>> {
        match self.get(key)? {
            Value::Object(object) => Some(Keys { path: format!("{}{key}.", self.path), object, ..self.clone() }),
            other => {
                self.report(key, short(other), "an object");
                None
            }
        }
    }

    /// A size of at least one. Missing or unusable: a problem, and `STAND_IN` so that parsing can go on.
    pub fn size(&self, key: &str) -> usize {
        match self.get(key) {
            Some(value) => self.size_of(key, value).unwrap_or(STAND_IN),
            None => {
                self.report(key, "nothing", "a positive whole number");
                STAND_IN
            }
        }
    }

    /// A size with a default; unusable: a problem, and the default.
    pub fn size_or(&self, key: &str, default: usize) -> usize {
        self.get(key).map_or(default, |value| self.size_of(key, value).unwrap_or(default))
    }

    fn size_of(&self, key: &str, value: &Value) -> Option<usize> {
        match value.as_u64() {
            Some(size @ 1..=MAX_SIZE) => Some(size as usize),
            _ => {
                self.report(key, short(value), "a positive whole number");
                None
            }
        }
    }

    /// A finite number above zero. Missing or unusable: a problem, and 1.
    pub fn positive(&self, key: &str) -> f64 {
        match self.get(key) {
            Some(value) => self.positive_of(key, value).unwrap_or(1.0),
            None => {
                self.report(key, "nothing", "a positive number");
                1.0
            }
        }
    }

    /// A number above zero with a default; unusable: a problem, and the default.
    pub fn positive_or(&self, key: &str, default: f64) -> f64 {
        self.get(key).map_or(default, |value| self.positive_of(key, value).unwrap_or(default))
    }

    fn positive_of(&self, key: &str, value: &Value) -> Option<f64> {
        match value.as_f64() {
            Some(number) if number.is_finite() && number > 0.0 => Some(number),
            _ => {
                self.report(key, short(value), "a positive number");
                None
            }
        }
    }

    /// A finite number of at least zero; absent allowed.
    pub fn not_negative(&self, key: &str) -> Option<f64> {
        let value = self.get(key)?;
        let number = value.as_f64().filter(|number| number.is_finite() && *number >= 0.0);
        if number.is_none() {
            self.report(key, short(value), "a number of at least 0");
        }
        number
    }

    /// A switch, absent allowed; unusable: a problem.
    pub fn bool(&self, key: &str) -> Option<bool> {
        let value = self.get(key)?;
        if value.as_bool().is_none() {
            self.report(key, short(value), "true or false");
        }
        value.as_bool()
    }

    /// A token id, absent allowed.
    pub fn token(&self, key: &str) -> Option<u32> {
        let value = self.get(key)?;
        let id = token_id(value);
        if id.is_none() {
            self.report(key, short(value), "a token id");
        }
        id
    }

    /// Token ids given as one number or a list; absent = none.
    pub fn tokens(&self, key: &str) -> Vec<u32> {
        let Some(value) = self.get(key) else { return Vec::new() };
        let ids: Option<Vec<u32>> = match value {
            Value::Array(list) => list.iter().map(token_id).collect(),
            one => token_id(one).map(|id| vec![id]),
        };
        ids.unwrap_or_else(|| {
            self.report(key, short(value), "a token id or a list of token ids");
            Vec::new()
        })
    }

    /// A string, absent allowed; unusable: a problem.
    pub fn text(&self, key: &str) -> Option<&'a str> {
        let value = self.get(key)?;
        if value.as_str().is_none() {
            self.report(key, short(value), "a string");
        }
        value.as_str()
    }

    /// A list of strings; absent = none, unusable: a problem.
    pub fn strings(&self, key: &str) -> Vec<&'a str> {
        let Some(value) = self.get(key) else { return Vec::new() };
        let strings: Option<Vec<&str>> = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        strings.unwrap_or_else(|| {
            self.report(key, short(value), "a list of strings");
            Vec::new()
        })
    }

    /// A switch of the arithmetic that has one supported setting. Absent is accepted: absent means that setting in the model's own
    /// configuration class.
    pub fn only(&self, key: &str, wanted: impl Into<Value>) {
        let wanted = wanted.into();
        if let Some(found) = self.get(key)
            && !same(found, &wanted)
        {
            self.report(key, short(found), format!("{wanted} (the only supported setting)"));
        }
    }

    /// The same for a key whose default in the model's own configuration class is another value: absent is refused too.
    pub fn only_stated(&self, key: &str, wanted: impl Into<Value>) {
        match self.get(key) {
            Some(_) => self.only(key, wanted),
            None => self.report(key, "nothing", format!("{} (the only supported setting)", wanted.into())),
        }
    }

    /// A feature that is not supported in any setting: absent, null, false, 0 and an empty list mean switched off.
    pub fn absent(&self, key: &str, why: &str) {
        let off = |value: &Value| match value {
            Value::Bool(on) => !on,
            Value::Number(number) => number.as_f64() == Some(0.0),
            Value::Array(list) => list.is_empty(),
            _ => false,
        };
        if let Some(found) = self.get(key).filter(|value| !off(value)) {
            self.report(key, short(found), format!("nothing ({why})"));
        }
    }

    /// The keys that are there.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.object.keys().map(String::as_str)
    }
}

/// Reads the top-level object of a JSON file.
pub fn parse_object(file: &str, text: &str) -> Result<Map<String, Value>, Problem> {
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(Problem::new(file, "the file", short(&other), "a JSON object")),
        Err(error) => Err(Problem::new(file, "the file", error, "a JSON object")),
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Numbers compare by value (1 = 1.0), everything else as it is.
fn same(found: &Value, wanted: &Value) -> bool {
    match (found.as_f64(), wanted.as_f64()) {
        (Some(found), Some(wanted)) => found == wanted,
        _ => found == wanted,
    }
}

/// A value as an error message shows it.
pub fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
