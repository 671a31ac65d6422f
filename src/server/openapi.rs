//! The OpenAPI document: `openapi.json` beside this file, with the numbers of the loaded model put in.

use serde_json::{Value, json};

use crate::engine::contract::ModelInfo;

const DOCUMENT: &str = include_str!("openapi.json");

/// The document as served.
pub fn document(info: &ModelInfo) -> Value {
    let mut document: Value = serde_json::from_str(DOCUMENT).expect("openapi.json is valid JSON: a test reads it");
    document["info"]["version"] = json!(env!("CARGO_PKG_VERSION"));
    limit_ids(&mut document, info.vocab_size as u64 - 1);
    document
}

/// The largest token id of the small model stands for the loaded one's.
fn limit_ids(value: &mut Value, largest: u64) {
    match value {
        Value::Object(map) => {
            if map.get("maximum") == Some(&json!(4095)) {
                map.insert("maximum".into(), json!(largest));
            }
            map.values_mut().for_each(|value| limit_ids(value, largest));
        }
        Value::Array(list) => list.iter_mut().for_each(|value| limit_ids(value, largest)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::routes;

    fn read() -> Value {
        let info = ModelInfo {
            name: "m".into(),
            vocab_size: 163_840,
            max_model_len: 64,
            stop_ids: vec![],
            max_rows: 1,
            max_running: 1,
            kv_slots: 64,
        };
        document(&info)
    }

    #[test]
    fn every_route_is_documented_and_nothing_else() {
        let document = read();
        let mut listed: Vec<_> = document["paths"].as_object().unwrap().keys().map(|path| path.replace("{model}", "")).collect();
        let mut there: Vec<_> = routes::paths().map(|(path, _)| path.to_owned()).collect();
        listed.sort();
        there.sort();
        assert_eq!(listed, there);
    }

    #[test]
    fn methods_and_doors_agree_with_the_routes() {
        let document = read();
        for (path, item) in document["paths"].as_object().unwrap() {
            let path = path.replace("{model}", "");
            let (_, allow) = routes::paths().find(|(known, _)| *known == path).unwrap();
            for (method, operation) in item.as_object().unwrap() {
                assert!(allow.to_lowercase().contains(method.as_str()), "{path} {method}");
                assert_eq!(operation["security"] == json!([]), routes::is_open(&path), "{path}");
            }
        }
    }

    #[test]
    fn every_reference_leads_somewhere() {
        fn check(value: &Value, document: &Value) {
            match value {
                Value::Object(map) => {
                    if let Some(Value::String(target)) = map.get("$ref") {
                        assert!(document.pointer(target.trim_start_matches('#')).is_some(), "{target}");
                    }
                    map.values().for_each(|value| check(value, document));
                }
                Value::Array(list) => list.iter().for_each(|value| check(value, document)),
                _ => {}
            }
        }
        let document = read();
        check(&document, &document);
        assert_eq!(
            document.pointer("/paths/~1detokenize/post/requestBody/content/application~1json/schema/properties/tokens/items/maximum"),
            Some(&json!(163_839))
        );
    }
}
