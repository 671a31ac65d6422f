//! Declares tools as K2.5 and K2.6 were trained to read them: TypeScript-like text. A schema outside the rules makes the whole list fall
//! back to compact JSON, as it did in training.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use super::python_json::{Separators, dumps, sort_keys, str_scalar};

const INDENT: &str = "  ";

/// Text of the tool declaration. Keys are sorted first, so that the same tools give the same tokens whatever order a client writes them in.
pub fn declare(tools: &[Value]) -> String {
    let tools: Vec<Value> = tools.iter().map(sort_keys).collect();
    typescript(&tools).unwrap_or_else(|| dumps(&Value::Array(tools), &Separators::compact(), None))
}

/// The TypeScript form; `None` when a schema is outside the rules or no tool is a function.
pub fn typescript(tools: &[Value]) -> Option<String> {
    let functions: Vec<String> = tools
        .iter()
        .filter(|tool| tool.get("type").and_then(Value::as_str) == Some("function"))
        .filter_map(|tool| tool.get("function")?.as_object().filter(|function| !function.is_empty()))
        .map(function)
        .collect::<Option<_>>()?;
    if functions.is_empty() {
        return None;
    }
    Some(format!("# Tools\n\n## functions\nnamespace functions {{\n{}\n}}\n", functions.join("\n")))
}

/// One function: interfaces of its definitions, description, type.
fn function(function: &Map<String, Value>) -> Option<String> {
    let mut definitions = Definitions::default();
    let empty = Map::new();
    let parameters = match function.get("parameters") {
        None | Some(Value::Null) => &empty,
        Some(parameters) => parameters.as_object()?,
    };
    let parsed = Object::parse(parameters, &mut definitions)?;
    // What counts is a reference from the parameters themselves: the training-time encoder looks before it reads the definitions.
    let self_reference = definitions.self_reference;
    let mut lines = Vec::new();
    if self_reference {
        let fields: Option<Vec<String>> = parsed.fields.iter().map(|field| field.render(INDENT)).collect();
        let fields = fields?.join(",\n");
        let body = if fields.is_empty() { fields } else { format!("\n{fields}\n") };
        lines.push(format!("interface parameters {{{body}}}"));
    }
    for (name, schema) in definitions.schemas.clone() {
        let text = Type::parse(&schema, &mut definitions)?.render("")?;
        let comment = comment_lines(schema.as_object()?.get("description"), "")?;
        lines.push(format!("{comment}interface {name} {text}"));
    }
    let description = comment_lines(function.get("description"), "")?;
    lines.extend(description.strip_suffix('\n').map(str::to_string));
    let name = function.get("name").and_then(Value::as_str).unwrap_or("function");
    let argument = if self_reference { "parameters".to_string() } else { parsed.render("")? };
    lines.push(format!("type {name} = (_: {argument}) => any;"));
    Some(lines.join("\n"))
}

/// Schemas under `$defs`, in the order they were met, and whether anything refers to the whole.
#[derive(Default)]
struct Definitions {
    schemas: Vec<(String, Value)>,
    /// Where a name stands in `schemas`.
    places: HashMap<String, usize>,
    self_reference: bool,
}

impl Definitions {
    fn register(&mut self, definitions: &Value) -> Option<()> {
        for (name, schema) in definitions.as_object()? {
            match self.places.get(name) {
                Some(&place) => self.schemas[place].1 = schema.clone(),
                None => {
                    self.places.insert(name.clone(), self.schemas.len());
                    self.schemas.push((name.clone(), schema.clone()));
                }
            }
        }
        Some(())
    }
}

/// A schema as far as the rules reach.
struct Type {
    shape: Shape,
    /// Comment lines of its description and constraints are made from these.
    description: Option<Value>,
    constraints: Vec<String>,
}

enum Shape {
    /// Text that needs no indentation: scalars, enums, unions, references.
    Plain(String),
    Array(Box<Type>),
    AnyOf(Vec<Type>),
    Object(Object),
}

struct Object {
    fields: Vec<Field>,
    /// `additionalProperties`: `any`, `never` or a type.
    rest: Option<Box<Type>>,
}

struct Field {
    name: String,
    kind: Type,
    optional: bool,
    default: Option<Value>,
}

impl Type {
    fn plain(text: impl Into<String>) -> Self {
        Self { shape: Shape::Plain(text.into()), description: None, constraints: Vec::new() }
    }

