//! Schemas that would take minutes or gigabytes to compile are refused by what makes them so. llguidance bounds most of its work by fuel,
//! but not the first step of its lexer, where languages are intersected, nor the pairs of an object's properties.

use serde_json::{Map, Value};

/// Largest `multipleOf`, as a whole number without its decimal point: a state of the lexer for each remainder. Those joined by `allOf`
/// multiply.
const MAX_MULTIPLE: u64 = 100_000;

/// Most schemas that one `allOf` joins, references and nested ones included: each may be a pattern, and patterns are intersected.
const MAX_JOINED: usize = 16;

/// Most pairs of properties, over all objects of a schema.
const MAX_PAIRS: usize = 4_000_000;

/// Most patterns of property names in one object: each is intersected with every other.
const MAX_NAME_PATTERNS: usize = 32;

/// What of a schema is too much, if anything.
pub fn excess(schema: &Map<String, Value>) -> Option<String> {
    let mut survey = Survey { root: schema, multiples: Vec::new(), joins: false, pairs: 0, found: None };
    survey.object(schema);
    survey.found.take().or_else(|| survey.sums())
}

struct Survey<'a> {
    root: &'a Map<String, Value>,
    multiples: Vec<u64>,
    /// Whether there is an `allOf` anywhere.
    joins: bool,
    pairs: usize,
    found: Option<String>,
}

impl<'a> Survey<'a> {
    fn value(&mut self, value: &'a Value) {
        match value {
            Value::Object(fields) => self.object(fields),
            Value::Array(items) => items.iter().for_each(|item| self.value(item)),
            _ => {}
        }
    }

    fn object(&mut self, fields: &'a Map<String, Value>) {
        if let Some(Value::Number(number)) = fields.get("multipleOf") {
            self.multiples.push(digits(&number.to_string()));
        }
        if let Some(Value::Array(_)) = fields.get("allOf") {
            self.joins = true;
            let mut left = MAX_JOINED + 1;
            self.join(fields, &mut left);
            if left == 0 {
                self.found.get_or_insert_with(|| format!("allOf joins more than {MAX_JOINED} schemas"));
            }
        }
        let size = |key: &str| fields.get(key).and_then(Value::as_object).map_or(0, Map::len);
        self.pairs = self.pairs.saturating_add(size("properties").saturating_pow(2));
        if size("patternProperties") > MAX_NAME_PATTERNS {
            self.found.get_or_insert_with(|| format!("patternProperties has more than {MAX_NAME_PATTERNS} entries"));
        }
        for (key, value) in fields {
            // These hold data, not schemas.
            if !matches!(key.as_str(), "enum" | "const" | "default" | "examples") {
                self.value(value);
            }
        }
    }

    /// Takes one off `left` for every schema that holds at the same place as this one.
    fn join(&self, fields: &Map<String, Value>, left: &mut usize) {
        *left = left.saturating_sub(1);
        if *left == 0 {
            return;
        }
        let branches = fields.get("allOf").and_then(Value::as_array).into_iter().flatten();
        branches.filter_map(Value::as_object).for_each(|branch| self.join(branch, left));
        if let Some(target) = fields.get("$ref").and_then(Value::as_str).and_then(|reference| self.resolve(reference)) {
            self.join(target, left);
        }
    }

    fn resolve(&self, reference: &str) -> Option<&'a Map<String, Value>> {
        let mut parts = reference.strip_prefix('#')?.split('/').skip(1).map(|part| part.replace("~1", "/").replace("~0", "~"));
        parts.try_fold(self.root, |at, part| at.get(&part)?.as_object())
    }

    fn sums(&self) -> Option<String> {
        let largest = self.multiples.iter().copied().max().unwrap_or(1);
        let joined = self.multiples.iter().fold(1u64, |product, multiple| product.saturating_mul((*multiple).max(1)));
        if largest > MAX_MULTIPLE || (self.joins && joined > MAX_MULTIPLE) {
            return Some(format!("multipleOf has more than {MAX_MULTIPLE} remainders (those beside an allOf multiply)"));
        }
        (self.pairs > MAX_PAIRS).then(|| "it has too many properties".into())
    }
}

/// The digits of a number as a whole number: 0.25 and 25 are 25.
fn digits(number: &str) -> u64 {
    let mantissa = number.split(['e', 'E']).next().unwrap_or_default();
    let mantissa = mantissa.strip_suffix(".0").unwrap_or(mantissa);
    mantissa
        .chars()
        .filter(char::is_ascii_digit)
        .fold(0, |sum: u64, digit| sum.saturating_mul(10).saturating_add(u64::from(digit as u32 - '0' as u32)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(schema: Value) -> String {
        excess(schema.as_object().unwrap()).unwrap_or_default()
    }

    #[test]
    fn a_schema_that_would_take_minutes_is_refused_by_what_makes_it_so() {
        let patterns =
            |count: usize| (0..count).map(|i| json!({"type": "string", "pattern": format!("a{{{i},500}}b*")})).collect::<Vec<_>>();
        let names = |count: usize| (0..count).map(|i| (format!("k{i}"), json!({}))).collect::<Map<_, _>>();
        let twice = json!([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]);
        for (schema, named) in [
            (json!({"multipleOf": 1_000_003}), "multipleOf"),
            (json!({"properties": {"deep": {"items": [{"multipleOf": 0.123_456_7}]}}}), "multipleOf"),
            (json!({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}), "multipleOf"),
            (json!({"allOf": patterns(17)}), "allOf"),
            (json!({"allOf": [{"allOf": patterns(9)}, {"allOf": patterns(9)}]}), "allOf"),
            (json!({"$defs": {"a": {"allOf": patterns(9)}}, "allOf": twice}), "allOf"),
            (json!({"$defs": {"a": {"$ref": "#/$defs/a"}}, "allOf": twice}), "allOf"),
            (json!({"properties": names(2001)}), "properties"),
            (json!({"patternProperties": names(33)}), "patternProperties"),
        ] {
            assert!(refused(schema.clone()).contains(named), "{schema}: {}", refused(schema.clone()));
        }
    }

    #[test]
    fn schemas_as_people_write_them_pass() {
        let many = (0..200).map(|i| (format!("k{i}"), json!({"allOf": [{"$ref": "#/$defs/money"}]}))).collect::<Map<_, _>>();
        for schema in [
            json!({}),
            json!({"$defs": {"money": {"type": "number", "multipleOf": 0.01}}, "properties": many}),
            json!({"multipleOf": 100_000.0}),
            json!({"enum": [{"multipleOf": 1e9}], "properties": {"multipleOf": {"type": "integer"}, "allOf": {"type": "array"}}}),
        ] {
            assert_eq!(refused(schema.clone()), "", "{schema}");
        }
    }
}
