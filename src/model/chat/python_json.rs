//! JSON and scalars as Python writes them: the templates were written for Python, and a space more or less is another prompt.

use serde_json::{Number, Value};

/// What stands between items and after keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Separators {
    pub item: String,
    pub key: String,
}

impl Separators {
    /// `json.dumps(x)`.
    pub fn spaced() -> Self {
        Self { item: ", ".into(), key: ": ".into() }
    }

    /// `json.dumps(x, separators=(',', ':'))`.
    pub fn compact() -> Self {
        Self { item: ",".into(), key: ":".into() }
    }
}

/// `json.dumps(value, ensure_ascii=False)`; `indent` spaces per level put every item on its own line.
pub fn dumps(value: &Value, separators: &Separators, indent: Option<usize>) -> String {
    let mut out = String::new();
    Writer { separators, indent }.write(value, 0, &mut out);
    out
}

struct Writer<'a> {
    separators: &'a Separators,
    indent: Option<usize>,
}

impl Writer<'_> {
    fn write(&self, value: &Value, level: usize, out: &mut String) {
        match value {
            Value::Null => out.push_str("null"),
            Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Value::Number(number) => out.push_str(&repr_number(number)),
            Value::String(text) => out.push_str(&quote(text)),
            Value::Array(items) => self.list('[', ']', items, level, out, |item, out| self.write(item, level + 1, out)),
            Value::Object(fields) => self.list('{', '}', fields, level, out, |(key, value), out| {
                out.push_str(&quote(key));
                out.push_str(&self.separators.key);
                self.write(value, level + 1, out);
            }),
        }
    }

    fn list<I: IntoIterator>(
        &self,
        open: char,
        close: char,
        items: I,
        level: usize,
        out: &mut String,
        write: impl Fn(I::Item, &mut String),
    ) {
        let new_line = |level: usize, out: &mut String| {
            if let Some(indent) = self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent * level));
            }
        };
        out.push(open);
        let mut any = false;
        for item in items {
            if any {
                // With an indent Python drops the space before the line break.
                out.push_str(if self.indent.is_some() { self.separators.item.trim_end() } else { &self.separators.item });
            }
            any = true;
            new_line(level + 1, out);
            write(item, out);
        }
        if any {
            new_line(level, out);
        }
        out.push(close);
    }
}

fn quote(text: &str) -> String {
    Value::from(text).to_string()
}

/// `str(value)` of a JSON scalar; `None` for lists and objects.
pub fn str_scalar(value: &Value) -> Option<String> {
    match value {
        Value::Null => Some("None".into()),
        Value::Bool(true) => Some("True".into()),
        Value::Bool(false) => Some("False".into()),
        Value::Number(number) => Some(repr_number(number)),
        Value::String(text) => Some(text.clone()),
        Value::Array(_) | Value::Object(_) => None,
    }
}

/// Whole numbers as they are, others by `repr(float)`.
pub fn repr_number(number: &Number) -> String {
    match number.as_f64() {
        Some(value) if number.is_f64() => repr_float(value),
        _ => number.to_string(),
    }
}

/// Python's shortest form: digits between 1e-4 and 1e16, else an exponent of at least two digits.
fn repr_float(value: f64) -> String {
    let shortest = format!("{value:e}");
    let Some((mantissa, exponent)) = shortest.split_once('e') else { return shortest };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = value.to_string();
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

/// Keys of all objects in ascending order, at every depth. Lists keep their order.
pub fn sort_keys(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let mut sorted: Vec<(&String, &Value)> = fields.iter().collect();
            sorted.sort_unstable_by_key(|(key, _)| *key);
            Value::Object(sorted.into_iter().map(|(key, value)| (key.clone(), sort_keys(value))).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(sort_keys).collect()),
        scalar => scalar.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_is_written_as_python_writes_it() {
        let value = json!({"a": [1, 2.0, true, null], "é<": {"b": "x\n\"\u{1}\u{7f}"}, "e": [], "o": {}});
        assert_eq!(
            dumps(&value, &Separators::spaced(), None),
            "{\"a\": [1, 2.0, true, null], \"é<\": {\"b\": \"x\\n\\\"\\u0001\u{7f}\"}, \"e\": [], \"o\": {}}"
        );
        assert_eq!(dumps(&json!({"a": [1, {"b": 2}]}), &Separators::compact(), None), r#"{"a":[1,{"b":2}]}"#);
        assert_eq!(dumps(&json!({"a": [1, []]}), &Separators::spaced(), Some(2)), "{\n  \"a\": [\n    1,\n    []\n  ]\n}");
    }

    #[test]
    fn numbers_are_written_as_python_writes_them() {
        let cases = [
            ("1", "1"),
            ("1.0", "1.0"),
            ("0.5", "0.5"),
            ("1e2", "100.0"),
            ("1e16", "1e+16"),
            ("1.5e300", "1.5e+300"),
            ("123456789012345680.0", "1.2345678901234568e+17"),
            ("0.0001", "0.0001"),
            ("0.00001", "1e-05"),
            ("18446744073709551615", "18446744073709551615"),
        ];
        for (text, wanted) in cases {
            let value: Value = serde_json::from_str(text).unwrap();
            assert_eq!(str_scalar(&value).unwrap(), wanted, "{text}");
        }
    }

    #[test]
    fn keys_are_sorted_at_every_depth() {
        let sorted = sort_keys(&json!({"b": {"d": 1, "c": 2}, "a": [{"y": 1, "x": 2}]}));
        assert_eq!(sorted.to_string(), r#"{"a":[{"x":2,"y":1}],"b":{"c":2,"d":1}}"#);
    }
}