    fn parse(schema: &Value, definitions: &mut Definitions) -> Option<Self> {
        let fields = match schema {
            Value::Bool(anything) => return Some(Self::plain(if *anything { "any" } else { "null" })),
            Value::Object(fields) => fields,
            _ => return None,
        };
        let (shape, allowed): (Shape, &[&str]) = if let Some(reference) = fields.get("$ref") {
            (Shape::Plain(resolve(reference.as_str()?, definitions)?), &[])
        } else if let Some(types) = fields.get("anyOf") {
            (Shape::AnyOf(types.as_array()?.iter().map(|schema| Self::parse(schema, definitions)).collect::<Option<_>>()?), &[])
        } else if let Some(values) = fields.get("enum") {
            (Shape::Plain(enumeration(values.as_array()?, fields.get("type"))?), &[])
        } else {
            match fields.get("type") {
                Some(Value::Array(types)) => (Shape::Plain(union(types)?), &[]),
                Some(Value::String(kind)) => Self::typed(kind, fields, definitions)?,
                None if fields.is_empty() => (Shape::Plain("any".into()), &[]),
                _ => return None,
            }
        };
        Some(Self { shape, description: fields.get("description").cloned(), constraints: constraints(fields, allowed)? })
    }

    fn typed(kind: &str, fields: &Map<String, Value>, definitions: &mut Definitions) -> Option<(Shape, &'static [&'static str])> {
        Some(match kind {
            "object" => (Shape::Object(Object::parse(fields, definitions)?), &[]),
            "array" => {
                let item = match fields.get("items") {
                    Some(items) if !is_falsy(items) => Self::parse(items, definitions)?,
                    _ => Self::plain("any"),
                };
                (Shape::Array(Box::new(item)), &["maxItems", "minItems"])
            }
            "string" => (Shape::Plain("string".into()), &["maxLength", "minLength", "pattern"]),
            "integer" | "number" => (Shape::Plain("number".into()), &["maximum", "minimum"]),
            other => (Shape::Plain(other.into()), &[]),
        })
    }

    fn render(&self, indent: &str) -> Option<String> {
        let deeper = format!("{indent}{INDENT}");
        Some(match &self.shape {
            Shape::Plain(text) => text.clone(),
            Shape::AnyOf(types) => types.iter().map(|kind| kind.render(indent)).collect::<Option<Vec<_>>>()?.join(" | "),
            Shape::Object(object) => object.render(indent)?,
            Shape::Array(item) => match item.comment(&deeper)?.as_str() {
                "" => format!("Array<{}>", item.render(indent)?),
                comment => format!("Array<\n{comment}{deeper}{}\n{indent}>", item.render(&deeper)?),
            },
        })
    }

    /// Description, then constraints, each line ending in a line break.
    fn comment(&self, indent: &str) -> Option<String> {
        let mut comment = comment_lines(self.description.as_ref(), indent)?;
        if !self.constraints.is_empty() {
            comment.push_str(&format!("{indent}// {}\n", self.constraints.join(", ")));
        }
        Some(comment)
    }
}

impl Object {
    fn parse(schema: &Map<String, Value>, definitions: &mut Definitions) -> Option<Self> {
        if let Some(defs) = schema.get("$defs").filter(|defs| !is_falsy(defs)) {
            definitions.register(defs)?;
        }
        let rest = match schema.get("additionalProperties") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(allowed)) => Some(Type::plain(if *allowed { "any" } else { "never" })),
            Some(schema) => Some(Type::parse(schema, definitions)?),
        };
        let mut object = Self { fields: Vec::new(), rest: rest.map(Box::new) };
        let Some(properties) = schema.get("properties") else { return Some(object) };
        let required: HashSet<&str> = match schema.get("required") {
            None => HashSet::new(),
            Some(names) => names.as_array()?.iter().filter_map(Value::as_str).collect(),
        };
        for (name, property) in properties.as_object()? {
            let kind = Type::parse(property, definitions)?;
            let default = property.get("default").filter(|default| !default.is_null()).cloned();
            object.fields.push(Field { name: name.clone(), kind, optional: !required.contains(name.as_str()), default });
        }
        Some(object)
    }

    /// Required fields first, each group by name.
    fn render(&self, indent: &str) -> Option<String> {
        let deeper = format!("{indent}{INDENT}");
        let mut fields: Vec<&Field> = self.fields.iter().collect();
        fields.sort_by(|a, b| (a.optional, &a.name).cmp(&(b.optional, &b.name)));
        let mut texts = fields.iter().map(|field| field.render(&deeper)).collect::<Option<Vec<_>>>()?;
        if let Some(rest) = &self.rest {
            texts.push(format!("{deeper}[k: string]: {}", rest.render(&deeper)?));
        }
        if texts.is_empty() {
            return Some("{}".into());
        }
        Some(format!("{{\n{}\n{indent}}}", texts.join(",\n")))
    }
}

