//! Reading JSON fields one by one, so that a wrong value is refused with its path, what was found and what is wanted.
//! `null` counts as absent everywhere, as clients send it for "default".

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::ApiError;

/// The fields of one JSON object and where it stands in the body.
#[derive(Clone, Copy)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: &'a str,
}

/// A value as it may be shown in an error: short, never a page of somebody's prompt.
pub fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 40 {
        return text;
    }
    let head: String = text.chars().take(37).collect();
    format!("{head}...")
}

impl<'a> Fields<'a> {
    pub fn root(map: &'a Map<String, Value>) -> Self {
        Self { map, path: "" }
    }

    pub fn at(map: &'a Map<String, Value>, path: &'a str) -> Self {
        Self { map, path }
    }

    /// Path of a field of this object.
    pub fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.into() } else { format!("{}.{name}", self.path) }
    }

    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// The error for a field whose value is not what is wanted.
    pub fn wrong(&self, name: &str, value: &Value, wanted: &str) -> ApiError {
        let path = self.path(name);
        ApiError::invalid(&path, format!("{path} = {}: wanted {wanted}.", shown(value)))
    }

    pub fn bool(&self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(self.wrong(name, other, "true or false")),
        }
    }

    pub fn string(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong(name, other, "a string")),
        }
    }

    pub fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong(name, other, "an object")),
        }
    }

    pub fn array(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong(name, other, "a list")),
        }
    }

    /// A number within `range`.
    pub fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            _ => Err(self.wrong(name, value, &format!("a number from {} to {}", range.start(), range.end()))),
        }
    }

    /// A whole number within `range`; numbers beyond i64 are outside every range.
    pub fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match whole(value).filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(name, value, &format!("a whole number from {} to {}", range.start(), range.end()))),
        }
    }

    /// A count of tokens: a whole number of at least 0. What is larger than `u32::MAX` counts as that: agents send "as much as
    /// you can", and the context limit cuts it anyway.
    pub fn count(&self, name: &str) -> Result<Option<u32>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let large = value.as_f64().filter(|number| *number >= f64::from(u32::MAX) && number.fract() == 0.0);
        if large.is_some() {
            return Ok(Some(u32::MAX));
        }
        match whole(value).and_then(|number| u32::try_from(number).ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(name, value, "a whole number of at least 0")),
        }
    }

    /// A seed: a whole number from 0 to 2^64 - 1. Others would have to be folded into it, which would make two seeds one.
    pub fn seed(&self, name: &str) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_u64().map(Some).ok_or_else(|| self.wrong(name, value, "a whole number from 0 to 18446744073709551615"))
    }

    /// A known field that is not done here: only its neutral values (`null` always) are accepted.
    pub fn refuse_unless(&self, name: &str, neutral: &[Value], why: &str) -> Result<(), ApiError> {
        match self.get(name) {
            None => Ok(()),
            Some(value) if neutral.contains(value) => Ok(()),
            Some(value) => {
                let path = self.path(name);
                Err(ApiError::unsupported(&path, format!("{path} = {} is not supported: {why}.", shown(value))))
            }
        }
    }
}

/// 16 and 16.0 are whole; 1.5, "16" and numbers beyond i64 are not.
pub fn whole(value: &Value) -> Option<i64> {
    if let Some(number) = value.as_i64() {
        return Some(number);
    }
    let number = value.as_f64()?;
    (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with<T>(value: Value, read: impl Fn(Fields) -> T) -> T {
        let body = json!({"f": value});
        read(Fields::root(body.as_object().unwrap()))
    }

    #[test]
    fn a_count_saturates_and_refuses_what_is_no_count() {
        for (value, wanted) in [
            (json!(0), Some(0)),
            (json!(16), Some(16)),
            (json!(16.0), Some(16)),
            (json!(2_147_483_648_u64), Some(2_147_483_648)),
            (json!(9_223_372_036_854_775_808_u64), Some(u32::MAX)),
            (json!(1e30), Some(u32::MAX)),
            (Value::Null, None),
        ] {
            assert_eq!(with(value.clone(), |f| f.count("f")), Ok(wanted), "{value}");
        }
        for value in [json!(-1), json!(1.5), json!("16"), json!(true), json!([1])] {
            let error = with(value.clone(), |f| f.count("f")).unwrap_err();
            assert!(error.message.starts_with(&format!("f = {value}")), "{}", error.message);
            assert_eq!(error.param.as_deref(), Some("f"));
        }
    }

    #[test]
    fn two_seeds_are_never_folded_into_one() {
        assert_eq!(with(json!(u64::MAX), |f| f.seed("f")), Ok(Some(u64::MAX)));
        for value in [json!(-1), json!(1.5), json!(18_446_744_073_709_551_616_f64)] {
            assert!(with(value, |f| f.seed("f")).is_err());
        }
    }

    #[test]
    fn a_long_value_is_cut_in_the_message() {
        let error = with(json!("x".repeat(10_000)), |f| f.bool("f")).unwrap_err();
        assert!(error.message.len() < 120, "{}", error.message);
    }
}