impl Field {
    fn render(&self, indent: &str) -> Option<String> {
        let mut text = self.kind.comment(indent)?;
        if let Some(default) = &self.default {
            let shown = match default {
                Value::Bool(_) | Value::Number(_) => str_scalar(default)?,
                other => dumps(other, &Separators::spaced(), None),
            };
            text.push_str(&format!("{indent}// Default: {shown}\n"));
        }
        let mark = if self.optional { "?" } else { "" };
        text.push_str(&format!("{indent}{}{mark}: {}", self.name, self.kind.render(indent)?));
        Some(text)
    }
}

/// `// ` before every line; an empty line stays empty, an empty or absent description gives nothing.
fn comment_lines(description: Option<&Value>, indent: &str) -> Option<String> {
    let description = match description {
        None | Some(Value::Null) => "",
        Some(value) if is_falsy(value) => "",
        Some(value) => value.as_str()?,
    };
    if description.is_empty() {
        return Some(String::new());
    }
    let line = |line: &str| if line.is_empty() { "\n".to_string() } else { format!("{indent}// {line}\n") };
    Some(description.split('\n').map(line).collect())
}

/// `key: value` of the allowed keys, by key.
fn constraints(fields: &Map<String, Value>, allowed: &[&str]) -> Option<Vec<String>> {
    let present = allowed.iter().filter_map(|key| Some((key, fields.get(*key)?)));
    present.map(|(key, value)| Some(format!("{key}: {}", str_scalar(value)?))).collect()
}

/// The last part of a reference into `$defs`; `#` is the whole of the parameters.
fn resolve(reference: &str, definitions: &mut Definitions) -> Option<String> {
    if reference == "#" {
        definitions.self_reference = true;
        return Some("parameters".into());
    }
    let name = reference.strip_prefix("#/$defs/")?.rsplit('/').next()?;
    definitions.places.contains_key(name).then(|| name.to_string())
}

/// Values joined by ` | `, strings in double quotes; each must be of the stated type, null aside.
fn enumeration(values: &[Value], stated: Option<&Value>) -> Option<String> {
    let stated = match stated {
        None => None,
        Some(Value::String(kind)) => Some(kind.as_str()),
        Some(Value::Array(kinds)) => match kinds.as_slice() {
            [kind] => Some(kind.as_str()?),
            [one, other] if one == "null" => Some(other.as_str()?),
            [one, other] if other == "null" => Some(one.as_str()?),
            _ => return None,
        },
        Some(_) => return None,
    };
    let fits = |value: &Value| match stated {
        _ if value.is_null() => true,
        Some("string") => value.is_string(),
        // Python counts True and False as integers.
        Some("number") => value.is_number() || value.is_boolean(),
        Some("integer") => value.is_i64() || value.is_u64() || value.is_boolean(),
        Some("boolean") => value.is_boolean(),
        _ => true,
    };
    let text = |value: &Value| match value {
        Value::String(text) => Some(format!("\"{text}\"")),
        other => str_scalar(other),
    };
    values.iter().all(fits).then(|| values.iter().map(text).collect::<Option<Vec<_>>>())?.map(|texts| texts.join(" | "))
}

fn union(types: &[Value]) -> Option<String> {
    let one = |kind: &Value| match kind.as_str()? {
        "string" => Some("string"),
        "number" | "integer" => Some("number"),
        "boolean" => Some("boolean"),
        "null" => Some("null"),
        "object" => Some("{}"),
        "array" => Some("Array<any>"),
        _ => None,
    };
    Some(types.iter().map(one).collect::<Option<Vec<_>>>()?.join(" | "))
}

/// What Python's `if value` passes over.
fn is_falsy(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tool(name: &str, parameters: Value) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    }

    /// 300 random tool lists with the text that the training-time encoder made of them (null = it refused).
    #[test]
    fn recorded_declarations_are_reproduced() {
        let cases: Vec<Value> = serde_json::from_str(include_str!("../../../tests/golden/tools.json")).unwrap();
        for case in &cases {
            let tools: Vec<Value> = case["tools"].as_array().unwrap().iter().map(sort_keys).collect();
            assert_eq!(typescript(&tools).as_deref(), case["typescript"].as_str(), "{}", case["tools"]);
        }
        assert_eq!(cases.len(), 300);
    }

    /// Quadratic work would take minutes here.
    #[test]
    fn a_hundred_thousand_definitions_are_declared_at_once() {
        let names: Vec<String> = (0..100_000).map(|i| format!("d{i}")).collect();
        let definitions: Map<String, Value> = names.iter().map(|name| (name.clone(), json!({}))).collect();
        let properties: Map<String, Value> = names.iter().map(|name| (name.clone(), json!({"$ref": format!("#/$defs/{name}")}))).collect();
        let begun = std::time::Instant::now();
        let text = typescript(&[tool("f", json!({"type": "object", "$defs": definitions, "properties": properties}))]).unwrap();
        assert!(text.contains("interface d99999 any") && text.contains("  d99999?: d99999"));
        assert!(begun.elapsed().as_secs() < 20, "{:?}", begun.elapsed());
    }

    #[test]
    fn the_published_example() {
        let tools = [json!({"type": "function", "function": {"name": "book", "description": "Book a table.\nSecond line.", "parameters": {
            "type": "object", "required": ["when", "kind"], "properties": {
                "when": {"type": "string", "minLength": 3, "description": "ISO time"}, "kind": {"enum": ["a", "b"]},
                "n": {"type": "integer", "minimum": 1, "maximum": 9, "default": 2},
                "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4}}}}})];
        let wanted = "# Tools\n\n## functions\nnamespace functions {\n// Book a table.\n// Second line.\ntype book = (_: {\n  kind: \"a\" | \"b\",\n  \
                      // ISO time\n  // minLength: 3\n  when: string,\n  // maximum: 9, minimum: 1\n  // Default: 2\n  n?: number,\n  \
                      // maxItems: 4\n  tags?: Array<string>\n}) => any;\n}\n";
        assert_eq!(declare(&tools), wanted);
    }

    #[test]
    fn definitions_become_interfaces() {
        let text = declare(&[tool(
            "f",
            json!({"type": "object", "$defs": {"Node": {"type": "object", "description": "A node", "properties": {"next": {"$ref": "#/$defs/Node"}}}},
                   "properties": {"root": {"$ref": "#/$defs/Node"}}, "required": ["root"], "additionalProperties": false}),
        )]);
        assert!(
            text.contains("// A node\ninterface Node {\n  next?: Node\n}\ntype f = (_: {\n  root: Node,\n  [k: string]: never\n}) => any;"),
            "{text}"
        );
        let text = declare(&[tool("g", json!({"type": "object", "properties": {"again": {"$ref": "#"}}}))]);
        assert!(text.contains("interface parameters {\n  again?: parameters\n}\ntype g = (_: parameters) => any;"), "{text}");
    }

    #[test]
    fn a_schema_outside_the_rules_falls_back_to_compact_json() {
        for schema in [
            json!({"type": "object", "properties": {"x": {"oneOf": []}}}),
            json!({"type": "object", "properties": {"x": {"$ref": "https://elsewhere"}}}),
            json!({"type": "object", "properties": {"x": {"$ref": "#/$defs/Missing"}}}),
            json!({"type": "object", "properties": {"x": {"type": "string", "enum": [1]}}}),
            json!({"type": "object", "properties": {"x": {"type": ["string", "date"]}}}),
            json!({"type": "object", "properties": []}),
            json!([]),
        ] {
            let text = declare(&[tool("f", schema.clone())]);
            assert!(text.starts_with("[{\"function\":{\"name\":\"f\",\"parameters\":"), "{schema}: {text}");
        }
    }

    #[test]
    fn the_order_a_client_writes_keys_in_does_not_matter() {
        let one = json!({"type": "object", "properties": {"a": {"type": "string"}, "b": {}}, "$defs": {"Y": {}, "X": {"type": "null"}}});
        let other = json!({"$defs": {"X": {"type": "null"}, "Y": {}}, "properties": {"b": {}, "a": {"type": "string"}}, "type": "object"});
        assert_eq!(declare(&[tool("f", one)]), declare(&[tool("f", other)]));
    }

    #[test]
    fn no_parameters_give_an_empty_object() {
        let text = declare(&[json!({"type": "function", "function": {"name": "now"}}), json!({"type": "web_search"})]);
        assert_eq!(text, "# Tools\n\n## functions\nnamespace functions {\ntype now = (_: {}) => any;\n}\n");
    }
}
